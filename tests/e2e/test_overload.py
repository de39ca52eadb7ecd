"""More load than capacity: who is let in is served, who is not is told at once, and classes and tenants get their due."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest

from pdq.connect import Connected
from pdq.core.handoff import State
from pdq.core.messages import Sampling
from pdq.ports import Record
from tests.e2e.audits import assert_clean
from tests.e2e.crowd import Answer, Ask, Crowd
from tests.e2e.requester import request
from tests.e2e.stack import SHORT_LEASES, Stack, running

SLOW_PREFILL = {**SHORT_LEASES, "PDQ_SIM_PREFILL_MS_PER_TOKEN": "2", "PDQ_SIM_STEP_MS": "5"}
"""A prompt of 50 tokens takes 0.1 s."""
SLOW_DECODE = {"PDQ_SIM_STEP_MS": "25", "PDQ_ENGINE_MAX_RUNNING": "8"}
"""Eight tokens take 0.2 s, eight requests at a time. Hundreds of leases are kept meanwhile, which must not be short where
the machine is busy."""
SMALL_QUEUE = {**SLOW_PREFILL, "PDQ_ADMISSION_INTERACTIVE_QUEUED_REQUESTS": "20"}

INTERACTIVE_KEY = "key-of-acme-0123456789"
BATCH_KEY = "key-of-nightly-0123456789"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("slow") / "state", "--engine", "sim", env=SLOW_PREFILL) as stack:
        yield stack


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("narrow") / "state", "--engine", "sim", env=SMALL_QUEUE) as stack:
        yield stack


def is_refusal(answer: Answer) -> bool:
    error = answer.body.get("error", {})
    return (
        answer.status in (429, 503)
        and int(answer.headers["retry-after"]) >= 1
        and error["code"] in ("overloaded", "tenant_limit", "unavailable")
        and bool(error["message"])
        and bool(error["type"])
    )


async def until_queued(stack: Stack, requests: int) -> None:
    """Until so many wait for prefill."""
    async with asyncio.timeout(60):
        while True:
            load = await asyncio.to_thread(stack.inside.ask, lambda system: system.ledger.load(stack.model))
            if load.requests[State.QUEUED] >= requests:
                return
            await asyncio.sleep(0.02)


def test_ten_times_the_capacity_is_refused_early_and_what_is_accepted_ends_in_time_and_complete(slow: Stack) -> None:
    usual = Ask(timeout_s=4)

    async def overload() -> tuple[Sequence[Answer], Answer]:
        people = Crowd(slow)
        await people.warm_up(usual)
        return await people.at_rate(usual, per_s=100, seconds=4), await people.ask(usual)

    answers, after = asyncio.run(overload())
    accepted = [answer for answer in answers if answer.accepted]
    refused = [answer for answer in answers if is_refusal(answer)]
    assert len(accepted) + len(refused) == len(answers), Counter(it.status for it in answers)
    assert len(accepted) >= 20
    assert len(refused) >= len(answers) / 2
    assert {answer.tokens for answer in accepted} == {usual.max_tokens}
    assert after.accepted
    assert_clean(slow)


def unfinished_when_urgent_ended(stack: Stack) -> tuple[int, list[Answer]]:
    """Of 500 batch requests that wait, how many had not ended when ten interactive ones, asked later, had."""

    async def race() -> tuple[list[Answer], list[Answer]]:
        people = Crowd(stack)
        await people.ask(Ask())
        waiting = [asyncio.create_task(people.ask(Ask(priority="batch"))) for _ in range(500)]
        await until_queued(stack, 300)
        urgent = [await people.ask(Ask()) for _ in range(10)]
        return urgent, await asyncio.gather(*waiting)

    urgent, batch = asyncio.run(race())
    assert all(answer.accepted for answer in urgent)
    return sum(answer.ended > max(it.ended for it in urgent) for answer in batch), batch


def test_interactive_requests_pass_a_batch_that_waits_for_prefill(slow: Stack) -> None:
    unfinished, batch = unfinished_when_urgent_ended(slow)
    assert unfinished >= 250
    assert not [answer.body for answer in batch if not answer.accepted]
    assert_clean(slow)


def test_interactive_requests_pass_a_batch_that_waits_for_decode(tmp_path: Path) -> None:
    with running(tmp_path / "state", "--engine", "sim", env=SLOW_DECODE) as stack:
        unfinished, batch = unfinished_when_urgent_ended(stack)
        assert unfinished >= 200
        assert not [answer.body for answer in batch if not answer.accepted]
        assert_clean(stack)


def test_a_batch_is_not_starved_by_interactive_requests_that_never_cease(narrow: Stack) -> None:
    async def both() -> list[Answer]:
        people = Crowd(narrow)
        flood = asyncio.create_task(people.at_rate(Ask(), per_s=50, seconds=6))
        await until_queued(narrow, 10)
        batch = await people.at_once([Ask(priority="batch")] * 3)
        assert not flood.done()
        await flood
        return batch

    assert all(answer.accepted for answer in asyncio.run(both()))


def test_a_tenant_that_floods_meets_its_limit_and_another_gets_in(narrow: Stack) -> None:
    async def flood() -> tuple[Sequence[Answer], Sequence[Answer]]:
        people = Crowd(narrow)
        flooding = asyncio.create_task(people.at_rate(Ask(tenant="flood"), per_s=80, seconds=4))
        await until_queued(narrow, 15)
        calm = [await people.ask(Ask(tenant="calm")) for _ in range(2)]
        assert not flooding.done()
        return await flooding, calm

    flooding, calm = asyncio.run(flood())
    assert all(answer.accepted for answer in calm)
    refused = [answer for answer in flooding if not answer.accepted]
    assert refused
    assert all(is_refusal(answer) and answer.code == "tenant_limit" for answer in refused)


def test_a_producer_over_nats_is_told_that_it_is_refused_and_its_job_is_no_dead_letter(tmp_path: Path) -> None:
    # A producer's job is judged when a worker has it in hands: what is scarce there is decode memory.
    env = {
        **SLOW_DECODE,
        "PDQ_SIM_STEP_MS": "200",
        "PDQ_ENGINE_KV_TOKENS": "128",
        "PDQ_ADMISSION_DECODE_OVERCOMMIT": "1",
    }
    with running(tmp_path / "state", "--engine", "sim", env=env) as stack:

        async def occupied() -> None:
            holding = asyncio.create_task(Crowd(stack).ask(Ask(prompt_tokens=40, max_tokens=50)))
            await until_fetched(stack)
            refused = await asyncio.to_thread(request, stack, [65] * 40, Sampling(max_tokens=50))
            assert refused.end is not None
            assert refused.end.state == "failed"
            assert refused.end.error is not None
            assert (refused.end.error.code, refused.end.error.retryable) == ("overloaded", True)
            assert "try again" in refused.end.error.message
            assert not holding.done()
            assert (await holding).accepted

        asyncio.run(occupied())
        accepted = request(stack, [65] * 40, Sampling(max_tokens=3))
        assert accepted.end is not None
        assert accepted.end.state == "done"
        assert stack.inside.ask(lambda system: system.queue.dead(stack.model)) == 0
        assert_clean(stack)


async def _record(request_id: str, system: Connected) -> Record | None:
    return await system.ledger.find(request_id)


async def until_fetched(stack: Stack) -> None:
    async with asyncio.timeout(60):
        while not [record for record in await asyncio.to_thread(stack.live) if record.state is State.FETCHED]:
            await asyncio.sleep(0.02)


def test_a_key_says_who_asks_and_which_class_it_may_ask_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# tenants of the test\n{INTERACTIVE_KEY} acme\n{BATCH_KEY} nightly batch\n")
    env = {**SHORT_LEASES, "PDQ_BRIDGE_API_KEYS_FILE": str(keys)}
    with running(tmp_path / "state", "--engine", "sim", env=env) as stack:
        body = {"model": "sim", "prompt": "hello", "max_tokens": 3, "user": "somebody"}

        def ask(key: str | None, **more: str) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return httpx.post(f"{stack.url}/v1/completions", json=body | more, headers=headers, timeout=30)

        for stranger in (ask(None), ask("key-of-nobody-0123456789"), httpx.get(f"{stack.url}/v1/models")):
            assert stranger.status_code == 401
            assert stranger.headers["www-authenticate"] == "Bearer"
            assert stranger.json()["error"]["code"] == "invalid_api_key"
        for open_to_all in ("/health/live", "/health/ready", "/metrics"):
            assert httpx.get(f"{stack.url}{open_to_all}").status_code == 200
        for key, tenant, priority in ((INTERACTIVE_KEY, "acme", "interactive"), (BATCH_KEY, "nightly", "batch")):
            answer = ask(key)
            assert answer.status_code == 200
            found = stack.inside.ask(partial(_record, answer.headers["x-request-id"]))
            assert found is not None
            assert (found.tenant, found.priority) == (tenant, priority)
        assert ask(INTERACTIVE_KEY, priority="batch").status_code == 200
        too_good = ask(BATCH_KEY, priority="interactive")
        assert too_good.status_code == 403
        assert too_good.json()["error"]["code"] == "priority_not_allowed"
        assert INTERACTIVE_KEY not in stack.logs()
        assert BATCH_KEY not in stack.logs()
