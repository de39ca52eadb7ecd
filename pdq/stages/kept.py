"""Readings that many ask for and one makes: nobody pays a round trip that somebody else is just paying."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """What ``read`` returned last, read anew when somebody asks and it is older than ``fresh_s``. All who ask meanwhile get
    the outcome of the same reading, also its error: a server that is away is waited for once, not once by each."""

    def __init__(self, read: Callable[[], Awaitable[T]], fresh_s: float, clock: Callable[[], float]) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._clock = clock
        self._value: tuple[float, T] | None = None
        self._reading: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._value is not None and self._clock() - self._value[0] < self._fresh_s:
            return self._value[1]
        if self._reading is None:
            self._reading = asyncio.create_task(self._once())
            self._reading.add_done_callback(self._over)
        return await asyncio.shield(self._reading)  # who goes away does not take it from the others

    async def _once(self) -> T:
        began = self._clock()
        value = await self._read()
        self._value = began, value
        return value

    def _over(self, reading: asyncio.Task[T]) -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()  # it has been raised at everybody who was still there to ask
