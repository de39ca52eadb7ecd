"""The sim engine: no model, time that costs what you say, tokens that follow from the KV bytes.

It is a complete engine behind the same ports as the real ones (chunked prefill, paged blocks, a batch that sequences
join and leave at every step), so everything around it does the work it does in production.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

import xxhash

from pdq.core.errors import CapacityExhausted, ContextTooLong, IncompatibleLayout
from pdq.core.layout import Direct, Fingerprint, KvLayout, map_layout
from pdq.core.settings import EngineSettings, SimSettings
from pdq.ports import (
    BackendContract,
    Buffer,
    ChunkPlan,
    Drawn,
    Occupancy,
    PrefillRun,
    PromptWork,
    Step,
    Tokenizer,
)
from workers.sim.kv import KvPool, sim_layout

VERSION: Final = "1"
FIRST_PRINTABLE: Final = 32
PRINTABLE: Final = 95


def draw(link: bytes, work: PromptWork, position: int) -> Drawn:
    """The output token at ``position``: a printable byte that follows from the prompt's KV, the position and, unless
    greedy, the seed."""
    seed = work.sampling.seed or 0
    salt = b"greedy" if work.sampling.temperature == 0 else seed.to_bytes(8, "little", signed=True)
    number = xxhash.xxh3_64_intdigest(link + salt + position.to_bytes(4, "little"))
    token = FIRST_PRINTABLE + number % PRINTABLE
    return Drawn(token, -1.0, ((token, -1.0),))


class SimEngine:
    def __init__(self, model: str, engine: EngineSettings, sim: SimSettings, tokenizer: Tokenizer) -> None:
        self._sim = sim
        layout = sim_layout(sim.kv_bytes_per_token, engine.block_size, engine.chunk_tokens)
        self.pool = KvPool(layout, layout.blocks_for(engine.kv_tokens))
        self.contract = BackendContract(
            name="sim",
            version=VERSION,
            first_token="prefill",
            order=("on_start", "on_first_chunk", "on_complete"),
            direction="pull",
            chunked=True,
            reentry=True,
            resume=True,
            layout=layout,
            fingerprint=Fingerprint(model=model, weights=f"sim-{VERSION}", tokenizer=tokenizer.digest, dtype="uint8"),
            # What does not fit into the blocks is refused before anything is computed, as with any other limit.
            max_context=min(sim.max_context, self.pool.total * layout.block_size),
            features=("logprobs",),
        )
        self.computing = asyncio.Lock()
        """Prompts are computed one after the other, and (aggregated) between steps, as on one accelerator."""
        self._batch: dict[SimSeat, None] = {}
        self._joined = asyncio.Event()
        self.tokens = 0
        self._steps = 0
        self._peak = 0

    def occupancy(self) -> Occupancy:
        return Occupancy(
            total_blocks=self.pool.total,
            free_blocks=self.pool.free,
            running=len(self._batch),
            held=0,
            steps=self._steps,
            tokens=self.tokens,
            peak_batch=self._peak,
            quarantined_blocks=self.pool.quarantined,
        )

    async def close(self) -> None:
        self._batch.clear()

    # --- prefill ------------------------------------------------------------------------------------------------------

    def admit(self, work: PromptWork, *, output: bool = False) -> "SimRun":
        blocks = self._take(work, work.max_new_tokens if output else 0)
        return SimRun(self, work, blocks)

    async def spend(self, milliseconds: float) -> None:
        """The time that computing takes; zero still lets others run."""
        await asyncio.sleep(milliseconds / 1000)

    @property
    def prefill_ms_per_token(self) -> float:
        return self._sim.prefill_ms_per_token

    # --- decode -------------------------------------------------------------------------------------------------------

    def reserve(self, work: PromptWork, source: KvLayout) -> "SimSeat":
        if not isinstance(map_layout(source, self.contract.layout), Direct):
            raise IncompatibleLayout(
                f"the sim engine does not regroup blocks (source {source.block_size}, here "
                f"{self.contract.layout.block_size}): set PDQ_ENGINE_BLOCK_SIZE alike in both pools"
            )
        return SimSeat(self, work, self._take(work, work.max_new_tokens))

    def adopt(self, run: PrefillRun, work: PromptWork) -> "SimSeat":
        assert isinstance(run, SimRun)
        return SimSeat(self, work, run.surrender())

    async def step(self) -> Step:
        while not self._batch:
            self._joined.clear()
            await self._joined.wait()
        started = time.monotonic()
        if self._sim.step_ms:
            async with self.computing:
                await self.spend(self._sim.step_ms)
        else:
            await asyncio.sleep(0)
        drawn = [(seat, seat.next()) for seat in self._batch]
        self._steps += 1
        self.tokens += len(drawn)
        self._peak = max(self._peak, len(drawn))
        return Step(drawn, time.monotonic() - started)

    def put_in_batch(self, seat: "SimSeat") -> None:
        self._batch[seat] = None
        self._joined.set()

    def take_from_batch(self, seat: "SimSeat") -> None:
        self._batch.pop(seat, None)

    def _take(self, work: PromptWork, output: int) -> list[int]:
        needed = len(work.tokens) + output
        if needed > self.contract.max_context:
            raise ContextTooLong(f"{needed} tokens exceed the context of {self.contract.max_context}")
        count = self.contract.layout.blocks_for(needed)
        if count > self.pool.total:
            raise ContextTooLong(
                f"{count} blocks needed, this worker has {self.pool.total}: raise PDQ_ENGINE_KV_TOKENS"
            )
        blocks = self.pool.take(count)
        if blocks is None:
            raise CapacityExhausted(f"{count} blocks needed, {self.pool.free} are free")
        return blocks


class SimRun:
    """One prompt being prefilled."""

    def __init__(self, engine: SimEngine, work: PromptWork, blocks: list[int]) -> None:
        self._engine = engine
        self._work = work
        self._blocks = blocks
        layout = engine.contract.layout
        self.plan = ChunkPlan(tuple(layout.chunk_lengths(len(work.tokens))))
        self.first: Drawn | None = None

    @property
    def blocks_held(self) -> int:
        return len(self._blocks)

    async def chunks(self) -> AsyncIterator[tuple[int, Sequence[Buffer]]]:
        engine, layout, tokens = self._engine, self._engine.contract.layout, self._work.tokens
        link = b""
        async with engine.computing:
            for index in range(len(self.plan.lengths)):
                start = index * layout.chunk_tokens
                chunk = tokens[start : start + layout.chunk_tokens]
                await engine.spend(len(chunk) * engine.prefill_ms_per_token)
                link = engine.pool.write(self._blocks, start, chunk, link)
                where = layout.chunk_blocks(index, len(tokens))
                if where[-1] == layout.blocks_for(len(tokens)) - 1 and (used := len(tokens) % layout.block_size):
                    engine.pool.clear_tail(self._blocks[where[-1]], used)
                engine.tokens += len(chunk)
                yield index, engine.pool.parts(self._blocks[where.start : where.stop])
        prompt_end = len(tokens) - self._work.resumed - 1
        self.first = draw(engine.pool.link_at(self._blocks, prompt_end), self._work, self._work.resumed)

    def surrender(self) -> list[int]:
        """The blocks, which are somebody else's from now on."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def release(self) -> None:
        self._engine.pool.give_back(self.surrender())


class SimSeat:
    """One sequence's place in the batch."""

    def __init__(self, engine: SimEngine, work: PromptWork, blocks: list[int]) -> None:
        self._engine = engine
        self._work = work
        self._blocks = blocks
        self._position = work.resumed
        self._link = b""

    @property
    def buffers(self) -> list[list[memoryview]]:
        layout, tokens = self._engine.contract.layout, len(self._work.tokens)
        spans = (layout.chunk_blocks(index, tokens) for index in range(layout.chunks_for(tokens)))
        return [self._engine.pool.parts(self._blocks[span.start : span.stop]) for span in spans]

    @property
    def blocks_held(self) -> int:
        return len(self._blocks)

    def landed(self) -> None:
        """Nothing to copy: the bytes lie where they belong."""

    def join(self, first: Drawn | None, replay: Sequence[int] = ()) -> None:
        prompt_end = len(self._work.tokens) - self._work.resumed - 1
        self._link = self._engine.pool.link_at(self._blocks, prompt_end)
        self._position += (first is not None) + len(replay)
        self._engine.put_in_batch(self)

    def next(self) -> Drawn:
        drawn = draw(self._link, self._work, self._position)
        self._position += 1
        return drawn

    def leave(self) -> None:
        self._engine.take_from_batch(self)
        blocks, self._blocks = self._blocks, []
        self._engine.pool.give_back(blocks)

    def quarantine(self) -> None:
        self._engine.take_from_batch(self)
        self._engine.pool.quarantined += len(self._blocks)
        self._blocks = []
