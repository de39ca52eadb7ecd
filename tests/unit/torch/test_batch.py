"""Continuous batching: sequences join and leave at any step, and none of them can tell who else is there."""

import asyncio

import pytest
import torch

from pdq.core.errors import EngineFailed
from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings
from pdq.ports import Drawn
from tests.tiny_models import FAMILIES
from tests.unit.torch.moves import (
    MakeEngine,
    aggregated_seat,
    decode,
    generate,
    handed_over_seat,
    ids,
    prompt,
    work,
)

SAMPLINGS = (
    Sampling(temperature=0, logprobs=2),
    Sampling(temperature=1, seed=11, logprobs=2),
    Sampling(temperature=0.7, seed=12, top_k=20, top_p=0.9, logprobs=0),
    Sampling(temperature=1.5, seed=-13, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.4, logprobs=5),
)


@pytest.mark.parametrize("family", FAMILIES)
async def test_results_are_the_same_bits_alone_and_in_any_batch(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(family)
    asked = [work(prompt(length), SAMPLINGS[i % 4]) for i, length in enumerate((1, 5, 30, 64, 65, 3, 100))]
    alone = [await generate(engine, one) for one in asked]
    together = await decode(engine, [await aggregated_seat(engine, one) for one in asked], 16)
    assert together == alone  # log-probabilities included, to the last bit
    assert engine.occupancy().peak_batch == 7


async def test_sequences_join_and_leave_at_every_step(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2")
    asked = [work(prompt(3 * i + 1), SAMPLINGS[i % 4], output=2 + i % 5) for i in range(9)]
    alone = [await generate(engine, one) for one in asked]
    waiting = [(one, await aggregated_seat(engine, one)) for one in asked]
    got: dict[object, list[Drawn]] = {}
    wanted: dict[object, int] = {}
    order = []
    for one, (seat, first) in waiting:
        got[seat], wanted[seat] = [first], one.max_new_tokens
        order.append(seat)
        seat.join(first)
        for stepped, drawn in (await engine.step()).drawn:
            got[stepped].append(drawn)
            if len(got[stepped]) == wanted[stepped]:
                stepped.leave()
    while any(len(got[seat]) < wanted[seat] for seat in order):
        for stepped, drawn in (await engine.step()).drawn:
            got[stepped].append(drawn)
            if len(got[stepped]) == wanted[stepped]:
                stepped.leave()
    assert [got[seat] for seat in order] == alone
    assert engine.occupancy().free_blocks == engine.occupancy().total_blocks


@pytest.mark.parametrize("known", [2, 9, 15])
async def test_replayed_tokens_lead_to_the_same_bits_as_decoded_ones(known: int, make_engine: MakeEngine) -> None:
    source, sink = make_engine("mistral"), make_engine("mistral")
    for sampling in (*SAMPLINGS, Sampling(temperature=1, seed=3, min_tokens=12, presence_penalty=1, logprobs=1)):
        asked = work(prompt(45), sampling)
        undisturbed = await generate(source, asked)
        seat, first = await handed_over_seat(source, sink, asked)
        seat.join(first, ids(undisturbed[1:known]))
        assert [(await sink.step()).drawn[0][1] for _ in range(16 - known)] == undisturbed[known:]
        seat.leave()


@pytest.mark.parametrize("cut", [1, 5, 15])
async def test_resume_continues_as_if_undisturbed(cut: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    for sampling in (*SAMPLINGS, Sampling(temperature=1, seed=3, min_tokens=12, presence_penalty=1)):
        tokens = prompt(20)
        undisturbed = ids(await generate(engine, work(tokens, sampling)))
        again = work([*tokens, *undisturbed[:cut]], sampling, output=16 - cut, resumed=cut)
        assert ids(await generate(engine, again)) == undisturbed[cut:]


async def test_a_source_with_other_block_and_chunk_sizes_is_regrouped(make_engine: MakeEngine) -> None:
    asked = work(prompt(77), SAMPLINGS[1])
    for block, chunk in ((16, 32), (4, 64), (12, 24), (8, 8)):
        source = make_engine("llama", EngineSettings(block_size=block, chunk_tokens=chunk, kv_tokens=960))
        sink = make_engine()
        seat = await handed_over_seat(source, sink, asked)
        assert (await decode(sink, [seat], 16))[0] == await generate(source, asked), (block, chunk)


async def test_a_first_token_that_decode_owns_is_the_same_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = work(prompt(21), SAMPLINGS[1])
    expected = ids(await generate(engine, asked))
    seat, _ = await aggregated_seat(engine, asked)
    seat.join(None)
    got = [(await engine.step()).drawn[0][1].token for _ in range(16)]
    assert got == expected
    seat.leave()


async def test_prefill_chunks_and_decode_steps_alternate(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seat, first = await aggregated_seat(engine, work(prompt(3), output=100))
    seat.join(first)
    happened: list[str] = []

    async def prefilling() -> None:
        run = engine.admit(work(prompt(320)))
        async for index, _ in run.chunks():
            happened.append("chunk" if index >= 0 else "")
        run.release()

    async def stepping() -> None:
        while happened.count("chunk") < 10:
            await engine.step()
            happened.append("step")

    await asyncio.gather(prefilling(), stepping())
    assert "chunk chunk chunk" not in " ".join(happened)
    assert "step step step" not in " ".join(happened)
    seat.leave()


async def test_a_sequence_that_left_during_a_step_keeps_its_blocks_until_the_step_ends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stays, first = await aggregated_seat(engine, work(prompt(9)))
    leaves, other_first = await aggregated_seat(engine, work(prompt(10)))
    stays.join(first)
    leaves.join(other_first)
    step = asyncio.ensure_future(engine.step())
    while not leaves.busy:
        await asyncio.sleep(0)
    free = engine.occupancy().free_blocks
    leaves.leave()
    assert engine.occupancy().free_blocks == free
    assert [seat for seat, _ in (await step).drawn] == [stays]
    assert engine.occupancy().free_blocks > free
    stays.leave()


async def test_a_cancelled_step_can_be_taken_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked = work(prompt(9), SAMPLINGS[1])
    expected = await generate(engine, asked)
    seat, first = await aggregated_seat(engine, asked)
    seat.join(first)
    got = [first]
    for _ in range(15):
        step = asyncio.ensure_future(engine.step())
        while not seat.busy:
            await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        got.append((await engine.step()).drawn[0][1])
    assert got == expected
    seat.leave()


async def test_numbers_that_are_not_finite_end_one_sequence_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked, other = work(prompt(20)), work(prompt(30))
    expected, expected_other = await generate(engine, asked), await generate(engine, other)
    good, first = await aggregated_seat(engine, asked)
    spoiled = engine.reserve(other, engine.contract.layout)
    for parts in spoiled.buffers:
        for part in parts:
            part[:] = b"\xff" * len(part)  # NaN
    spoiled.landed()
    good.join(first)
    spoiled.join(expected_other[0])
    step = await engine.step()
    assert [(seat, "not finite" in str(error)) for seat, error in step.failed] == [(spoiled, True)]
    assert [drawn for _, drawn in step.drawn] == expected[1:2]
    rest = [(await engine.step()).drawn for _ in range(14)]
    assert [drawn for (_, drawn), *others in rest if not others] == expected[2:]
    good.leave()
    spoiled.leave()
    assert await generate(engine, other) == expected_other  # in the blocks that are still full of NaN


async def test_a_sequence_cannot_outgrow_its_reservation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seat, first = await aggregated_seat(engine, work(prompt(5), output=3))
    seat.join(first)
    for _ in range(2):
        assert len((await engine.step()).drawn) == 1
    step = await engine.step()
    assert not step.drawn
    assert [type(error) for _, error in step.failed] == [EngineFailed]
    seat.leave()


async def test_a_failure_of_the_computation_is_reported_for_the_sequences_in_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    seat, first = await aggregated_seat(engine, work(prompt(5)))
    seat.join(first)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.module.lm_head, "forward", _out_of_memory)
        step = await engine.step()
        assert "out of memory" in str(step.failed[0][1])
        run = engine.admit(work(prompt(5)))
        with pytest.raises(EngineFailed, match="out of memory"):
            async for _ in run.chunks():
                pass
        run.release()
        seat.leave()
    assert engine.occupancy().free_blocks == engine.occupancy().total_blocks
    assert len(await generate(engine, work(prompt(5)))) == 16


def _out_of_memory(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of memory")
