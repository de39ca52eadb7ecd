"""Prefill: chunks, order, cancellation, and what the engine holds meanwhile."""

import asyncio
from collections.abc import Callable

import pytest

from pdq.core.errors import CapacityExhausted, ContextTooLong, EngineFailed, IncompatibleLayout, InvalidRequest
from pdq.core.layout import KvLayout
from pdq.core.messages import Sampling
from pdq.core.settings import EngineSettings
from pdq.ports import DecodeEngine, PrefillEngine
from tests.unit.torch.moves import MakeEngine, aggregated_seat, generate, prefill, prompt, work
from workers.torch.engine import TorchEngine
from workers.torch.prefill import TorchRun


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def all_free(engine: TorchEngine) -> bool:
    return engine.occupancy().free_blocks == engine.occupancy().total_blocks


def test_the_engine_is_both_engines_of_the_ports(engine_ports: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill_side, decode_side = engine_ports
    assert prefill_side.contract == decode_side.contract
    assert prefill_side.contract.first_token == "prefill"
    assert prefill_side.contract.max_context == 1024


@pytest.fixture
async def engine_ports(make_engine: MakeEngine) -> tuple[PrefillEngine, DecodeEngine]:
    engine = make_engine()
    return engine, engine  # a type checker proves the rest


async def test_chunks_come_in_order_with_the_planned_lengths_and_zeroed_slots(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (await aggregated_seat(engine, work(prompt(300))))[0].leave()  # leaves its traces in the blocks
    layout = engine.contract.layout
    run, chunks = await prefill(engine, work(prompt(69)))
    assert [len(chunk) for chunk in chunks] == list(run.plan.lengths) == layout.chunk_lengths(69)
    assert len(chunks) == 3
    slot = layout.kv_heads * layout.head_dim * 4
    last_block = memoryview(chunks[-1])
    used = (69 % layout.block_size) * slot
    for part in range(layout.layers * 2):
        slots = last_block[part * layout.block_size * slot : (part + 1) * layout.block_size * slot]
        assert any(slots[:used])
        assert not any(slots[used:])
    run.release()


async def test_adjacent_blocks_are_one_part(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run = engine.admit(work(prompt(100)))
    assert [len(parts) async for _, parts in run.chunks()] == [1, 1, 1, 1]
    run.release()


async def test_occupancy_is_exact(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run, _ = await prefill(engine, work(prompt(33)))
    occupancy = engine.occupancy()
    assert (occupancy.total_blocks, occupancy.free_blocks) == (512, 507)
    assert (occupancy.running, occupancy.held, occupancy.served, occupancy.tokens) == (0, 1, 1, 33)
    seat = engine.reserve(work(prompt(33), output=31), engine.contract.layout)
    assert engine.occupancy().free_blocks == 507 - 8
    assert engine.occupancy().running == 1
    run.release()
    run.release()
    seat.leave()
    seat.leave()
    assert all_free(engine)
    assert (engine.occupancy().running, engine.occupancy().held) == (0, 0)


async def test_cancelling_stops_at_the_next_chunk_and_frees_everything(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run = engine.admit(work(prompt(900)))
    seen: list[int] = []

    async def compute() -> None:
        async for index, _ in run.chunks():
            seen.append(index)

    task = asyncio.ensure_future(compute())
    await until(lambda: len(seen) >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run.release()
    await until(lambda: all_free(engine))
    assert len(seen) < 29
    assert engine.occupancy().running == 0
    assert await generate(engine, work(prompt(5)))


async def test_blocks_of_a_running_chunk_are_freed_only_when_it_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run = engine.admit(work(prompt(32)))
    chunk = asyncio.ensure_future(anext(run.chunks()))
    await until(lambda: run.computing)
    chunk.cancel()
    run.release()
    if run.computing:
        assert not all_free(engine)
    await until(lambda: not run.computing)
    assert all_free(engine)


async def test_a_short_prompt_starts_at_the_chunk_after_a_long_one_was_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine()
    long, short = engine.admit(work(prompt(900))), engine.admit(work(prompt(5)))
    order: list[str] = []

    async def compute(name: str, run: TorchRun) -> None:
        async for index, _ in run.chunks():
            order.append(f"{name} {index}")

    first = asyncio.ensure_future(compute("long", long))
    second = asyncio.ensure_future(compute("short", short))
    await until(lambda: len(order) >= 3)
    assert "short 0" not in order
    first.cancel()
    await second
    assert len(order) < 29
    long.release()
    short.release()
    await until(lambda: all_free(engine))


async def test_prompts_are_computed_in_the_order_of_admission(make_engine: MakeEngine) -> None:
    engine = make_engine()
    runs = [engine.admit(work(prompt(100, seed))) for seed in range(3)]
    order: list[int] = []

    async def compute(number: int) -> None:
        order.extend([number async for _ in runs[number].chunks()])

    # The last admitted asks first: it gets the chunk that nobody else wants yet, and then waits for the others.
    await asyncio.gather(compute(2), compute(1), compute(0))
    assert order == [0] * 4 + [1] * 4 + [2] * 4
    for run in runs:
        run.release()


async def test_what_does_not_fit_now_is_refused_and_takes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(settings=EngineSettings(block_size=8, chunk_tokens=32, kv_tokens=256, max_running=3))
    layout = engine.contract.layout
    run = engine.admit(work(prompt(200)))
    for refused in (lambda: engine.admit(work(prompt(57))), lambda: engine.reserve(work(prompt(50), output=7), layout)):
        with pytest.raises(CapacityExhausted, match="8 KV blocks needed, 7 of 32 free"):
            refused()
    assert engine.occupancy().free_blocks == 7
    seats = [engine.reserve(work(prompt(1), output=1), layout) for _ in range(2)]
    with pytest.raises(CapacityExhausted, match="3 requests"):
        engine.admit(work(prompt(1)))
    for held in seats:
        held.leave()
    run.release()
    assert all_free(engine)


async def test_what_can_never_fit_is_the_senders_error(make_engine: MakeEngine) -> None:
    engine = make_engine()
    layout = engine.contract.layout
    with pytest.raises(ContextTooLong, match="1025"):
        engine.admit(work(prompt(1025)))
    with pytest.raises(ContextTooLong, match="1000 prompt and up to 25 output"):
        engine.reserve(work(prompt(1000), output=25), layout)
    with pytest.raises(ContextTooLong):
        engine.admit(work(prompt(1000), output=25), output=True)
    with pytest.raises(InvalidRequest, match="no tokens"):
        engine.admit(work([]))
    with pytest.raises(InvalidRequest, match="512"):
        engine.admit(work([5, 512]))
    with pytest.raises(InvalidRequest, match="seed"):
        engine.admit(work([5], Sampling(temperature=1)))
    assert all_free(engine)
    assert engine.occupancy().served == 0


async def test_a_layout_that_does_not_map_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    other = KvLayout(layers=3, kv_heads=2, head_dim=16, dtype="float32", block_size=8, chunk_tokens=32)
    with pytest.raises(IncompatibleLayout, match="layers: source 3, sink 2"):
        engine.reserve(work(prompt(5)), other)
    assert all_free(engine)


async def test_quarantined_blocks_are_never_handed_out_again(make_engine: MakeEngine) -> None:
    engine = make_engine(settings=EngineSettings(block_size=8, chunk_tokens=32, kv_tokens=256))
    seat = engine.reserve(work(prompt(20), output=4), engine.contract.layout)
    buffers = [part for parts in seat.buffers for part in parts]
    seat.quarantine()
    seat.leave()
    assert engine.occupancy().free_blocks == 29
    assert engine.occupancy().running == 0
    run, before = await prefill(engine, work(prompt(29 * 8)))
    for part in buffers:  # the late write
        part[:] = b"\xff" * len(part)
    again = b"".join(bytes(part) for chunk in before for part in [chunk])
    assert again == b"".join(before)
    assert run.first is not None
    with pytest.raises(CapacityExhausted):
        engine.admit(work(prompt(1)))
    run.release()


async def test_only_a_finished_run_with_room_for_its_output_is_adopted(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()
    asked = work(prompt(5), output=20)
    finished, _ = await prefill(engine, asked)
    unfinished = engine.admit(asked, output=True)
    for owner, run in ((engine, finished), (engine, unfinished), (other, finished)):
        with pytest.raises(EngineFailed):
            owner.adopt(run, asked)
    finished.release()
    unfinished.release()
    assert all_free(engine)


async def test_a_closed_engine_refuses_work(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run = engine.admit(work(prompt(5)))
    await engine.close()
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await anext(run.chunks())
    run.release()
    assert all_free(engine)
