"""What every engine behind the two engine ports promises, whatever it computes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from pdq.adapters.tokenizer import ByteTokenizer
from pdq.core.errors import CapacityExhausted, ContextTooLong
from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings, SimSettings
from pdq.ports import DecodeSeat, Drawn, PrefillRun, PromptWork
from pdq.stages.local import WholeEngine
from tests.tiny_models import tiny_model
from workers.sim.engine import SimEngine
from workers.torch.engine import TorchEngine

SETTINGS = EngineSettings(block_size=8, chunk_tokens=32, kv_tokens=1024, max_running=32)
MakeEngine = Callable[[], WholeEngine]


def make_sim() -> WholeEngine:
    return SimEngine("sim", SETTINGS, SimSettings(max_context=1024), ByteTokenizer())


def make_torch() -> WholeEngine:
    return TorchEngine.load(tiny_model("llama"), SETTINGS)


@pytest.fixture(params=[make_sim, make_torch], ids=["sim", "torch"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[MakeEngine]:
    made: list[WholeEngine] = []

    def one() -> WholeEngine:
        made.append(request.param())
        return made[-1]

    yield one
    for engine in made:
        await engine.close()


def work(length: int, output: int = 8, *, temperature: float = 0.0, name: str = "r") -> PromptWork:
    tokens = tuple(33 + (7 * n + length) % 90 for n in range(length))
    return PromptWork(name, tokens, 0, Sampling(temperature=temperature, seed=5), output)


def resumed(asked: PromptWork, output: Sequence[int]) -> PromptWork:
    tokens = asked.tokens + tuple(output)
    return PromptWork(asked.request_id, tokens, len(output), asked.sampling, asked.max_new_tokens - len(output))


async def prefilled(run: PrefillRun) -> list[bytes]:
    return [b"".join(bytes(part) for part in parts) async for _, parts in run.chunks()]


async def handed_over(source: WholeEngine, sink: WholeEngine, asked: PromptWork) -> tuple[DecodeSeat, Drawn]:
    run = source.admit(asked)
    chunks = await prefilled(run)
    assert tuple(map(len, chunks)) == run.plan.lengths
    seat = sink.reserve(asked, source.contract.layout)
    for chunk, parts in zip(chunks, seat.buffers, strict=True):
        rest = memoryview(chunk)
        for part in parts:
            part[:], rest = rest[: len(part)], rest[len(part) :]
        assert not rest
    seat.landed()
    first = run.first
    run.release()
    assert first is not None
    return seat, first


async def decoded(engine: WholeEngine, seats: dict[DecodeSeat, list[int]], count: int) -> None:
    """Step until every seat has ``count`` tokens, then leave."""
    while any(len(tokens) < count for tokens in seats.values()):
        step = await asyncio.wait_for(engine.step(), 30)
        assert not step.failed
        for seat, drawn in step.drawn:
            if len(seats[seat]) < count:
                seats[seat].append(drawn.token)
            if len(seats[seat]) == count:
                seat.leave()


async def aggregated(engine: WholeEngine, asked: PromptWork) -> list[int]:
    run = engine.admit(asked, output=True)
    await prefilled(run)
    assert run.first is not None
    tokens = [run.first.token]
    seat = engine.adopt(run, asked)
    seat.join(run.first)
    await decoded(engine, {seat: tokens}, asked.max_new_tokens)
    return tokens


def all_free(engine: WholeEngine) -> bool:
    occupancy = engine.occupancy()
    return occupancy.free_blocks == occupancy.total_blocks


async def eventually(condition: Callable[[], bool]) -> None:
    """Engines may free blocks only when a pass that is running has ended."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 200])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_disaggregated_gives_the_tokens_of_aggregated(make: MakeEngine, length: int, temperature: float) -> None:
    source, sink, both = make(), make(), make()
    asked = work(length, temperature=temperature)
    seat, first = await handed_over(source, sink, asked)
    tokens = [first.token]
    seat.join(first)
    await decoded(sink, {seat: tokens}, asked.max_new_tokens)
    assert tokens == await aggregated(both, asked)
    assert all_free(source)
    assert all_free(both)
    await eventually(lambda: all_free(sink))


async def test_sequences_join_and_leave_a_running_batch_without_changing_each_other(make: MakeEngine) -> None:
    engine, alone = make(), make()
    wanted = [work(5 + 9 * n, output=6, temperature=0.5, name=str(n)) for n in range(6)]
    results = await asyncio.gather(*(_served(make, engine, asked) for asked in wanted), _pump(engine, 6))
    for asked, tokens in zip(wanted, results[:-1], strict=True):
        assert tokens == await aggregated(alone, asked)
    assert engine.occupancy().peak_batch > 1
    await eventually(lambda: all_free(engine))


_running: dict[DecodeSeat, tuple[list[int], asyncio.Future[None], int]] = {}


async def _served(make: MakeEngine, engine: WholeEngine, asked: PromptWork) -> list[int]:
    seat, first = await handed_over(make(), engine, asked)
    tokens = [first.token]
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    _running[seat] = (tokens, done, asked.max_new_tokens)
    seat.join(first)
    await done
    return tokens


async def _pump(engine: WholeEngine, sequences: int) -> list[int]:
    ended = 0
    while ended < sequences:
        step = await asyncio.wait_for(engine.step(), 30)
        for seat, drawn in step.drawn:
            tokens, done, count = _running[seat]
            if done.done():
                continue
            tokens.append(drawn.token)
            if len(tokens) == count:
                seat.leave()
                done.set_result(None)
                ended += 1
    return []


async def test_a_resumed_prompt_continues_as_if_nothing_had_happened(make: MakeEngine) -> None:
    asked = work(40, output=10, temperature=0.9)
    whole = await aggregated(make(), asked)
    for cut in (1, 4, 9):
        rest = await aggregated(make(), resumed(asked, whole[:cut]))
        assert whole[:cut] + rest == whole


async def test_a_full_pool_refuses_and_takes_again_once_something_is_released(make: MakeEngine) -> None:
    engine = make()
    asked = work(500, output=20)
    first, second = engine.admit(asked), engine.admit(asked)
    with pytest.raises(CapacityExhausted):
        engine.admit(asked)
    first.release()
    first.release()
    third = engine.admit(asked)
    second.release()
    third.release()
    assert all_free(engine)


async def test_what_can_never_fit_is_refused_for_good(make: MakeEngine) -> None:
    engine = make()
    with pytest.raises(ContextTooLong):
        engine.admit(work(5000))
    with pytest.raises(ContextTooLong):
        engine.reserve(work(5000), engine.contract.layout)
    assert all_free(engine)


async def test_output_is_reserved_and_not_hoped_for(make: MakeEngine) -> None:
    engine = make()
    layout = engine.contract.layout
    before = engine.occupancy().free_blocks
    seat = engine.reserve(work(30, output=100), layout)
    assert before - engine.occupancy().free_blocks == layout.blocks_for(130)
    seat.leave()
    seat.leave()
    assert engine.occupancy().free_blocks == before


async def test_a_cut_prefill_gives_all_blocks_back(make: MakeEngine) -> None:
    engine = make()
    run = engine.admit(work(300))
    chunks = run.chunks()
    await anext(chunks)
    closing: Awaitable[None] = chunks.aclose()  # type: ignore[attr-defined]
    await closing
    run.release()
    await eventually(lambda: all_free(engine))


async def test_quarantined_blocks_stay_out_of_the_pool(make: MakeEngine) -> None:
    engine = make()
    before = engine.occupancy()
    seat = engine.reserve(work(30, output=10), engine.contract.layout)
    seat.quarantine()
    after = engine.occupancy()
    assert after.free_blocks == before.free_blocks - engine.contract.layout.blocks_for(40)
    assert after.total_blocks == before.total_blocks


async def test_slots_past_the_prompt_are_zero_on_the_wire(make: MakeEngine) -> None:
    """What a former request left in a block must not travel with the next one."""
    engine = make()
    dirty = engine.admit(work(1000 - 8))
    await prefilled(dirty)
    dirty.release()
    await eventually(lambda: all_free(engine))
    run = engine.admit(work(9))
    (chunk,) = await prefilled(run)
    layout = engine.contract.layout
    last = chunk[-layout.block_bytes :]
    slot = layout.block_bytes // (layout.layers * 2 * layout.block_size)
    for plane in range(layout.layers * 2):
        used = plane * layout.block_size * slot
        assert any(last[used : used + slot])
        assert not any(last[used + slot : used + layout.block_size * slot])
    run.release()
