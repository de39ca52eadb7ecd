"""Jobs that come again: what becomes of a record whose decode worker has died."""

from typing import Any

import msgspec
import pytest

from pdq.core.errors import AttemptsExhausted, HandoffRejected, LeaseHeld, PeerLost, RequestCancelled, StreamLost
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import DecodeJob, OutputAnswer, Policy, PrefillJob, Sampling, decode
from pdq.ports import Queue
from pdq.stages.finish import Finisher
from pdq.stages.recover import Recovery, kept
from tests.kv import until
from tests.unit.stages.parts import MODEL, REPLY_TO, TTL_MS, World

PROMPT = tuple(range(1, 11))


def job_of(key: RecordKey, output: tuple[int, ...] = (), **sampling: Any) -> DecodeJob:
    prefill = PrefillJob(
        MODEL,
        REPLY_TO,
        prompt_token_ids=PROMPT,
        request_id=key.request_id,
        output_so_far=output,
        sampling=Sampling(seed=1, **sampling),
    )
    return DecodeJob(prefill, "prefill-0", attempt=1)


async def published(world: World, queue: Queue) -> bytes | None:
    deliveries = await world.queue.pull(queue, MODEL, limit=1, wait_s=0.01)
    return deliveries[0].data if deliveries else None


async def test_while_its_worker_lives_a_job_that_comes_again_has_to_wait() -> None:
    world = World()
    record = await world.fetched()
    with pytest.raises(LeaseHeld) as caught:
        await Recovery(world.parts).claimed_before(job_of(record.key), record.key)
    assert caught.value.remaining_ms == TTL_MS


@pytest.mark.parametrize(
    ("policy", "outlives"), [(Policy(retain="done"), False), (Policy(), True)], ids=["source", "tier"]
)
async def test_kv_that_is_kept_can_be_claimed_again_at_once(policy: Policy, outlives: bool) -> None:
    world = World()
    record = await world.fetched(policy, outlives=outlives)
    world.now_ms += TTL_MS
    with pytest.raises(LeaseHeld) as caught:
        await Recovery(world.parts).claimed_before(job_of(record.key), record.key)
    assert caught.value.remaining_ms == 0
    now = await world.read(record.key)
    assert (now.state, now.sink, now.streams_lost, now.streaming) == (State.READY, None, 1, True)
    assert kept(now, world.now_ms)
    assert now.digest == "d"


async def test_kv_of_a_source_that_is_gone_as_well_is_computed_again_behind_what_the_client_has() -> None:
    world = World()
    record = await world.fetched(Policy(retain="done"))
    world.now_ms += 10 * TTL_MS
    await world.listen(OutputAnswer(record.key.request_id, True, (65, 66, 67)))
    await Recovery(world.parts).claimed_before(job_of(record.key), record.key)
    now = await world.read(record.key)
    assert (now.state, now.emitted, now.streaming, now.locators) == (State.QUEUED, 3, False, ())
    data = await published(world, Queue.PREFILL)
    assert data is not None
    assert decode(data, PrefillJob).output_so_far == (65, 66, 67)


async def test_a_sequence_that_killed_as_many_workers_as_it_may_is_not_offered_again() -> None:
    world = World()
    record = await world.fetched(Policy(retain="done", max_attempts=1))
    world.now_ms += TTL_MS
    with pytest.raises(AttemptsExhausted):
        await Recovery(world.parts).claimed_before(job_of(record.key), record.key)


async def test_a_stream_that_may_not_be_resumed_is_lost_though_its_kv_is_kept() -> None:
    world = World()
    record = await world.fetched(Policy(retain="done", on_stream_failure="fail"))
    world.now_ms += TTL_MS
    with pytest.raises(StreamLost):
        await Recovery(world.parts).claimed_before(job_of(record.key), record.key)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [((65, 66, 67), (65, 66, 67)), ((65,), (65,)), ((), (65,))],
    ids=["more than the record knows", "as much", "less: the first token is on its way"],
)
async def test_what_the_client_has_is_what_it_says(answer: tuple[int, ...], expected: tuple[int, ...]) -> None:
    world = World()
    record = await world.fetched()
    await world.listen(OutputAnswer(record.key.request_id, True, answer))
    assert await Recovery(world.parts).sent(job_of(record.key), record) == expected


@pytest.mark.parametrize(
    "answer",
    [(64, 66), (65, 70_000), (65, *([66] * 20))],
    ids=["another first token", "a token outside the vocabulary", "more than was ever asked for"],
)
async def test_an_answer_that_cannot_be_true_goes_into_no_model(answer: tuple[int, ...]) -> None:
    world = World()
    record = await world.fetched()
    await world.listen(OutputAnswer(record.key.request_id, True, answer))
    with pytest.raises(StreamLost, match="never sent"):
        await Recovery(world.parts).sent(job_of(record.key), record)


async def test_an_owner_that_wants_no_more_cancels() -> None:
    world = World()
    record = await world.fetched()
    await world.listen(OutputAnswer(record.key.request_id, False))
    with pytest.raises(RequestCancelled):
        await Recovery(world.parts).sent(job_of(record.key), record)


async def test_nobody_is_asked_before_a_decode_worker_has_begun() -> None:
    world = World()
    key = await world.queued()
    begun = await world.ledger.acquire(key, Event.BEGIN, "prefill-0", TTL_MS)
    record = await world.ledger.apply(key, Event.READY, epoch=begun.epoch)
    assert await Recovery(world.parts).sent(job_of(key, (65, 66)), record) == (65, 66)


async def test_a_worker_that_leaves_says_in_the_job_what_it_has_sent() -> None:
    world = World()
    record = await world.fetched(Policy(retain="done"))
    recovery = Recovery(world.parts)
    assert record.sink is not None
    await recovery.pass_on(job_of(record.key), record, record.sink.epoch, [65, 66, 67])
    now = await world.read(record.key)
    assert (now.state, now.emitted, now.streaming) == (State.READY, 3, False)
    data = await published(world, Queue.DECODE)
    assert data is not None
    assert await recovery.sent(decode(data, DecodeJob), now) == (65, 66, 67)


async def test_an_output_that_is_complete_needs_no_engine_to_be_ended() -> None:
    world = World()
    key = await world.queued(max_new_tokens=3)
    begun = await world.ledger.acquire(key, Event.BEGIN, "decode-1", TTL_MS)
    job = job_of(key, (65, 66, 67)).job
    await world.listen()
    assert await Finisher(world.parts).finish_early(job, begun.record, begun.epoch)
    assert (await world.read(key)).state is State.DONE
    await until(lambda: bool(world.got))
    (entry,) = world.got
    assert entry.end is not None
    assert (entry.seq, entry.tokens, entry.end.finish_reason) == (3, (), "length")
    assert entry.end.usage is not None
    assert entry.end.usage.completion_tokens == 3


async def test_an_output_that_goes_on_is_not_ended() -> None:
    world = World()
    key = await world.queued(max_new_tokens=4)
    begun = await world.ledger.acquire(key, Event.BEGIN, "decode-1", TTL_MS)
    assert not await Finisher(world.parts).finish_early(job_of(key, (65, 66, 67)).job, begun.record, begun.epoch)
    assert (await world.read(key)).state is State.PREFILLING


@pytest.mark.parametrize("streaming", [False, True], ids=["a handoff", "a stream that had begun"])
async def test_rejecting_is_for_handoffs_and_not_for_streams(streaming: bool) -> None:
    world = World()
    record = await world.fetched(Policy(on_handoff_failure="reject", retain="done"))
    assert record.sink is not None
    await world.listen(OutputAnswer(record.key.request_id, True, (65, 66)))
    lost = PeerLost("no locator served it")
    record = msgspec.structs.replace(record, streaming=streaming)
    assert record.sink is not None
    if streaming:
        await Recovery(world.parts).kv_lost(job_of(record.key), record, record.sink.epoch, lost)
        assert (await world.read(record.key)).state is State.QUEUED
    else:
        with pytest.raises(HandoffRejected):
            await Recovery(world.parts).kv_lost(job_of(record.key), record, record.sink.epoch, lost)
