"""Greedy output equals that of transformers' own ``generate``, token for token, for every family served."""

import pytest

from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings
from tests.tiny_models import FAMILIES, WINDOW
from tests.unit.torch.moves import MakeEngine, decode, generate, handed_over_seat, ids, prompt, reference, work

LENGTHS = (1, 2, 7, 8, 9, 31, 32, 33, 150, 300)


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_output_equals_that_of_transformers(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(family)
    for length in LENGTHS:
        tokens = prompt(length)
        assert ids(await generate(engine, work(tokens))) == reference(family, tokens, 16), length
    assert engine.occupancy().free_blocks == engine.occupancy().total_blocks


@pytest.mark.parametrize("family", FAMILIES)
async def test_disaggregated_output_equals_aggregated_output(family: str, make_engine: MakeEngine) -> None:
    source, sink = make_engine(family), make_engine(family)
    assert source.contract == sink.contract
    for sampling in (Sampling(temperature=0), Sampling(temperature=1.2, seed=7, logprobs=3)):
        for length in (1, 8, 33, 150):
            asked = work(prompt(length), sampling)
            seat = await handed_over_seat(source, sink, asked)
            assert (await decode(sink, [seat], 16))[0] == await generate(source, asked)
    for engine in (source, sink):
        assert engine.occupancy().free_blocks == engine.occupancy().total_blocks


async def test_a_sliding_window_is_honoured_past_its_width(make_engine: MakeEngine) -> None:
    """Two prompts that differ only where the window no longer reaches decode alike; within its reach they do not.

    With two layers a token sees twice the window back."""
    engine = make_engine("mistral")
    tail = prompt(3 * WINDOW)
    same = [ids(await generate(engine, work([*prompt(40, seed), *tail]))) for seed in (1, 2)]
    assert same[0] == same[1]
    other = [ids(await generate(engine, work([*prompt(40, seed), *tail[:WINDOW]]))) for seed in (1, 2)]
    assert other[0] != other[1]


async def test_bfloat16_survives_the_handoff(make_engine: MakeEngine) -> None:
    settings = EngineSettings(block_size=8, chunk_tokens=32, kv_tokens=1024, dtype="bfloat16")
    source, sink = make_engine("qwen3", settings), make_engine("qwen3", settings)
    asked = work(prompt(50))
    assert source.contract.layout.dtype == "bfloat16"
    handed_over = (await decode(sink, [await handed_over_seat(source, sink, asked)], 16))[0]
    assert handed_over == await generate(source, asked)
