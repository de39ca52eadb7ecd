"""One prompt in the engine: computed chunk by chunk, then held until it is released or adopted."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future

from pdq.core.errors import EngineFailed
from pdq.ports import Buffer, ChunkPlan, Drawn, PromptWork
from workers.torch.attention import Span, block_rows
from workers.torch.forward import Part
from workers.torch.machine import Machine, told
from workers.torch.turns import Kind


class TorchRun:
    """One prompt being computed, or computed and held (``PrefillRun``).

    Once ``chunks`` is iterated, the run computes ahead of whoever iterates: offering a chunk overlaps computing the next.
    """

    def __init__(
        self, machine: Machine, work: PromptWork, blocks: list[int], order: int, gone: Callable[["TorchRun"], None]
    ) -> None:
        self.blocks = blocks
        self.computing = False
        self._machine, self._work, self._order, self._gone = machine, work, order, gone
        self._layout = machine.layout
        self._rows = block_rows(machine.pool, blocks)
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
    def blocks_held(self) -> int:
        return len(self.blocks)

    @property
    def first(self) -> Drawn | None:
        return self._first

    @property
    def finished(self) -> bool:
        return self._first is not None

    async def chunks(self) -> AsyncGenerator[tuple[int, Sequence[Buffer]], None]:
        self._machine.compute.enqueue(Kind.CHUNK, self, self._order)
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
        self._gone(self)
        if not self.finished:
            self._fail(EngineFailed("the run was released before its prompt was computed"))
        if not self.computing:
            blocks, self.blocks = self.blocks, []
            self._machine.pool.allocator.release(blocks)

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
        machine, tokens, index = self._machine, self._work.tokens, len(self._chunks)
        at = index * self._layout.chunk_tokens
        piece = tokens[at : at + self._layout.chunk_tokens]
        last = at + len(piece) == len(tokens)
        sampling = machine.sampling_state(self._work) if last else None
        part = Part(piece, Span(at, len(piece), self._rows), sampling, alone_from=len(tokens) - self._work.resumed)
        blocks = [self.blocks[i] for i in self._layout.chunk_blocks(index, len(tokens))]
        self.computing = True

        def work() -> tuple[list[Drawn | None], list[memoryview]]:
            drawn = machine.forward([part])
            used = len(tokens) % self._layout.block_size
            if last and used:
                machine.pool.zero_tail(blocks[-1], used)
            return drawn, machine.pool.export(blocks)

        return work

    def end(self, outcome: Future[tuple[list[Drawn | None], list[memoryview]]]) -> bool:
        self.computing = False
        at = len(self._chunks) * self._layout.chunk_tokens
        if error := outcome.exception():
            self._fail(EngineFailed(f"prefill failed in the chunk at token {at}: {told(error)}"), error)
        else:
            drawn, parts = outcome.result()
            if drawn == [None]:
                self._fail(EngineFailed("the logits after the prompt are not finite"))
            else:
                self._first = drawn[0] if drawn else None
                self._machine.tokens += min(self._layout.chunk_tokens, len(self._work.tokens) - at)
                self._chunks.append(parts)
                self._progress.set()
        if self._released:
            self.release()
        return not (self._stopped or self.finished or self._error)

    def _fail(self, error: EngineFailed, cause: BaseException | None = None) -> None:
        self._error = error
        self._error.__cause__ = cause
        self._progress.set()
