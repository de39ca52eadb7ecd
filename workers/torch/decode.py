"""Continuous batching: seats, and the step that decodes all that have joined.

A step is one forward pass over whoever is in the batch when its turn comes. A seat that leaves during a step gives its
blocks back when the step has ended.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pdq.core.errors import EngineFailed
from pdq.ports import Drawn, PromptWork, Step
from workers.torch.attention import Span, block_rows
from workers.torch.forward import Part
from workers.torch.machine import Machine, told
from workers.torch.pool import Landing
from workers.torch.turns import Kind


class TorchSeat:
    """One sequence's place in the decode batch (``DecodeSeat``)."""

    def __init__(
        self,
        machine: Machine,
        batch: "Batch",
        work: PromptWork,
        blocks: list[int],
        landing: Landing | None,
    ) -> None:
        self.busy = False
        """A pass that reads and writes these blocks is running."""
        self.left = False
        self.tokens = list(work.tokens)
        self._machine, self._batch, self._blocks, self._landing = machine, batch, blocks, landing
        self._rows = block_rows(machine.pool, blocks)
        self._limit = len(work.tokens) + work.max_new_tokens
        self._computed = len(work.tokens)
        self._sampling = machine.sampling_state(work)
        self._joined = False
        self._return: Callable[[Sequence[int]], None] = machine.pool.allocator.release
        batch.seats.add(self)

    @property
    def buffers(self) -> list[list[memoryview]]:
        return self._landing.buffers if self._landing else []

    @property
    def blocks_held(self) -> int:
        return len(self._blocks)

    def landed(self) -> None:
        if self._landing:
            self._landing.commit()
            self._landing = None

    def join(self, first: Drawn | None, replay: Sequence[int] = ()) -> None:
        if self.left or self._joined:
            raise EngineFailed("the seat has left, or is in the batch already")
        self._joined = True
        known = [*([first.token] if first is not None else []), *replay]
        if not known:
            self._computed -= 1  # The last prompt token goes through the model again: its logits give the first token.
        for token in known:  # they go through the model together, in the first step
            self.tokens.append(token)
            self._sampling.append(token)
        self._batch.join(self)

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self._batch.seats.discard(self)
            self._batch.remove(self)
            if not self.busy:
                self.settle()

    def quarantine(self) -> None:
        if not self.left:
            self._return = self._machine.pool.allocator.quarantine
            self.leave()

    # --- For the batch -----------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self.tokens) < self._limit

    def next_part(self) -> Part:
        at = self._computed
        return Part(self.tokens[at:], Span(at, len(self.tokens) - at, self._rows), self._sampling, alone_from=at)

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


class _StepJob:
    """One decode step: all seats that are in the batch when its turn comes."""

    def __init__(self, machine: Machine, batch: Sequence[TorchSeat]) -> None:
        self.finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """False: there was nobody left in the batch."""
        self.seats: list[TorchSeat] = []
        self.drawn: list[tuple[TorchSeat, Drawn]] = []
        self.failed: list[tuple[TorchSeat, EngineFailed]] = []
        self.seconds = 0.0
        self._machine, self._batch = machine, batch

    def begin(self) -> Callable[[], list[Drawn | None]] | None:
        if self.finished.done():  # the caller was cancelled
            return None
        for seat in self._batch:
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
            results = self._machine.forward(parts)
            self.seconds = time.perf_counter() - started
            return results

        return work

    def end(self, outcome: Future[list[Drawn | None]]) -> bool:
        if error := outcome.exception():
            failure = EngineFailed(f"a decode step over {len(self.seats)} sequences failed: {told(error)}")
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


class Batch:
    """All seats of an engine, and those among them that every step decodes."""

    def __init__(self, machine: Machine) -> None:
        self.seats: set[TorchSeat] = set()
        self.steps = 0
        self.peak = 0
        self._machine = machine
        self._joined: list[TorchSeat] = []
        self._arrived = asyncio.Event()

    def join(self, seat: TorchSeat) -> None:
        self._joined.append(seat)
        self._arrived.set()

    def remove(self, seat: TorchSeat) -> None:
        if seat in self._joined:
            self._joined.remove(seat)
        if not self._joined:
            self._arrived.clear()

    async def step(self) -> Step:
        while True:
            await self._arrived.wait()
            job = _StepJob(self._machine, self._joined)
            self._machine.compute.enqueue(Kind.STEP, job)
            if await job.finished:
                break
        drawn = [(seat, result) for seat, result in job.drawn if not seat.left]
        for seat, result in drawn:
            seat.append(result.token)
        for seat, _ in job.failed:
            self.remove(seat)
        self.steps += 1
        self.peak = max(self.peak, len(job.seats))
        self._machine.tokens += len(drawn)
        failed = [(seat, error) for seat, error in job.failed if not seat.left]
        return Step(drawn=drawn, seconds=job.seconds, failed=failed)
