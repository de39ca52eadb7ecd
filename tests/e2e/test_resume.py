"""The death of a decode worker in the middle of a stream, seen from outside: nothing of it can be seen in the output."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdq.core import names
from pdq.core.handoff import State
from pdq.core.messages import Drain, Failpoints, PolicyWish, Sampling
from pdq.ports import Record
from tests.e2e.requester import Stream, kill_the_sender, request, tell
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "Once upon a time, in a system with two pools, " * 8
TOKENS = 40
DIES_AT = 12
RESUME = PolicyWish(on_stream_failure="resume")
KEPT = PolicyWish(on_stream_failure="resume", retain="done")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Slow steps: a worker that is killed at a token has not drawn the next one."""
    env = {**SHORT_LEASES, "PDQ_SIM_STEP_MS": "60", "PDQ_FAILPOINTS": "on"}
    options = ("--engine", "sim", "--prefill", "1", "--decode", "2")
    with running(tmp_path_factory.mktemp("stack") / "state", *options, env=env) as stack:
        yield stack


@pytest.fixture
def two_sinks(stack: Stack) -> Stack:
    """The stack, when the worker that the test before killed is back."""
    ready = "two decode workers and nothing held"
    wait_for(lambda: len(stack.workers("decode")) == 2 and nothing_is_held(stack), ready, 60)
    return stack


def nothing_is_held(stack: Stack) -> bool:
    now = [worker.occupancy for worker in stack.workers()]
    return not stack.live() and all(it.free_blocks == it.total_blocks and it.held == it.running == 0 for it in now)


def sampling(**more: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "seed": 5, "max_tokens": TOKENS, **more})


def ended_once(stream: Stream) -> bool:
    return (stream.ends, stream.after_the_end) == (1, 0)


def decodings(stack: Stack, stream: Stream) -> list[int]:
    """How many decode workers fetched the KV of each prefill."""
    return [len(attempt["decodings"]) for attempt in stack.cli("trace", stream.request_id)["attempts"]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(KEPT, [2]), (RESUME, [1, 1])],
    ids=["the source keeps the KV: no second prefill", "nobody keeps it: a second prefill"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_goes_on_with_the_same_bytes(
    two_sinks: Stack, policy: PolicyWish, expected: list[int], temperature: float
) -> None:
    asked = sampling(temperature=temperature)
    undisturbed = request(two_sinks, PROMPT, asked)
    stream = request(two_sinks, PROMPT, asked, policy, at={DIES_AT: kill_the_sender})
    assert stream.whole == undisturbed.whole
    assert ended_once(stream)
    assert len([worker for worker in stream.workers if worker.startswith("decode-")]) == 2
    assert decodings(two_sinks, stream) == expected


def test_a_second_death_is_survived_like_the_first(two_sinks: Stack) -> None:
    undisturbed = request(two_sinks, PROMPT, sampling())
    deaths = {DIES_AT: kill_the_sender, 25: kill_the_sender}
    stream = request(two_sinks, PROMPT, sampling(), KEPT, at=deaths)
    assert stream.whole == undisturbed.whole
    assert ended_once(stream)
    assert decodings(two_sinks, stream) == [3]


def test_a_sequence_that_kills_every_worker_is_given_up(two_sinks: Stack) -> None:
    policy = PolicyWish(retain="done", max_attempts=2)
    deaths = {DIES_AT: kill_the_sender, 25: kill_the_sender}
    stream = request(two_sinks, PROMPT, sampling(), policy, at=deaths)
    assert stream.end is not None
    assert stream.end.error is not None
    assert stream.end.error.code == "attempts_exhausted"
    assert ended_once(stream)


def test_the_policy_to_fail_ends_the_stream_with_one_error(two_sinks: Stack) -> None:
    policy = PolicyWish(on_stream_failure="fail", retain="done")
    stream = request(two_sinks, PROMPT, sampling(), policy, at={DIES_AT: kill_the_sender})
    assert stream.end is not None
    assert stream.end.error is not None
    assert stream.end.error.code == "stream_lost"
    assert len(stream.tokens) < TOKENS
    assert ended_once(stream)


@pytest.mark.parametrize("policy", [KEPT, RESUME], ids=["kept", "recomputed"])
def test_a_requester_that_does_not_say_what_it_has_gets_one_error(two_sinks: Stack, policy: PolicyWish) -> None:
    stream = request(two_sinks, PROMPT, sampling(), policy, at={DIES_AT: kill_the_sender}, answers=False)
    assert stream.end is not None
    assert stream.end.error is not None
    assert stream.end.error.code == "stream_lost"
    assert ended_once(stream)


@pytest.mark.parametrize("policy", [KEPT, RESUME], ids=["kept", "recomputed"])
def test_a_stop_string_is_found_across_the_resume_point(two_sinks: Stack, policy: PolicyWish) -> None:
    undisturbed = request(two_sinks, PROMPT, sampling())
    stop = undisturbed.text[DIES_AT - 3 : DIES_AT + 4]  # one byte a token
    cut = request(two_sinks, PROMPT, sampling(stop=(stop,)))
    assert cut.text == undisturbed.text[: undisturbed.text.index(stop)]
    stream = request(two_sinks, PROMPT, sampling(stop=(stop,)), policy, at={DIES_AT: kill_the_sender})
    assert stream.whole == cut.whole
    assert ended_once(stream)


def test_min_tokens_and_logprobs_hold_across_the_resume_point(two_sinks: Stack) -> None:
    undisturbed = request(two_sinks, PROMPT, sampling())
    early = undisturbed.text[3]
    asked = sampling(stop=(early,), min_tokens=25, logprobs=1)
    expected = request(two_sinks, PROMPT, asked)
    stream = request(two_sinks, PROMPT, asked, KEPT, at={DIES_AT: kill_the_sender})
    assert stream.whole == expected.whole
    assert stream.logprobs == expected.logprobs
    assert len(stream.logprobs) == len(stream.tokens) >= 25


@pytest.mark.parametrize("policy", [KEPT, RESUME], ids=["kept", "recomputed"])
def test_a_worker_that_leaves_hands_its_streams_over(two_sinks: Stack, policy: PolicyWish) -> None:
    """Its time is over before its sequences have ended: it does not wait for them any more. It knows what it has sent, so
    even a requester that answers nothing loses nothing."""

    async def hurry(system: Any, stream: Stream) -> None:
        for deadline_ms in (60_000, 0):
            await system.bus.control(names.worker_subject(stream.workers[-1]), Drain(deadline_ms))

    undisturbed = request(two_sinks, PROMPT, sampling())
    stream = request(two_sinks, PROMPT, sampling(), policy, at={DIES_AT: hurry}, answers=False)
    assert stream.whole == undisturbed.whole
    assert ended_once(stream)
    assert stream.asked == 0
    assert decodings(two_sinks, stream) == ([2] if policy is KEPT else [1, 1])


def test_a_death_between_the_record_and_the_job_of_the_next_prefill(two_sinks: Stack) -> None:
    """The record is queued again, and the worker that wrote this dies before it has published the job."""
    undisturbed = request(two_sinks, PROMPT, sampling())

    async def kill_and_plan(system: Any, stream: Stream) -> None:
        for worker in await system.registry.workers():
            if worker.pool == "decode" and worker.worker != stream.workers[-1]:
                fault = Failpoints("recovery.after_requeue=kill*1")
                await system.bus.control(names.worker_subject(worker.worker), fault)
        await kill_the_sender(system, stream)

    stream = request(two_sinks, PROMPT, sampling(), RESUME, at={DIES_AT: kill_and_plan})
    assert stream.whole == undisturbed.whole
    assert ended_once(stream)


def test_an_end_that_was_lost_is_sent_by_the_next_worker(two_sinks: Stack) -> None:
    """The worker dies when it has drawn its last token; the client has every token before it."""
    undisturbed = request(two_sinks, PROMPT, sampling())
    for worker in two_sinks.workers("decode"):
        tell(two_sinks, worker.worker, Failpoints("finish.before=kill*1"))
    stream = request(two_sinks, PROMPT, sampling(max_tokens=20), KEPT)
    assert stream.tokens == undisturbed.tokens[:20]
    assert ended_once(stream)


def held_back(stack: Stack) -> tuple[Sampling, Stream]:
    """Sampling with a stop string that the last token may have begun: its text comes with the end, or never."""
    plain = request(stack, PROMPT, sampling(max_tokens=20))
    asked = sampling(max_tokens=20, stop=(plain.text[-1] + "\x00",))
    undisturbed = request(stack, PROMPT, asked)
    assert undisturbed.end is not None
    assert undisturbed.end.tail == plain.text[-1]
    return asked, undisturbed


def die_when_done(stack: Stack) -> None:
    for worker in stack.workers("decode"):
        tell(stack, worker.worker, Failpoints("finish.after=kill*1"))


def test_an_end_that_nobody_sent_comes_with_the_job_that_was_left(two_sinks: Stack) -> None:
    """The worker dies when the record is done and the requester does not know it yet."""
    asked, undisturbed = held_back(two_sinks)
    die_when_done(two_sinks)
    stream = request(two_sinks, PROMPT, asked)
    assert stream.whole == undisturbed.whole
    assert ended_once(stream)


def test_an_http_answer_is_whole_when_its_end_was_never_sent(two_sinks: Stack) -> None:
    asked, undisturbed = held_back(two_sinks)
    die_when_done(two_sinks)
    answer = two_sinks.complete(PROMPT, temperature=1.0, seed=5, max_tokens=20, stop=list(asked.stop))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (undisturbed.whole[0], "length")
    assert answer["usage"]["completion_tokens"] == 20


def when_one_decodes(stack: Stack) -> int:
    """The process that decodes the one live request, once it does; else 0."""
    pids = {worker.worker: worker.pid for worker in stack.workers()}
    return next((pids[it.sink.worker] for it in stack.live() if it.state == "fetched" and it.sink), 0)


@contextmanager
def the_example(stack: Stack) -> Iterator["subprocess.Popen[str]"]:
    """A producer that has nothing but NATS, at work."""
    program = [sys.executable, str(EXAMPLES / "nats_producer.py"), stack.model, PROMPT]
    environ = {**os.environ, "PDQ_NATS_URL": stack.environ["PDQ_NATS_URL"]}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as child:
        yield child


def test_the_example_producer_survives_the_death_of_its_worker(two_sinks: Stack) -> None:
    with the_example(two_sinks) as child:
        os.kill(wait_for(lambda: when_one_decodes(two_sinks), "a decode worker is at it"), signal.SIGKILL)
        out, err = child.communicate(timeout=90)
    assert child.returncode == 0, err
    assert len(out.removesuffix("\n")) == 64  # all its tokens, one byte each


def lose_all_frames(stack: Stack) -> None:
    for worker in stack.workers():
        tell(stack, worker.worker, Failpoints("bus.send=drop"))


def when_all_frames_were_lost(stack: Stack) -> Record:
    """The record of the one live request, when that is over, and frames get through again."""
    (live,) = wait_for(stack.live, "the producer's request is there", 30)

    def ended() -> Record | None:
        record = stack.inside.ask(lambda system: system.ledger.read(live.key))
        return record if record is not None and record.state.terminal else None

    record = wait_for(ended, "it is over", 60)
    for worker in stack.workers():
        tell(stack, worker.worker, Failpoints(""))
    return record


def test_a_producer_that_heard_nothing_while_its_request_ran_gets_all_of_it_afterwards(two_sinks: Stack) -> None:
    """As when NATS is restarted, and the workers are connected again before the producer is."""
    lose_all_frames(two_sinks)
    with the_example(two_sinks) as child:
        assert when_all_frames_were_lost(two_sinks).state is State.DONE
        out, err = child.communicate(timeout=90)
    assert child.returncode == 0, err
    assert len(out.removesuffix("\n")) == 64


def test_a_producer_is_told_when_what_it_did_not_hear_went_with_its_worker(two_sinks: Stack) -> None:
    lose_all_frames(two_sinks)
    with the_example(two_sinks) as child:
        key = when_all_frames_were_lost(two_sinks).key
        history = two_sinks.inside.ask(lambda system: system.ledger.history(key))
        os.kill(next(it.pid for it in two_sinks.workers() if it.worker == history[-1].worker), signal.SIGKILL)
        out, err = child.communicate(timeout=90)
    assert (child.returncode, out) == (1, "")
    assert "64 of its 64 tokens are lost" in err


def test_an_http_stream_goes_on_with_the_same_bytes(two_sinks: Stack) -> None:
    body = {"model": two_sinks.model, "prompt": PROMPT, "max_tokens": TOKENS, "seed": 9}
    body |= {"stream": True, "pdq": {"retain": "done"}}

    def answer(kill_at: int) -> tuple[str, list[str]]:
        text, ends = "", []
        with httpx.stream("POST", f"{two_sinks.url}/v1/completions", json=body, timeout=90) as lines:
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["text"]
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                    if len(text) == kill_at:
                        os.kill(when_one_decodes(two_sinks), signal.SIGKILL)
                elif line:
                    ends.append(line)
        return text, ends

    undisturbed = answer(0)
    assert undisturbed[1] == ["length", "data: [DONE]"]
    assert answer(DIES_AT) == undisturbed


def test_aggregated_workers_resume_as_well(tmp_path: Path) -> None:
    env = {**SHORT_LEASES, "PDQ_SIM_STEP_MS": "60"}
    options = ("--engine", "sim", "--mode", "aggregated", "--prefill", "0", "--decode", "2")
    with running(tmp_path / "state", *options, env=env) as stack:
        wait_for(lambda: len(stack.workers()) == 2, "both workers")
        undisturbed = request(stack, PROMPT, sampling())
        stream = request(stack, PROMPT, sampling(), at={DIES_AT: kill_the_sender})
        assert stream.whole == undisturbed.whole
        assert ended_once(stream)
        assert len(set(stream.workers)) == 2
