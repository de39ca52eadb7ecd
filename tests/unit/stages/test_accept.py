"""Jobs of producers at the gate: who is turned away is told, once, and its job is gone; who has a record is not judged."""

import asyncio
from typing import Any

import pytest

from pdq.core import delivery as verdicts
from pdq.core.errors import TurnedAway, Unavailable
from pdq.core.messages import PrefillJob, TokenFrame, encode
from pdq.core.settings import AdmissionSettings
from pdq.ports import Delivery, Queue
from pdq.stages.accept import Accept
from tests.unit.stages.parts import MODEL, REPLY_TO, World

ONE_EACH = AdmissionSettings(tenant_requests=1)


async def delivered(world: World, tenant: str = "acme") -> Delivery:
    """A producer's job, in a worker's hands."""
    job = PrefillJob(MODEL, REPLY_TO, prompt_token_ids=(1, 2, 3), tenant=tenant, client_id="mine")
    await world.queue.publish(Queue.PREFILL, MODEL, encode(job))
    (delivery,) = await world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=1)
    return delivery


async def test_a_refused_job_tells_its_requester_why_and_that_it_may_try_again() -> None:
    world = World(limits=ONE_EACH)
    await world.listen()
    accept = Accept(world.parts)
    await accept.job(await delivered(world), Queue.PREFILL)
    with pytest.raises(TurnedAway):
        await accept.job(await delivered(world), Queue.PREFILL)
    await asyncio.sleep(0)
    (told,) = world.got
    assert told.client_id == "mine"
    assert told.end is not None
    assert told.end.state == "failed"
    assert told.end.error is not None
    assert (told.end.error.code, told.end.error.retryable) == ("tenant_limit", True)
    assert "try again in about 1 s" in told.end.error.message
    assert len(await world.ledger.live(MODEL)) == 1


def test_a_refused_job_is_acknowledged_and_no_dead_letter() -> None:
    assert verdicts.verdict(TurnedAway("too much"), 1) == verdicts.Ack()


async def test_a_redelivered_job_that_has_a_record_is_not_judged_again() -> None:
    world = World(limits=ONE_EACH)
    await world.listen()
    accept, delivery = Accept(world.parts), await delivered(world)
    _, key = await accept.job(delivery, Queue.PREFILL)
    again, same = await accept.job(delivery, Queue.PREFILL)
    assert same == key
    assert again.request_id == key.request_id
    assert world.got == []


async def test_a_refusal_that_cannot_be_told_leaves_the_job_to_be_delivered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(limits=ONE_EACH)
    accept = Accept(world.parts)
    await accept.job(await delivered(world), Queue.PREFILL)

    async def away(_: str, __: TokenFrame) -> None:
        raise Unavailable("the broker does not answer")

    delivery = await delivered(world)
    with monkeypatch.context() as patched:
        patched.setattr(world.bus, "send", away)
        with pytest.raises(Unavailable) as caught:
            await accept.job(delivery, Queue.PREFILL)
    assert isinstance(verdicts.verdict(caught.value, 1), verdicts.Retry)
    await world.listen()
    with pytest.raises(TurnedAway):  # delivered again, judged again
        await accept.job(delivery, Queue.PREFILL)
    await asyncio.sleep(0)
    assert len(world.got) == 1


async def test_a_job_is_not_refused_because_the_ledger_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.listen()

    async def away(*_: Any) -> None:
        raise Unavailable("the ledger does not answer")

    monkeypatch.setattr(world.ledger, "load", away)
    with pytest.raises(Unavailable) as caught:
        await Accept(world.parts).job(await delivered(world), Queue.PREFILL)
    assert isinstance(verdicts.verdict(caught.value, 1), verdicts.Retry)
    await asyncio.sleep(0)
    assert world.got == []
