"""The same as ``test_resume`` with a real model: the KV that a dead worker had computed is computed again, to the bit."""

import json
import shutil
from collections.abc import Iterator

import pytest

from pdq.core.messages import PolicyWish, Sampling
from tests.e2e.requester import kill_the_sender, request
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for
from tests.tiny_models import tiny_model

PROMPT = list(range(100, 145))
DIES_AT = 14
POLICIES = {"kept": PolicyWish(retain="done"), "recomputed": PolicyWish()}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}
SAMPLINGS = {
    "greedy": Sampling(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2),
    "wild": Sampling(temperature=1.2, seed=3, max_tokens=32, ignore_eos=True, logprobs=2, min_tokens=20, **PENALTIES),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("model") / "tiny-llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    # Slow steps: a worker that is killed at a token has not drawn the next one.
    env = {**SHORT_LEASES, "PDQ_FAILPOINTS": "decode.step=delay:80", "PDQ_ENGINE_KV_TOKENS": "4096"}
    options = ("--model", str(directory), "--prefill", "1", "--decode", "2")
    with running(tmp_path_factory.mktemp("stack") / "state", *options, env=env) as stack:
        yield stack


@pytest.fixture
def two_sinks(stack: Stack) -> Stack:
    wait_for(lambda: len(stack.workers("decode")) == 2 and not stack.live(), "two decode workers and no request", 90)
    return stack


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_and_logprobs_are_those_of_the_undisturbed_stream(two_sinks: Stack, policy: str, sampling: str) -> None:
    undisturbed = request(two_sinks, PROMPT, SAMPLINGS[sampling])
    stream = request(two_sinks, PROMPT, SAMPLINGS[sampling], POLICIES[policy], at={DIES_AT: kill_the_sender})
    assert stream.whole == undisturbed.whole
    assert stream.logprobs == undisturbed.logprobs
    assert len(stream.logprobs) == 32
    assert stream.ends == 1
    assert len(two_sinks.cli("trace", stream.request_id)["attempts"]) == (1 if policy == "kept" else 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stop_string_is_found_across_the_resume_point(two_sinks: Stack, policy: str) -> None:
    asked = Sampling(temperature=1.0, seed=8, max_tokens=32, ignore_eos=True)
    pieces: list[int] = []

    async def note(system: object, stream: object) -> None:
        pieces.append(len(stream.text))  # type: ignore[attr-defined]

    undisturbed = request(two_sinks, PROMPT, asked, at={DIES_AT: note})
    stop = undisturbed.text[pieces[0] - 2 : pieces[0] + 3]
    asked = Sampling(temperature=1.0, seed=8, max_tokens=32, ignore_eos=True, stop=(stop,))
    cut = request(two_sinks, PROMPT, asked)
    assert cut.end is not None
    assert cut.end.stop_reason == stop
    stream = request(two_sinks, PROMPT, asked, POLICIES[policy], at={DIES_AT: kill_the_sender})
    assert stream.whole == cut.whole
    assert len([worker for worker in stream.workers if worker.startswith("decode-")]) == 2
