"""Whose turn it is on the compute thread.

All tensor work of an engine runs on one thread, outside the event loop's. What runs next is decided here, on the loop:
prompt chunks in the order in which their prompts were admitted, and, where one worker does both, chunks and decode
steps in alternation, so that neither starves the other.

A job is asked for its work only when its turn has come, so whoever was cancelled while it waited costs nothing. Work
that has begun runs to its end, and the job hears of that end even if nobody waits for the result any more: no block is
freed under a running kernel.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from itertools import count
from typing import Any, Protocol


class Kind(IntEnum):
    CHUNK = 0
    STEP = 1


class Job(Protocol):
    """Something that needs the compute thread once or several times. Both methods are called on the loop."""

    def begin(self) -> Callable[[], Any] | None:
        """Its turn has come: the work to do on the thread, or None if there is none (the job leaves the line)."""

    def end(self, outcome: Future[Any]) -> bool:
        """The work has ended, with a result or an exception. True: stand in line again, at the same place."""


class ComputeThread:
    def __init__(self, initializer: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch-compute", initializer=initializer)
        self._lines: dict[Kind, list[tuple[int, int, Job]]] = {kind: [] for kind in Kind}
        self._arrivals = count()
        self._busy = False
        self._last = Kind.STEP

    def enqueue(self, kind: Kind, job: Job, order: int = 0) -> None:
        """Put ``job`` in line, behind those of its kind with a lower or equal ``order``."""
        self._stand(kind, order, job)
        if not self._busy:
            self._next()

    async def close(self) -> None:
        """Returns when what runs has run to its end. Jobs that wait, or come later, end with a ``RuntimeError``."""
        await asyncio.to_thread(self._executor.shutdown)

    def _stand(self, kind: Kind, order: int, job: Job) -> None:
        heapq.heappush(self._lines[kind], (order, next(self._arrivals), job))

    def _next(self) -> None:
        self._busy = False
        while not self._busy and any(self._lines.values()):
            other = Kind.STEP if self._last is Kind.CHUNK else Kind.CHUNK
            kind = other if self._lines[other] else self._last
            order, _, job = heapq.heappop(self._lines[kind])
            work = job.begin()
            if work is not None:
                self._last, self._busy = kind, True
                self._start(kind, order, job, work)

    def _start(self, kind: Kind, order: int, job: Job, work: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()

        def finish(outcome: Future[Any]) -> None:
            if job.end(outcome):
                self._stand(kind, order, job)
            self._next()

        try:
            outcome = self._executor.submit(work)
        except RuntimeError as error:  # closed
            outcome = Future()
            outcome.set_exception(error)
        outcome.add_done_callback(lambda done: loop.call_soon_threadsafe(finish, done))
