"""The sink's side of a handoff: which way is tried when, and what a cut transfer may still reach."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from pdq.adapters.tokenizer import load_tokenizer
from pdq.core.errors import BufferAtRisk, HandoffUnknown, PeerLost
from pdq.core.handoff import State
from pdq.core.layout import chunk_hash, manifest_digest
from pdq.core.lease import Lease, RecordKey
from pdq.core.messages import Policy, Sampling
from pdq.core.settings import EngineSettings, SimSettings, TransportSettings
from pdq.ports import (
    ChunkPlan,
    DecodeSeat,
    Fetched,
    HandoffRef,
    Locator,
    PrefillRun,
    PromptWork,
    Record,
)
from pdq.stages.fetch import Fetcher, Landed
from pdq.stages.local import WholeEngine
from tests.tiny_models import tiny_model
from workers.sim.engine import SimEngine

NOW_MS = 1_000_000
TOKENS = tuple(range(5, 50))
WORK = PromptWork("r", TOKENS, 0, Sampling(temperature=0, seed=0), 19)
SETTINGS = EngineSettings(block_size=8, chunk_tokens=32, kv_tokens=192)


class Way:
    """A transport that copies ``chunks``, or fails as it is told, and keeps what it was given to write to."""

    def __init__(self, name: str, chunks: Sequence[bytes], error: Exception | None = None) -> None:
        self.name = name
        self.into: list[memoryview] = []
        self.asked = 0
        self._chunks = chunks
        self._error = error

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        self.asked += 1
        self.into = [part for parts in into for part in parts]
        if self._error is not None:
            raise self._error
        for chunk, parts in zip(self._chunks, into, strict=True):
            at = 0
            for part in parts:
                part[:] = chunk[at : at + len(part)]
                at += len(part)
        return Fetched(self.name, plan.total, tuple(chunk_hash(chunk) for chunk in self._chunks))

    def write_late(self) -> None:
        for part in self.into:
            part[:] = b"\xff" * len(part)


def record_of(
    run: PrefillRun, chunks: Sequence[bytes], engine: WholeEngine, ways: Sequence[str], **more: Any
) -> Record:
    fields: dict[str, Any] = {
        "key": RecordKey("m", "r"),
        "state": State.READY,
        "attempt": 1,
        "epoch": 2,
        "deadline_ms": NOW_MS + 60_000,
        "reply_to": "x",
        "prompt_tokens": len(TOKENS),
        "max_new_tokens": 19,
        "secret": "s",
        "policy": Policy(),
        "source": Lease("prefill-0", 1, NOW_MS + 1000),
        "layout": engine.contract.layout,
        "locators": tuple(Locator(way, {}, 1) for way in ways),
        "digest": manifest_digest(list(run.plan.lengths), [chunk_hash(chunk) for chunk in chunks]),
    }
    return Record(**(fields | more))


def make_engine(kind: str) -> WholeEngine:
    if kind == "sim":
        return SimEngine("sim", SETTINGS, SimSettings(kv_bytes_per_token=64), load_tokenizer(None))
    from workers.torch.engine import TorchEngine

    return TorchEngine.load(tiny_model("llama"), SETTINGS)


async def first_two(engine: WholeEngine) -> list[int]:
    """The first tokens of an engine that nobody disturbs."""
    run = engine.admit(WORK, output=True)
    async for _ in run.chunks():
        pass
    assert run.first is not None
    seat = engine.adopt(run, WORK)
    seat.join(run.first)
    step = await engine.step()
    seat.leave()
    return [run.first.token, step.drawn[0][1].token]


async def prefilled(engine: WholeEngine) -> tuple[PrefillRun, list[bytes]]:
    run = engine.admit(WORK)
    chunks = [b"".join(bytes(part) for part in parts) async for _, parts in run.chunks()]
    run.release()
    return run, chunks


async def land(
    engine: WholeEngine,
    record: Record,
    run: PrefillRun,
    ways: Sequence[Way],
    again: Callable[[], Awaitable[Record]] | None = None,
) -> Landed:
    async def reserve() -> DecodeSeat:
        return engine.reserve(WORK, engine.contract.layout)

    async def same() -> Record:
        return record

    order: Any = tuple(way.name for way in ways)
    fetcher = Fetcher({way.name: way for way in ways}, TransportSettings(order=order))  # type: ignore[misc]
    return await fetcher.land(record, NOW_MS, run.plan, reserve, same, again or same)


@pytest.mark.parametrize("kind", ["sim", "torch"])
async def test_a_late_writer_reaches_no_block_that_somebody_else_has(kind: str) -> None:
    engine, reference = make_engine(kind), make_engine(kind)
    run, chunks = await prefilled(engine)
    late, good = Way("ucx", chunks, BufferAtRisk("cut in the middle")), Way("shm", chunks)
    free = engine.occupancy().free_blocks
    landed = await land(engine, record_of(run, chunks, engine, ["ucx", "shm"]), run, [late, good])
    assert landed.tried == [("ucx", "buffer_at_risk")]
    other = engine.admit(WORK)
    others = [parts async for _, parts in other.chunks()]
    late.write_late()
    assert [b"".join(map(bytes, parts)) for parts in others] == chunks
    landed.seat.join(other.first)
    step = await engine.step()
    assert [token.token for _, token in step.drawn] == (await first_two(reference))[1:]
    landed.seat.leave()
    other.release()
    lost = engine.contract.layout.blocks_for(len(TOKENS) + WORK.max_new_tokens)
    assert (engine.occupancy().quarantined_blocks, engine.occupancy().free_blocks) == (lost, free - lost)
    await engine.close()
    await reference.close()


@pytest.fixture
async def sim() -> tuple[WholeEngine, PrefillRun, list[bytes]]:
    engine = make_engine("sim")
    return engine, *(await prefilled(engine))


Sim = tuple[WholeEngine, PrefillRun, list[bytes]]


async def test_the_next_way_is_tried_when_one_brings_other_bytes(sim: Sim) -> None:
    engine, run, chunks = sim
    wrong, right = Way("ucx", [bytes(len(chunk)) for chunk in chunks]), Way("redis", chunks)
    landed = await land(engine, record_of(run, chunks, engine, ["redis", "ucx"]), run, [wrong, right])
    assert (landed.fetched.transport, landed.tried) == ("redis", [("ucx", "digest_mismatch")])
    assert [b"".join(map(bytes, parts)) for parts in landed.seat.buffers] == chunks


async def test_a_source_whose_lease_has_run_out_is_not_asked_but_its_tier_is(sim: Sim) -> None:
    engine, run, chunks = sim
    memory, tier = Way("ucx", chunks), Way("redis", chunks)
    locators = (Locator("ucx", {}, 1), Locator("redis", {}, 1, outlives=True))
    record = record_of(run, chunks, engine, [], locators=locators, source=Lease("prefill-0", 1, NOW_MS))
    landed = await land(engine, record, run, [memory, tier])
    assert (landed.fetched.transport, landed.tried) == ("redis", [("ucx", "source_lost")])
    assert not memory.asked


async def test_kv_that_was_moved_to_a_tier_during_the_fetch_is_found_there(sim: Sim) -> None:
    engine, run, chunks = sim
    memory, tier = Way("ucx", chunks, PeerLost("its source has left")), Way("redis", chunks)
    record = record_of(run, chunks, engine, ["ucx"])

    async def moved() -> Record:
        return msgspec.structs.replace(record, source=None, locators=(Locator("redis", {}, 1, outlives=True),))

    landed = await land(engine, record, run, [memory, tier], moved)
    assert (landed.fetched.transport, landed.tried) == ("redis", [("ucx", "peer_lost")])


async def test_when_no_way_serves_the_blocks_are_free_again(sim: Sim) -> None:
    engine, run, chunks = sim
    free = engine.occupancy().free_blocks
    way = Way("ucx", chunks, PeerLost("gone"))
    with pytest.raises(HandoffUnknown, match="ucx: peer_lost"):
        await land(engine, record_of(run, chunks, engine, ["ucx"]), run, [way])
    assert engine.occupancy().free_blocks == free
