"""Whose turn it is on the compute thread.

All tensor work of an engine runs on one thread, outside the event loop's. What may run next is decided here, on the
loop: prompt chunks in the order in which their prompts were admitted, and, where one worker does both, chunks and
decode steps in alternation, so that neither starves the other.

A caller that is cancelled gives up its place. If its work has begun, it runs to its end on the thread while the caller
is already gone; ``after`` is called then, and not before, so that no block is freed under a running kernel.
"""

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class Kind(IntEnum):
    CHUNK = 0
    STEP = 1


class ComputeThread:
    def __init__(self, initializer: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch-compute", initializer=initializer)
        self._waiting: tuple[list[tuple[int, int, asyncio.Future[None]]], ...] = ([], [])
        self._arrivals = count()
        self._busy = False
        self._last = Kind.STEP

    async def turn(self, kind: Kind, order: int = 0) -> None:
        """Wait until nothing runs and no one with a better claim waits. ``run`` or ``skip`` must follow at once."""
        if not self._busy:
            self._busy, self._last = True, kind
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[kind], (order, next(self._arrivals), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.skip()
            raise

    async def run(self, work: Callable[[], T], after: Callable[[], None]) -> T:
        """Use a turn: ``work`` on the thread, then ``after`` on the loop, whether or not the caller still waits."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def finish(done: Future[T]) -> None:
            after()
            self.skip()
            if result.done():
                return
            if error := done.exception():
                result.set_exception(error)
            else:
                result.set_result(done.result())

        try:
            running = self._executor.submit(work)
        except RuntimeError:  # closed
            after()
            self.skip()
            raise
        running.add_done_callback(lambda done: loop.call_soon_threadsafe(finish, done))
        return await result

    def skip(self) -> None:
        """End a turn: the next in line has it now."""
        first = Kind.STEP if self._last is Kind.CHUNK else Kind.CHUNK
        for kind in (first, Kind(1 - first)):
            while self._waiting[kind]:
                granted = heapq.heappop(self._waiting[kind])[-1]
                if not granted.done():
                    self._last = kind
                    granted.set_result(None)
                    return
        self._busy = False

    async def close(self) -> None:
        """Returns when what runs has run to its end."""
        await asyncio.to_thread(self._executor.shutdown)
