"""Workers leave, come back and are replaced, under load, as operators do it: nothing is lost, and nobody notices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdq.core.handoff import State
from pdq.core.messages import Failpoints
from pdq.ports import Record, WorkerInfo
from tests.e2e.audits import assert_clean
from tests.e2e.load import under_load
from tests.e2e.requester import tell
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

pytestmark = pytest.mark.slow

ENV = {
    **SHORT_LEASES,
    "PDQ_SIM_STEP_MS": "5",
    "PDQ_SIM_PREFILL_MS_PER_TOKEN": "0.2",
    "PDQ_SCALING_PERIOD_S": "0.5",
    "PDQ_DRAIN_DEADLINE_S": "40",
    "PDQ_FAILPOINTS": "on",
}
OPTIONS = ("--engine", "sim", "--prefill", "2", "--decode", "2")
PROMPT = "Some KV waits for somebody who wants it. " * 20
ASKED = {"max_tokens": 20, "min_tokens": 20, "temperature": 1.0, "seed": 3}


def complete_stack(stack: Stack) -> Stack:
    wait_for(lambda: ready(stack, "prefill") == ready(stack, "decode") == 2, "two and two workers are ready", 60)
    return stack


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack") / "state", *OPTIONS, env=ENV) as stack:
        yield stack


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {**ENV, "PDQ_TRANSPORT_SPILL": "redis"}
    with running(tmp_path_factory.mktemp("stack") / "state", *OPTIONS, env=env) as stack:
        yield stack


@pytest.fixture
def stack(whole: Stack) -> Stack:
    return complete_stack(whole)


@pytest.fixture
def spilling(tiered: Stack) -> Stack:
    return complete_stack(tiered)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def ready(stack: Stack, pool: str) -> int:
    return sum(it.state == "ready" for it in stack.workers(pool))


def found(stack: Stack, worker: str) -> WorkerInfo | None:
    return next((it for it in stack.workers() if it.worker == worker), None)


def state_of(stack: Stack, worker: str) -> str | None:
    info = found(stack, worker)
    return info.state if info is not None else None


def answers(stack: Stack) -> bool:
    try:
        return httpx.get(f"{stack.url}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


def held_by(stack: Stack, worker: str) -> int:
    account = stack.inside.ask(lambda system: system.bus.ask_account(worker, 2.0))
    return sum(it.doing == "held" for it in account.holdings) if account else 0


def longest_of(stack: Stack, worker: str) -> int:
    """For how many milliseconds it has been at the same thing, for some request."""
    account = stack.inside.ask(lambda system: system.bus.ask_account(worker, 2.0))
    return max((it.for_ms for it in account.holdings), default=0) if account else 0


def the_one(stack: Stack, state: State, *, claimed: bool = False) -> Record:
    """The live request, once it is there."""
    [record] = wait_for(
        lambda: [it for it in stack.live() if it.state is state and (it.sink is not None or not claimed)],
        f"a request is {state}",
    )
    return record


def ways(stack: Stack, answer: dict[str, Any]) -> list[list[str]]:
    """Over which transport the decode workers of each attempt got its KV."""
    told = stack.cli("trace", answer["request_id"])["attempts"]
    return [[decoding["transport"] for decoding in attempt["decodings"]] for attempt in told]


# --- Under load -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_worker_is_drained_and_called_back_under_load(stack: Stack, pool: str) -> None:
    with under_load(stack) as load:
        worker = stack.workers(pool)[0].worker
        (left,) = stack.cli("drain", worker)["workers"]
        assert (left["worker"], left["state"]) == (worker, "left")
        load.another_round()
        assert found(stack, worker) is None
        assert stack.cli("undrain", worker)["called_back"] == [worker]
        wait_for(lambda: state_of(stack, worker) == "ready", "it is back", 60)
        load.another_round()
        wait_for(lambda: (it := found(stack, worker)) and it.occupancy.served, "it serves again")


@pytest.mark.parametrize(
    ("pool", "place", "state"),
    [("prefill", "prefill.before_ready", State.PREFILLING), ("decode", "decode.before_fetched", State.READY)],
    ids=["prefill", "decode"],
)
def test_a_worker_that_still_drains_stays_when_the_drain_is_taken_back(
    stack: Stack, background: ThreadPoolExecutor, pool: str, place: str, state: State
) -> None:
    """One of its requests takes so long that it cannot have left before, however slow the machine."""
    for info in stack.workers(pool):
        tell(stack, info.worker, Failpoints(f"{place}=delay:120000*1"))
    endless = background.submit(stack.complete, PROMPT, **ASKED)
    record = the_one(stack, state, claimed=pool == "decode")
    lease = record.sink or record.source
    assert lease is not None
    worker = lease.worker
    wait_for(lambda: longest_of(stack, worker) > 500, "its request takes long")
    for info in stack.workers(pool):
        tell(stack, info.worker, Failpoints(""))
    with under_load(stack) as load:
        (draining,) = stack.cli("drain", worker, "--no-wait")["workers"]
        assert draining["state"] == "draining"
        load.another_round()
        before = found(stack, worker)
        assert before is not None
        assert stack.cli("undrain", worker)["serving"] == [worker]
        load.another_round()
        wait_for(
            lambda: (it := found(stack, worker)) and it.occupancy.served > before.occupancy.served, "it pulls again"
        )
        after = found(stack, worker)
        assert after is not None
        assert (after.pid, after.state) == (before.pid, "ready")
        stack.cli("cancel", record.key.request_id)
        assert endless.exception(60) is not None


def test_both_pools_are_restarted_one_by_one_under_load(stack: Stack) -> None:
    before = {it.worker for it in stack.workers()}
    with under_load(stack):
        outcome = stack.cli("restart", "all", "--one-by-one")
        assert {it["worker"] for it in outcome["restarted"]} == before
    after = stack.workers()
    assert len(after) == 4
    assert not before & {it.worker for it in after}


def test_a_pool_is_drained_and_called_back_while_requests_wait(stack: Stack, background: ThreadPoolExecutor) -> None:
    outcome = stack.cli("drain", "prefill")
    assert {it["state"] for it in outcome["workers"]} == {"left"}
    assert outcome["by"]
    waiting = background.submit(stack.complete, PROMPT, **ASKED)
    the_one(stack, State.QUEUED)
    assert not stack.workers("prefill")
    assert stack.cli("undrain", "prefill")["released"]
    assert waiting.result(90)["usage"]["completion_tokens"] == 20
    assert_clean(stack)


def test_a_bridge_that_is_told_to_leave_lets_its_streams_finish(stack: Stack, background: ThreadPoolExecutor) -> None:
    long = ASKED | {"max_tokens": 800, "min_tokens": 800}
    asked = [background.submit(stack.complete, f"{PROMPT}{n}", **long) for n in range(4)]
    wait_for(lambda: [it.state for it in stack.live()] == [State.FETCHED] * 4, "all of them are decoded")
    [bridge] = [it for it in stack.descendants() if "pdq.bridge" in it.cmdline()]
    bridge.terminate()
    assert [it.result(90)["usage"]["completion_tokens"] for it in asked] == [800] * 4
    bridge.wait(30)
    wait_for(lambda: answers(stack), "another bridge has taken its place", 60)
    assert_clean(stack)


# --- KV that was computed and not yet fetched -------------------------------------------------------------------------


def unfetched(stack: Stack, background: ThreadPoolExecutor) -> tuple[Future[dict[str, Any]], str, str]:
    """(the answer to come, the worker that holds its KV, its undisturbed text): there is nobody to decode it."""
    undisturbed = stack.complete(PROMPT, **ASKED)["choices"][0]["text"]
    stack.cli("drain", "decode")
    answer = background.submit(stack.complete, PROMPT, **ASKED)
    record = the_one(stack, State.READY)
    assert record.source is not None
    return answer, record.source.worker, undisturbed


def test_a_prefill_worker_stays_until_its_kv_is_fetched(stack: Stack, background: ThreadPoolExecutor) -> None:
    answer, source, undisturbed = unfetched(stack, background)
    (draining,) = stack.cli("drain", source, "--no-wait")["workers"]
    assert draining == {"worker": source, "pool": "prefill", "state": "draining", "held": 1, "running": 0}
    # Longer than the lease, which it keeps renewing.
    now = stack.inside.ask(lambda system: system.ledger.now_ms())
    wait_for(lambda: stack.inside.ask(lambda system: system.ledger.now_ms()) > now + 3000, "two leases' time has gone")
    assert (held_by(stack, source), state_of(stack, source)) == (1, "draining")
    stack.cli("undrain", "decode")
    got = answer.result(90)
    assert got["choices"][0]["text"] == undisturbed
    assert [len(decodings) for decodings in ways(stack, got)] == [1]
    wait_for(lambda: found(stack, source) is None, "it has left")
    stack.cli("undrain", source)
    assert_clean(stack)


def test_with_spill_it_leaves_at_once_and_the_kv_is_served_from_the_tier(
    spilling: Stack, background: ThreadPoolExecutor
) -> None:
    answer, source, undisturbed = unfetched(spilling, background)
    (left,) = spilling.cli("drain", source, "--spill")["workers"]
    assert left["state"] == "left"
    assert not answer.done()
    spilling.cli("undrain", "decode")
    got = answer.result(90)
    assert got["choices"][0]["text"] == undisturbed
    assert ways(spilling, got) == [["redis"]]
    spilling.cli("undrain", source)
    assert_clean(spilling)


def test_at_the_deadline_kv_moves_to_the_tier(spilling: Stack, background: ThreadPoolExecutor) -> None:
    answer, source, undisturbed = unfetched(spilling, background)
    (left,) = spilling.cli("drain", source, "--deadline", "300ms")["workers"]
    assert left["state"] == "left"
    spilling.cli("undrain", "decode")
    got = answer.result(90)
    assert got["choices"][0]["text"] == undisturbed
    assert ways(spilling, got) == [["redis"]]
    spilling.cli("undrain", source)
    assert_clean(spilling)


def test_at_the_deadline_kv_without_a_tier_is_computed_again_elsewhere(
    stack: Stack, background: ThreadPoolExecutor
) -> None:
    answer, source, undisturbed = unfetched(stack, background)
    stack.cli("drain", source, "--no-wait")
    (left,) = stack.cli("drain", source, "--deadline", "300ms")["workers"]  # another word moves the deadline
    assert left["state"] == "left"
    stack.cli("undrain", "decode")
    got = answer.result(90)
    assert got["choices"][0]["text"] == undisturbed
    assert len(ways(stack, got)) == 2
    stack.cli("undrain", source)
    assert_clean(stack)


# --- Without a supervisor ---------------------------------------------------------------------------------------------


def test_a_worker_that_was_sent_away_idles_when_it_is_started_again(stack: Stack, tmp_path: Path) -> None:
    """As Kubernetes does it with a pod's container, whatever its exit status."""
    name = "alone-0"
    command = [sys.executable, "-m", "pdq.cli", "worker", "prefill", "--engine", "sim", "--id", name]
    environ = {**os.environ, **stack.environ}

    def started() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            return subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    first = started()
    try:
        wait_for(lambda: state_of(stack, name) == "ready", "it serves", 60)
        stack.cli("drain", name)
        assert first.wait(30) == 0
    finally:
        first.kill()
    second = started()
    try:
        wait_for(lambda: "idle until" in (tmp_path / "log").read_text(), "it idles", 60)
        assert found(stack, name) is None
        assert stack.cli("undrain", name)["called_back"] == [name]
        wait_for(lambda: state_of(stack, name) == "ready", "it serves", 60)
        stack.cli("drain", name)
        assert second.wait(30) == 0
    finally:
        second.kill()
    third = started()
    try:
        wait_for(lambda: "idle until" in (tmp_path / "log").read_text(), "it idles", 60)
        third.terminate()
        assert third.wait(30) == 0
    finally:
        third.kill()
        stack.cli("undrain", name)
