"""KV that outlives its source: written through as it is computed, or moved when the source must leave or is full."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from pdq.core import names
from pdq.core.messages import Drain, Failpoints, Sampling
from tests.e2e.requester import Stream, kill_the_sender, request, tell
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

PROMPT = "A tier is what is left when the source has gone. " * 10
SAMPLING = Sampling(temperature=1.0, seed=4, max_tokens=30)
SLOW = {**SHORT_LEASES, "PDQ_SIM_STEP_MS": "40", "PDQ_FAILPOINTS": "on"}


@pytest.fixture(scope="module", params=["redis", "shm"])
def through(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    env = {**SLOW, "PDQ_TRANSPORT_WRITE_THROUGH": request.param}
    options = ("--engine", "sim", "--decode", "2")
    with running(tmp_path_factory.mktemp("stack") / "state", *options, env=env) as stack:
        yield stack, request.param


def at_rest(stack: Stack) -> bool:
    now = [worker.occupancy for worker in stack.workers()]
    return not stack.live() and all(it.free_blocks == it.total_blocks and it.held == it.running == 0 for it in now)


def ways(stack: Stack, stream: Stream) -> list[list[str]]:
    """Over which transport each decode worker of each attempt got its KV."""
    told = stack.cli("trace", stream.request_id)["attempts"]
    return [[decoding["transport"] for decoding in attempt["decodings"]] for attempt in told]


def delay_the_fetch(stack: Stack, milliseconds: int = 3000) -> None:
    for worker in stack.workers("decode"):
        tell(stack, worker.worker, Failpoints(f"decode.delivered=delay:{milliseconds}*1"))


def tier_is_empty(stack: Stack) -> bool:
    with redis.Redis.from_url(stack.environ["PDQ_REDIS_URL"]) as client:
        return not list(client.scan_iter(names.TIER_KEYS))


def test_a_source_that_dies_before_the_fetch_costs_nothing(through: tuple[Stack, str]) -> None:
    stack, tier = through
    undisturbed = request(stack, PROMPT, SAMPLING)
    assert ways(stack, undisturbed) == [["ucx"]]
    delay_the_fetch(stack)
    stream = request(stack, PROMPT, SAMPLING, at={1: kill_the_sender})
    assert stream.whole == undisturbed.whole
    assert ways(stack, stream) == [[tier]]
    wait_for(lambda: len(stack.workers()) == 3 and at_rest(stack), "the prefill worker is back", 60)


def test_a_sink_that_dies_in_the_middle_costs_no_prefill(through: tuple[Stack, str]) -> None:
    """The source has let go of its own memory as soon as it was fetched; the copy in the tier is still there."""
    stack, tier = through
    wait_for(lambda: len(stack.workers()) == 3 and at_rest(stack), "all workers, nothing held", 60)
    undisturbed = request(stack, PROMPT, SAMPLING)
    stream = request(stack, PROMPT, SAMPLING, at={10: kill_the_sender})
    assert stream.whole == undisturbed.whole
    assert ways(stack, stream) == [["ucx", tier]]
    wait_for(lambda: len(stack.workers()) == 3 and at_rest(stack), "all workers, nothing held", 60)


@pytest.fixture
def spilling(tmp_path: Path) -> Iterator[Stack]:
    """One prefill worker with room for two prompts."""
    env = {**SLOW, "PDQ_TRANSPORT_SPILL": "redis", "PDQ_ENGINE_KV_TOKENS": "1024"}
    with running(tmp_path / "state", "--engine", "sim", env=env) as stack:
        yield stack


def test_a_prefill_worker_that_leaves_moves_what_nobody_has_fetched(spilling: Stack) -> None:
    async def send_away(system: Any, stream: Stream) -> None:
        await system.bus.control(names.worker_subject(stream.workers[-1]), Drain(deadline_ms=300))

    undisturbed = request(spilling, PROMPT, SAMPLING)
    delay_the_fetch(spilling)
    stream = request(spilling, PROMPT, SAMPLING, at={1: send_away})
    assert stream.whole == undisturbed.whole
    assert ways(spilling, stream) == [["redis"]]
    wait_for(lambda: tier_is_empty(spilling), "the tier is empty", 30)


def test_kv_that_nobody_fetches_makes_room_for_those_who_wait(spilling: Stack) -> None:
    """With no decode worker awake, four prompts are computed where only two fit."""
    (sink,) = spilling.workers("decode")
    begun: list[str] = []

    async def wake(_: Any, stream: Stream) -> None:
        begun.append(stream.request_id)
        if len(begun) == 4:
            os.kill(sink.pid, signal.SIGCONT)

    os.kill(sink.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as threads:
            streams = list(
                threads.map(lambda n: request(spilling, PROMPT[n:], SAMPLING, at={1: wake}), range(4), timeout=120)
            )
    finally:
        os.kill(sink.pid, signal.SIGCONT)
    assert all(stream.end is not None and stream.end.state == "done" for stream in streams)
    served = [ways(spilling, stream) for stream in streams]
    assert [len(attempts) for attempts in served] == [1, 1, 1, 1]
    assert sum(attempts[0][-1] == "redis" for attempts in served) >= 2
    wait_for(lambda: at_rest(spilling) and tier_is_empty(spilling), "nothing is held anywhere", 60)
