"""What becomes of a request whose KV cannot be fetched, as its policy says: for each request, and by default."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pdq.core.messages import Failpoints, Policy, PolicyWish, Sampling
from pdq.ports import Record
from tests.e2e.requester import Stream, kill_the_sender, request, tell
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

PROMPT = "What is a policy, and who keeps to it? " * 4
SAMPLING = Sampling(temperature=1.0, seed=2, max_tokens=12)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two ways to every KV. The deployment's own defaults are not those of the code."""
    env = {
        **SHORT_LEASES,
        "PDQ_SIM_STEP_MS": "40",
        "PDQ_FAILPOINTS": "on",
        "PDQ_TRANSPORT_WRITE_THROUGH": "shm",
        "PDQ_POLICY_MAX_ATTEMPTS": "4",
        "PDQ_POLICY_RETAIN": "first_token",
    }
    with running(tmp_path_factory.mktemp("stack") / "state", "--engine", "sim", env=env) as stack:
        yield stack


@pytest.fixture
def quiet(stack: Stack) -> Iterator[Stack]:
    """The stack with both workers there, nothing to do, and no fault set."""
    wait_for(lambda: len(stack.workers()) == 2 and nothing_is_held(stack), "both workers, nothing held", 60)
    yield stack
    for worker in stack.workers("decode"):
        tell(stack, worker.worker, Failpoints(""))


def nothing_is_held(stack: Stack) -> bool:
    now = [worker.occupancy for worker in stack.workers()]
    return not stack.live() and all(it.free_blocks == it.total_blocks and it.held == it.running == 0 for it in now)


def plan(stack: Stack, faults: str) -> None:
    (worker,) = stack.workers("decode")
    tell(stack, worker.worker, Failpoints(faults))


def record_of(stack: Stack, request_id: str) -> Record:
    record = stack.inside.ask(lambda system: system.ledger.find(request_id))
    assert record is not None
    return record


def attempts(stack: Stack, stream: Stream) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.cli("trace", stream.request_id)["attempts"]
    return found


def failure(stream: Stream) -> str:
    assert stream.end is not None
    assert stream.end.error is not None
    assert (stream.ends, stream.after_the_end) == (1, 0)
    return stream.end.error.code


def test_what_a_job_leaves_out_is_the_deployments_default(quiet: Stack) -> None:
    stream = request(quiet, PROMPT, SAMPLING, PolicyWish(on_stream_failure="fail"))
    assert record_of(quiet, stream.request_id).policy == Policy("recompute", "fail", 4, "first_token")


def test_a_policy_comes_over_http_as_well(quiet: Stack) -> None:
    answer = quiet.complete(PROMPT, max_tokens=3, pdq={"on_handoff_failure": "reject", "retain": "done"})
    assert record_of(quiet, answer["request_id"]).policy == Policy("reject", "resume", 4, "done")
    plain = quiet.complete(PROMPT, max_tokens=3)
    assert record_of(quiet, plain["request_id"]).policy == Policy("recompute", "resume", 4, "first_token")


def test_a_policy_that_is_none_is_refused_by_its_name(quiet: Stack) -> None:
    body = {"model": quiet.model, "prompt": "x", "pdq": {"retain": "forever"}}
    answer = httpx.post(f"{quiet.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "pdq.retain"


def test_kv_with_a_wrong_digest_is_fetched_another_way(quiet: Stack) -> None:
    undisturbed = request(quiet, PROMPT, SAMPLING)
    plan(quiet, "decode.landed=corrupt*1")
    stream = request(quiet, PROMPT, SAMPLING)
    assert stream.whole == undisturbed.whole
    (attempt,) = attempts(quiet, stream)
    (decoding,) = attempt["decodings"]
    assert (decoding["transport"], decoding["tried"]) == ("shm", [["ucx", "digest_mismatch"]])


def test_kv_that_comes_right_by_no_way_is_computed_again(quiet: Stack) -> None:
    undisturbed = request(quiet, PROMPT, SAMPLING)
    plan(quiet, "decode.landed=corrupt*2")
    stream = request(quiet, PROMPT, SAMPLING)
    assert stream.whole == undisturbed.whole
    first, second = attempts(quiet, stream)
    assert first["outcome"] == "requeue"
    assert second["decodings"][-1]["transport"] == "ucx"


def test_it_is_rejected_where_the_policy_says_so(quiet: Stack) -> None:
    plan(quiet, "decode.landed=corrupt*2")
    stream = request(quiet, PROMPT, SAMPLING, PolicyWish(on_handoff_failure="reject"))
    assert failure(stream) == "handoff_rejected"
    assert len(attempts(quiet, stream)) == 1


def test_a_stream_that_may_not_be_resumed_fails_when_its_first_token_is_out(quiet: Stack) -> None:
    plan(quiet, "decode.landed=corrupt*2")
    stream = request(quiet, PROMPT, SAMPLING, PolicyWish(on_stream_failure="fail"))
    assert failure(stream) == "stream_lost"
    assert len(stream.tokens) == 1


def test_attempts_are_counted_and_come_to_an_end(quiet: Stack) -> None:
    plan(quiet, "decode.landed=corrupt")
    stream = request(quiet, PROMPT, SAMPLING, PolicyWish(max_attempts=2))
    assert failure(stream) == "attempts_exhausted"
    assert len(attempts(quiet, stream)) == 2


@pytest.mark.parametrize(("retain", "held"), [("fetched", 0), ("first_token", 0), ("done", 1)])
def test_the_source_keeps_the_kv_as_long_as_the_policy_says(quiet: Stack, retain: Any, held: int) -> None:
    """Seen from inside the stream, when several tokens of the decode side are out; afterwards nothing is left."""
    seen: list[bool] = []

    async def look(system: Any, stream: Stream) -> None:
        record = await system.ledger.find(stream.request_id)
        seen.append(record.source is not None)

    request(quiet, PROMPT, SAMPLING, PolicyWish(retain=retain), at={8: look})
    assert seen == [bool(held)]
    wait_for(lambda: nothing_is_held(quiet), "nothing is held", 30)


def test_a_source_that_dies_with_kv_that_nobody_has_fetched_costs_a_prefill(tmp_path: Any) -> None:
    env = {**SHORT_LEASES, "PDQ_FAILPOINTS": "on"}
    with running(tmp_path / "state", "--engine", "sim", env=env) as stack:
        undisturbed = request(stack, PROMPT, SAMPLING)
        plan(stack, "decode.delivered=delay:3000*1")
        stream = request(stack, PROMPT, SAMPLING, at={1: kill_the_sender})
        assert stream.whole == undisturbed.whole
        assert [len(attempt["decodings"]) for attempt in attempts(stack, stream)][-1] == 1
        assert len(attempts(stack, stream)) == 2
        rejected = PolicyWish(on_handoff_failure="reject")
        wait_for(lambda: len(stack.workers("prefill")) == 1 and not stack.live(), "a prefill worker is back", 60)
        plan(stack, "decode.delivered=delay:3000*1")
        assert failure(request(stack, PROMPT, SAMPLING, rejected, at={1: kill_the_sender})) == "handoff_rejected"
