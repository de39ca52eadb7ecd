"""The running product with the sim engine: every role a process of its own, real servers, real transports."""

import asyncio
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from pdq.adapters.processes import free_port
from pdq.core.lease import Lease
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for


@pytest.fixture(scope="module")
def two_and_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--engine", "sim", "--prefill", "2", "--decode", "2")
    env = {**SHORT_LEASES, "PDQ_SIM_STEP_MS": "2", "PDQ_SIM_PREFILL_MS_PER_TOKEN": "0.2"}
    with running(tmp_path_factory.mktemp("stack") / "state", *options, env=env) as stack:
        wait_for(lambda: len(stack.workers()) == 4, "all four workers registered")
        yield stack


async def stream(client: httpx.AsyncClient, stack: Stack, body: dict[str, object], cut_after: float | None) -> str:
    """The streamed text, or what came of it until the client cut it off."""
    text = ""
    try:
        async with asyncio.timeout(cut_after):
            async with client.stream("POST", f"{stack.url}/v1/completions", json={**body, "stream": True}) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = httpx.Response(200, text=line[6:]).json()
                        assert "error" not in chunk, chunk
                        text += "".join(choice["text"] for choice in chunk["choices"])
    except TimeoutError:
        assert cut_after is not None
    return text


def nothing_is_held(stack: Stack) -> bool:
    now = [worker.occupancy for worker in stack.workers()]
    return not stack.live() and all(it.free_blocks == it.total_blocks and it.held == it.running == 0 for it in now)


async def test_all_workers_of_both_pools_share_the_queues(two_and_two: Stack) -> None:
    before = {worker.worker: worker.occupancy.served for worker in two_and_two.workers()}
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "sim", "max_tokens": 20}
        texts = await asyncio.gather(
            *(stream(client, two_and_two, body | {"prompt": f"prompt {n} " * 20}, None) for n in range(40))
        )
    assert all(len(text) == 20 for text in texts)
    # The registry shows a worker's own account as of its last heartbeat.
    wait_for(
        lambda: all(worker.occupancy.served > before[worker.worker] for worker in two_and_two.workers()),
        "every worker has served",
    )


async def test_nothing_is_left_after_200_requests_of_which_50_were_cut_off(two_and_two: Stack) -> None:
    choose = random.Random(7)
    cut = set(choose.sample(range(200), 50))
    gate = asyncio.Semaphore(24)

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:

        async def one(number: int) -> None:
            body = {"model": "sim", "max_tokens": choose.randint(1, 60), "prompt": "x" * choose.randint(1, 1500)}
            async with gate:
                text = await stream(client, two_and_two, body, choose.uniform(0.001, 0.4) if number in cut else None)
                if number not in cut:
                    assert len(text) == body["max_tokens"]

        await asyncio.gather(*(one(number) for number in range(200)))
    wait_for(lambda: nothing_is_held(two_and_two), "leases empty and all blocks free")
    assert two_and_two.cli("leases") == []
    (model,) = two_and_two.cli("status")["models"]
    assert not model["records"]
    assert all(depth == {"waiting": 0, "taken": 0} for depth in model["queues"].values()), model["queues"]


async def test_ledger_and_tiers_hold_nothing_but_ended_records_under_ttl(two_and_two: Stack) -> None:
    import redis.asyncio as redis

    client = redis.Redis.from_url(two_and_two.environ["PDQ_REDIS_URL"], decode_responses=True)
    async for key in client.scan_iter("pdq:*"):
        if ":record:" in key:
            assert await client.hget(key, "state") in {"done", "failed", "cancelled", "expired"}
        if ":record:" in key or ":log:" in key or ":kv:" in key:
            assert 0 < await client.ttl(key) <= 600
    await client.aclose()


def test_a_trace_tells_who_did_what(two_and_two: Stack) -> None:
    answer = two_and_two.complete("tell me", max_tokens=12)
    told = two_and_two.cli("trace", answer["request_id"])
    assert told["state"] == "done"
    (attempt,) = told["attempts"]
    (decoding,) = attempt["decodings"]
    assert attempt["worker"].startswith("prefill-")
    assert decoding["worker"].startswith("decode-")
    assert decoding["transport"] == "ucx"
    assert decoding["bytes"] > 0
    assert told["first_token_ms"] > 0


def test_one_token_needs_no_decode_job(two_and_two: Stack) -> None:
    answer = two_and_two.complete("just one", max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    (attempt,) = two_and_two.cli("trace", answer["request_id"])["attempts"]
    assert not attempt["decodings"]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Stack]:
    """Two of each, slow enough to be hit in the middle of a prompt or before the first step."""
    env = {**SHORT_LEASES, "PDQ_SIM_STEP_MS": "100", "PDQ_SIM_PREFILL_MS_PER_TOKEN": "4"}
    options = ("--engine", "sim", "--prefill", "2", "--decode", "2")
    with running(tmp_path / "state", *options, env=env) as stack:
        wait_for(lambda: len(stack.workers()) == 4, "all four workers registered")
        yield stack


def in_background(stack: Stack, **body: object) -> "tuple[threading.Thread, list[dict[str, object]]]":
    answers: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: answers.append(stack.complete(**body)))  # type: ignore[arg-type]
    thread.start()
    return thread, answers


def holder(stack: Stack, side: str, state: str) -> int:
    """The process that holds the ``side`` lease of the one live request, once that is in ``state``; else 0."""
    for record in stack.live():
        lease: Lease | None = getattr(record, side)
        if record.state == state and lease is not None:
            (pid,) = [info.pid for info in stack.workers() if info.worker == lease.worker]
            return pid
    return 0


def test_a_prefill_worker_killed_in_the_middle_of_a_prompt_costs_a_retry_and_nothing_else(slow: Stack) -> None:
    undisturbed = slow.complete("k" * 600, max_tokens=10, temperature=0)
    thread, answers = in_background(slow, prompt="k" * 600, max_tokens=10, temperature=0)
    victim = wait_for(lambda: holder(slow, "source", "prefilling"), "a prefill worker has begun")
    psutil.Process(victim).kill()
    thread.join(60)
    (answer,) = answers
    assert answer["choices"] == undisturbed["choices"]
    told = slow.cli("trace", str(answer["request_id"]))
    assert [attempt["outcome"] for attempt in told["attempts"]][-1] != ""
    assert len(told["attempts"]) == 2
    wait_for(lambda: nothing_is_held(slow), "nothing is held")


def test_a_decode_worker_killed_before_its_first_token_does_not_lose_the_request(slow: Stack) -> None:
    undisturbed = slow.complete("d" * 40, max_tokens=30, temperature=0)
    thread, answers = in_background(slow, prompt="d" * 40, max_tokens=30, temperature=0)
    victim = wait_for(lambda: holder(slow, "sink", "fetched") or holder(slow, "sink", "ready"), "a claim")
    psutil.Process(victim).send_signal(signal.SIGKILL)
    thread.join(60)
    (answer,) = answers
    assert answer["choices"] == undisturbed["choices"]
    assert answer["usage"] == undisturbed["usage"]
    wait_for(lambda: nothing_is_held(slow), "nothing is held")


def test_a_second_stack_in_the_same_state_directory_is_refused(two_and_two: Stack) -> None:
    with (
        pytest.raises(AssertionError, match="another pdq is running"),
        running(two_and_two.state_dir, "--engine", "sim"),
    ):
        pass


def test_a_taken_port_is_named(two_and_two: Stack, tmp_path: Path) -> None:
    port = two_and_two.url.rsplit(":", 1)[1]
    with pytest.raises(AssertionError, match=port), running(tmp_path / "state", "--engine", "sim", "--port", port):
        pass
    assert free_port()
