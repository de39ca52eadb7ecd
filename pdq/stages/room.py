"""How many more jobs a worker takes, and who gets freed blocks first."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pdq.core.errors import CapacityExhausted

T = TypeVar("T")


class Room:
    """A count that others change, and a way to wait for it."""

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    def free(self) -> int:
        """Jobs that may be pulled now; none while one that was pulled waits for blocks."""
        return 0 if self._turn.locked() else self._free()

    @property
    def starved(self) -> bool:
        """A job that was pulled waits for blocks."""
        return self._turn.locked()

    def changed(self) -> None:
        """To be called by whoever gives something back."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look whenever something has changed, and return once ``condition`` holds."""
        while not condition():
            await self._change()

    async def take(self, reserve: Callable[[], T], patience_s: float | None = None) -> T:
        """``reserve()`` as soon as it no longer raises ``CapacityExhausted``, first come first served.

        Raises:
            CapacityExhausted: still no capacity after ``patience_s``.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(patience_s):
                    while True:
                        try:
                            return reserve()
                        except CapacityExhausted:
                            await self._change()
            except TimeoutError:
                raise CapacityExhausted(f"no free KV blocks within {patience_s} s") from None
            finally:
                self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
