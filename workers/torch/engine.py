"""The torch engine: one model, one block pool, both sides of the handoff.

``TorchEngine`` is a ``PrefillEngine`` and a ``DecodeEngine`` over the same blocks; a worker uses one side, or both when
it serves requests aggregated. All bookkeeping happens on the event loop, all tensor work on one compute thread
(``turns``), and what a running pass reads or writes stays allocated until that pass has ended, whoever left meanwhile.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import transformers

from pdq.core.errors import CapacityExhausted, ContextTooLong, EngineFailed, InvalidRequest
from pdq.core.layout import Direct, KvLayout, map_layout
from pdq.core.settings import EngineSettings
from pdq.ports import BackendContract, Buffer, ChunkPlan, Drawn, Occupancy, PrefillRun, PromptWork, Step
from workers.torch.attention import Span, block_rows
from workers.torch.forward import ForwardPass, Part
from workers.torch.model import LoadedModel, load_model
from workers.torch.pool import InPlace, KvPool, Landing, Staged
from workers.torch.sampler import SamplingState
from workers.torch.turns import ComputeThread, Kind


class TorchEngine:
    """Create with ``load``, on any thread; every other method belongs to the event loop's thread."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self.model = model
        self.settings = settings
        self.pool = KvPool(model.layout, max(1, settings.kv_tokens // settings.block_size), model.device)
        self.forward = ForwardPass(model, self.pool)
        self.compute = ComputeThread(_use_configured_threads)
        self.runs: set[TorchRun] = set()
        self.seats: set[TorchSeat] = set()
        self._joined: list[TorchSeat] = []
        self._arrived = asyncio.Event()
        self._admitted = 0
        self._steps = 0
        self._tokens = 0
        self._peak_batch = 0

    @classmethod
    def load(cls, directory: Path, settings: EngineSettings) -> "TorchEngine":
        """Load the checkpoint in ``directory`` (blocking: call it from a thread).

        Raises:
            IncompatibleContract: not a model that this engine can serve.
            InvalidSettings: no such directory, or no such device.
        """
        _use_configured_threads()
        return cls(load_model(directory, settings), settings)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.model.eos_token_ids

    @property
    def contract(self) -> BackendContract:
        return BackendContract(
            name="torch",
            version=f"torch {torch.__version__}, transformers {transformers.__version__}",
            first_token="prefill",
            order=("on_start", "on_first_chunk", "on_complete"),
            direction="pull",
            chunked=True,
            reentry=True,
            resume=True,
            layout=self.model.layout,
            fingerprint=self.model.fingerprint,
            max_context=self.model.max_context,
            features=("logprobs",),
        )

    def occupancy(self) -> Occupancy:
        held = sum(run.finished for run in self.runs)
        return Occupancy(
            total_blocks=self.pool.allocator.total,
            free_blocks=self.pool.allocator.free,
            running=len(self.runs) - held + len(self.seats),
            held=held,
            served=self._admitted,
            steps=self._steps,
            tokens=self._tokens,
            peak_batch=self._peak_batch,
        )

    async def close(self) -> None:
        """Returns when the pass that runs, if any, has ended. Runs and seats are of no use afterwards."""
        await self.compute.close()

    # --- Prefill ------------------------------------------------------------------------------------------------------

    def admit(self, work: PromptWork, *, output: bool = False) -> "TorchRun":
        run = TorchRun(self, work, self._allocate(work, work.max_new_tokens if output else 0), self._admitted)
        self._admitted += 1
        self.runs.add(run)
        return run

    # --- Decode -------------------------------------------------------------------------------------------------------

    def reserve(self, work: PromptWork, source: KvLayout) -> "TorchSeat":
        mapping = map_layout(source, self.model.layout)
        blocks = self._allocate(work, work.max_new_tokens)
        in_place = isinstance(mapping, Direct) and self.model.device.type == "cpu"
        landing = (InPlace if in_place else Staged)(self.pool, blocks, len(work.tokens), source)
        self._admitted += 1
        return TorchSeat(self, work, blocks, landing)

    def adopt(self, run: PrefillRun, work: PromptWork) -> "TorchSeat":
        if not (isinstance(run, TorchRun) and run in self.runs and run.finished):
            raise EngineFailed("only a run of this engine that has computed its whole prompt can be adopted")
        if len(run.blocks) < self.model.layout.blocks_for(len(work.tokens) + work.max_new_tokens):
            raise EngineFailed("the run was admitted without room for its output: it cannot be adopted")
        return TorchSeat(self, work, run.surrender(), None)

    async def step(self) -> Step:
        while True:
            await self._arrived.wait()
            job = _StepJob(self)
            self.compute.enqueue(Kind.STEP, job)
            if await job.finished:
                break
        drawn = [(seat, result) for seat, result in job.drawn if not seat.left]
        for seat, result in drawn:
            seat.append(result.token)
        for seat, _ in job.failed:
            self.take_from_batch(seat)
        self._steps += 1
        self._tokens += len(drawn)
        self._peak_batch = max(self._peak_batch, len(job.seats))
        failed = [(seat, error) for seat, error in job.failed if not seat.left]
        return Step(drawn=drawn, seconds=job.seconds, failed=failed)

    @property
    def batch(self) -> Sequence["TorchSeat"]:
        return self._joined

    def put_in_batch(self, seat: "TorchSeat") -> None:
        self._joined.append(seat)
        self._arrived.set()

    def take_from_batch(self, seat: "TorchSeat") -> None:
        if seat in self._joined:
            self._joined.remove(seat)
        if not self._joined:
            self._arrived.clear()

    def count_prefilled(self, tokens: int) -> None:
        self._tokens += tokens

    # --- Room ---------------------------------------------------------------------------------------------------------

    def _allocate(self, work: PromptWork, output: int) -> list[int]:
        """Blocks for the prompt and ``output`` more tokens."""
        if not work.tokens:
            raise InvalidRequest("the prompt has no tokens: give at least one", field="prompt")
        strange = next((token for token in work.tokens if not 0 <= token < self.model.vocab_size), None)
        if strange is not None:
            raise InvalidRequest(
                f"token {strange} is not in the vocabulary of {self.model.vocab_size} tokens", field="prompt"
            )
        if work.sampling.temperature > 0 and work.sampling.seed is None:
            raise InvalidRequest("no seed: whoever accepts a request must choose one", field="seed")
        layout, allocator = self.model.layout, self.pool.allocator
        tokens = len(work.tokens) + output
        limit = min(self.model.max_context, allocator.total * layout.block_size)
        if tokens > limit:
            raise ContextTooLong(
                f"{len(work.tokens)} prompt tokens and up to {output} output tokens make {tokens}; at most {limit} fit "
                f"(model context {self.model.max_context}, {allocator.total} KV blocks of {layout.block_size} tokens)",
                field="prompt",
            )
        if len(self.runs) + len(self.seats) >= self.settings.max_running:
            raise CapacityExhausted(f"{self.settings.max_running} requests are running or held; try again later")
        return allocator.allocate(layout.blocks_for(tokens))


class _StepJob:
    """One decode step: all seats that are in the batch when its turn comes."""

    def __init__(self, engine: TorchEngine) -> None:
        self.finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """False: there was nobody left in the batch."""
        self.seats: list[TorchSeat] = []
        self.drawn: list[tuple[TorchSeat, Drawn]] = []
        self.failed: list[tuple[TorchSeat, EngineFailed]] = []
        self.seconds = 0.0
        self._engine = engine

    def begin(self) -> Callable[[], list[Drawn | None]] | None:
        if self.finished.done():  # the caller was cancelled
            return None
        for seat in self._engine.batch:
            if seat.has_room:
                self.seats.append(seat)
            else:
                self.failed.append((seat, EngineFailed("all output tokens that were reserved for it are used up")))
        if not self.seats:
            self.finished.set_result(bool(self.failed))
            return None
        for seat in self.seats:
            seat.busy = True
        parts = [seat.next_part() for seat in self.seats]

        def work() -> list[Drawn | None]:
            started = time.perf_counter()
            results = self._engine.forward(parts)
            self.seconds = time.perf_counter() - started
            return results

        return work

    def end(self, outcome: Future[list[Drawn | None]]) -> bool:
        if error := outcome.exception():
            failure = EngineFailed(f"a decode step over {len(self.seats)} sequences failed: {_told(error)}")
            failure.__cause__ = error
            self.failed += [(seat, failure) for seat in self.seats]
        else:
            for seat, result in zip(self.seats, outcome.result(), strict=True):
                if result is None:
                    problem = f"the logits after token {len(seat.tokens)} are not finite"
                    self.failed.append((seat, EngineFailed(problem)))
                else:
                    self.drawn.append((seat, result))
        for seat in self.seats:
            seat.settle()
        if not self.finished.done():
            self.finished.set_result(True)
        return False


class TorchRun:
    """One prompt being computed, or computed and held (``PrefillRun``).

    Once ``chunks`` is iterated, the run computes ahead of whoever iterates: offering a chunk overlaps computing the next.
    """

    def __init__(self, engine: TorchEngine, work: PromptWork, blocks: list[int], order: int) -> None:
        self.blocks = blocks
        self.computing = False
        self._engine, self._work, self._order = engine, work, order
        self._layout = engine.model.layout
        self._rows = block_rows(engine.pool, blocks)
        self._chunks: list[list[memoryview]] = []
        self._first: Drawn | None = None
        self._error: EngineFailed | None = None
        self._progress = asyncio.Event()
        self._stopped = False
        self._released = False

    @property
    def plan(self) -> ChunkPlan:
        return ChunkPlan(tuple(self._layout.chunk_lengths(len(self._work.tokens))))

    @property
    def first(self) -> Drawn | None:
        return self._first

    @property
    def finished(self) -> bool:
        return self._first is not None

    async def chunks(self) -> AsyncGenerator[tuple[int, Sequence[Buffer]], None]:
        self._engine.compute.enqueue(Kind.CHUNK, self, self._order)
        try:
            for index in range(self._layout.chunks_for(len(self._work.tokens))):
                while len(self._chunks) <= index:
                    if self._error is not None:
                        raise self._error
                    self._progress.clear()
                    await self._progress.wait()
                yield index, self._chunks[index]
        finally:
            self._stopped = True

    def release(self) -> None:
        self._stopped = True
        self._released = True
        self._engine.runs.discard(self)
        if not self.finished:
            self._fail(EngineFailed("the run was released before its prompt was computed"))
        if not self.computing:
            blocks, self.blocks = self.blocks, []
            self._engine.pool.allocator.release(blocks)

    def surrender(self) -> list[int]:
        """The blocks change hands: this run no longer owns them."""
        blocks, self.blocks = self.blocks, []
        self.release()
        return blocks

    # --- For the compute thread's line --------------------------------------------------------------------------------

    def begin(self) -> Callable[[], tuple[list[Drawn | None], list[memoryview]]] | None:
        if self._stopped:
            self._fail(EngineFailed("the run was stopped: admit the prompt again"))
            return None
        engine, tokens, index = self._engine, self._work.tokens, len(self._chunks)
        at = index * self._layout.chunk_tokens
        piece = tokens[at : at + self._layout.chunk_tokens]
        last = at + len(piece) == len(tokens)
        part = Part(piece, Span(at, len(piece), self._rows), sampling_state(engine, self._work) if last else None)
        blocks = [self.blocks[i] for i in self._layout.chunk_blocks(index, len(tokens))]
        self.computing = True

        def work() -> tuple[list[Drawn | None], list[memoryview]]:
            drawn = engine.forward([part])
            used = len(tokens) % self._layout.block_size
            if last and used:
                engine.pool.zero_tail(blocks[-1], used)
            return drawn, engine.pool.export(blocks)

        return work

    def end(self, outcome: Future[tuple[list[Drawn | None], list[memoryview]]]) -> bool:
        self.computing = False
        at = len(self._chunks) * self._layout.chunk_tokens
        if error := outcome.exception():
            self._fail(EngineFailed(f"prefill failed in the chunk at token {at}: {_told(error)}"), error)
        else:
            drawn, parts = outcome.result()
            if drawn == [None]:
                self._fail(EngineFailed("the logits after the prompt are not finite"))
            else:
                self._first = drawn[0] if drawn else None
                self._engine.count_prefilled(min(self._layout.chunk_tokens, len(self._work.tokens) - at))
                self._chunks.append(parts)
                self._progress.set()
        if self._released:
            self.release()
        return not (self._stopped or self.finished or self._error)

    def _fail(self, error: EngineFailed, cause: BaseException | None = None) -> None:
        self._error = error
        self._error.__cause__ = cause
        self._progress.set()


class TorchSeat:
    """One sequence's place in the decode batch (``DecodeSeat``)."""

    def __init__(self, engine: TorchEngine, work: PromptWork, blocks: list[int], landing: Landing | None) -> None:
        self.busy = False
        """A pass that reads and writes these blocks is running."""
        self.left = False
        self.tokens = list(work.tokens)
        self._engine, self._work, self._blocks, self._landing = engine, work, blocks, landing
        self._rows = block_rows(engine.pool, blocks)
        self._limit = len(work.tokens) + work.max_new_tokens
        self._computed = len(work.tokens)
        self._sampling = sampling_state(engine, work)
        self._joined = False
        self._return: Callable[[Sequence[int]], None] = engine.pool.allocator.release
        engine.seats.add(self)

    @property
    def buffers(self) -> list[list[memoryview]]:
        return self._landing.buffers if self._landing else []

    def landed(self) -> None:
        if self._landing:
            self._landing.commit()
            self._landing = None

    def join(self, first: Drawn | None) -> None:
        if self.left or self._joined:
            raise EngineFailed("the seat has left, or is in the batch already")
        self._joined = True
        if first is not None:
            self.append(first.token)
        else:
            self._computed -= 1  # The last prompt token goes through the model again: its logits give the first token.
        self._engine.put_in_batch(self)

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self._engine.seats.discard(self)
            self._engine.take_from_batch(self)
            if not self.busy:
                self.settle()

    def quarantine(self) -> None:
        if not self.left:
            self._return = self._engine.pool.allocator.quarantine
            self.leave()

    # --- For the engine -----------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self.tokens) < self._limit

    def next_part(self) -> Part:
        at = self._computed
        return Part(self.tokens[at:], Span(at, len(self.tokens) - at, self._rows), self._sampling)

    def append(self, token: int) -> None:
        self._computed = len(self.tokens)
        self.tokens.append(token)
        self._sampling.append(token)

    def settle(self) -> None:
        """No pass uses the blocks any more: if the seat has left, they go where ``leave`` or ``quarantine`` said."""
        self.busy = False
        if self.left:
            blocks, self._blocks = self._blocks, []
            self._return(blocks)


def sampling_state(engine: TorchEngine, work: PromptWork) -> SamplingState:
    """The state before the next token: resumed tokens are output."""
    split = len(work.tokens) - work.resumed
    state = SamplingState(work.sampling, engine.eos_token_ids, work.tokens[:split])
    for token in work.tokens[split:]:
        state.append(token)
    return state


def _use_configured_threads() -> None:
    """Torch keeps its thread count per thread: the compute thread is told the one that the environment names."""
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if configured.isdigit() and int(configured):
        torch.set_num_threads(int(configured))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
