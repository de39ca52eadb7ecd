"""Sampling: penalties, masks, filters, draws and log-probabilities, against plain arithmetic and transformers."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from pdq.core.messages import Sampling
from pdq.ports import Drawn
from tests.tiny_models import EOS
from tests.unit.torch.moves import MakeEngine, generate, ids, prompt, reference, work
from workers.torch.sampler import SamplingState, sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0, 2.5])


def draw(
    sampling: Sampling, logits: torch.Tensor = LOGITS, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> Drawn:
    state = SamplingState(sampling, frozenset({4}), prompt)
    for token in output:
        state.append(token)
    drawn = sample(logits[None], [state])[0]
    assert drawn is not None
    return drawn


def frequencies(seeds: int = 4000, **options: Any) -> dict[int, float]:
    states = [SamplingState(Sampling(seed=seed, **options), frozenset(), ()) for seed in range(seeds)]
    drawn = sample(LOGITS.expand(seeds, -1), states)
    counts = Counter(one.token for one in drawn if one is not None)
    return {token: count / seeds for token, count in counts.items()}


def softmax(logits: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    weights = {token: math.exp(value / temperature) for token, value in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize(
    ("options", "kept", "temperature"),
    [
        ({}, range(6), 1.0),
        ({"temperature": 2.0}, range(6), 2.0),
        ({"top_k": 3}, (0, 4, 5), 1.0),
        ({"top_p": 0.6}, (4, 5), 1.0),  # 0.43 + 0.26 reach it
        ({"top_p": 0.4}, (4,), 1.0),
        ({"min_p": 0.5}, (4, 5), 1.0),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.2}, (0, 4, 5), 1.0),
        ({"top_k": 1}, (4,), 1.0),
        ({"temperature": 1e-9}, (4,), 1.0),
    ],
)
def test_draws_follow_the_filtered_distribution(options: dict[str, Any], kept: Any, temperature: float) -> None:
    found = frequencies(**options)
    expected = softmax({token: float(LOGITS[token]) for token in kept}, temperature)
    assert set(found) == set(expected)
    for token, share in expected.items():
        assert abs(found[token] - share) < 4 * math.sqrt(share * (1 - share) / 4000) + 1e-12, token


def test_a_draw_depends_on_seed_and_position_only() -> None:
    one = [draw(Sampling(seed=5), output=(0,) * position).token for position in range(50)]
    other = [draw(Sampling(seed=5), output=(1,) * position).token for position in range(50)]
    assert one == other
    assert len(set(one)) > 2
    assert one != [draw(Sampling(seed=6), output=(0,) * position).token for position in range(50)]


def test_equal_logits_are_drawn_equally_and_the_first_wins_greedily() -> None:
    flat = torch.zeros(4)
    assert draw(Sampling(temperature=0), flat).token == 0
    tokens = {draw(Sampling(seed=seed), flat).token for seed in range(60)}
    assert tokens == {0, 1, 2, 3}


def test_repetition_penalty_counts_prompt_and_output() -> None:
    # 3.0 / 2 = 1.5 and 2.5 / 2 = 1.25 fall below the 2.0 of token 0.
    assert draw(Sampling(temperature=0, repetition_penalty=2.0), prompt=(4,), output=(5,)).token == 0
    # A negative logit becomes more negative.
    assert draw(Sampling(temperature=0, repetition_penalty=2.0), torch.tensor([-1.0, -1.5]), prompt=(0,)).token == 1


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    assert draw(Sampling(temperature=0, presence_penalty=0.6), prompt=(4, 5)).token == 4
    assert draw(Sampling(temperature=0, presence_penalty=0.6), output=(4,)).token == 5
    assert draw(Sampling(temperature=0, presence_penalty=0.4), output=(4, 4, 4)).token == 4
    assert draw(Sampling(temperature=0, frequency_penalty=0.2), output=(4, 4, 4)).token == 5
    assert draw(Sampling(temperature=0, frequency_penalty=-2.0), output=(3, 3, 3)).token == 3


def test_min_tokens_bars_eos_and_stop_tokens_until_then() -> None:
    sampling = Sampling(temperature=0, min_tokens=2, stop_token_ids=(5, 10_000))
    assert [draw(sampling, output=(1,) * n).token for n in range(3)] == [0, 0, 4]
    assert draw(Sampling(temperature=0, min_tokens=1, ignore_eos=True)).token == 5


def test_logprobs_are_those_of_the_model_before_penalties_and_temperature() -> None:
    plain = torch.log_softmax(LOGITS, -1)
    drawn = draw(Sampling(temperature=0, logprobs=3, presence_penalty=2, min_tokens=9), output=(5,))
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(float(plain[0]))
    assert [token for token, _ in drawn.top] == [4, 5, 0]
    assert [value for _, value in drawn.top] == pytest.approx([float(plain[token]) for token in (4, 5, 0)])
    assert draw(Sampling(temperature=0, logprobs=0)).top == ()
    assert draw(Sampling(temperature=0)).logprob is None
    assert len(draw(Sampling(temperature=0, logprobs=20)).top) == len(LOGITS)


def test_a_row_that_is_not_finite_gives_nothing_and_disturbs_nobody() -> None:
    rows = torch.stack([LOGITS, LOGITS.clone().fill_(torch.nan), LOGITS])
    rows[2, 3] = torch.inf
    states = [SamplingState(Sampling(seed=1), frozenset(), ()) for _ in rows]
    assert sample(rows, states) == [draw(Sampling(seed=1)), None, None]


async def test_repetition_penalty_equals_that_of_transformers(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen3")
    for length in (3, 40):
        tokens = prompt(length)
        found = await generate(engine, work(tokens, Sampling(temperature=0, repetition_penalty=1.3), output=30))
        assert ids(found) == reference("qwen3", tokens, 30, repetition_penalty=1.3)


async def test_min_tokens_and_penalties_hold_across_the_first_token(make_engine: MakeEngine) -> None:
    """Prefill draws the first token, decode the others: neither may lose count."""
    engine = make_engine("llama")
    assert engine.eos_token_ids == frozenset(EOS)
    for seed in range(4):
        barred = Sampling(temperature=3, seed=seed, min_tokens=60, stop_token_ids=(7, 8, 9))
        found = ids(await generate(engine, work(prompt(10), barred, output=60)))
        assert not {*EOS, 7, 8, 9}.intersection(found)
    once = Sampling(temperature=0, presence_penalty=2, frequency_penalty=2, repetition_penalty=100)
    found = ids(await generate(engine, work(prompt(10), once, output=40)))
    assert len(set(found)) == 40
