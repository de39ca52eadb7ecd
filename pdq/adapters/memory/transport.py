"""The KV transport within one process: the verified fake that stands for the real ones where nothing has to travel.

It keeps to the whole contract: secrets, epochs, waiting for chunks that are not there yet, hashes, release during a fetch.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdq.adapters.buffers import copied, fitting, fitting_all, hashed
from pdq.core.errors import DigestMismatch, HandoffUnknown, PeerLost
from pdq.core.lease import RecordKey
from pdq.ports import Buffer, ChunkPlan, Fetched, HandoffRef, Locator


@dataclass
class _Held:
    """One handoff on offer. ``changed`` wakes whoever waits for a chunk, ``unread`` a release when the last reader goes."""

    ref: HandoffRef
    chunks: dict[int, tuple[list[memoryview], str]] = field(default_factory=dict)
    readers: set[object] = field(default_factory=set)
    released: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    unread: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class TransportWorld:
    """What all transports of one world can see of each other."""

    handoffs: dict[tuple[RecordKey, int], _Held] = field(default_factory=dict)


class MemoryTransport:
    """``KvTransport`` over a shared dictionary."""

    def __init__(self, world: TransportWorld) -> None:
        self._world = world
        self._mine: dict[tuple[RecordKey, int], _Held] = {}

    @property
    def name(self) -> str:
        return "memory"

    async def start(self) -> None:
        return

    async def close(self) -> None:
        for held in list(self._mine.values()):
            await self.release(held.ref)

    async def offer(self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> Locator:
        views = fitting(plan, index, parts)
        place = (ref.key, ref.epoch)
        held = self._mine.get(place)
        if held is None:
            held = self._mine[place] = self._world.handoffs[place] = _Held(ref)
        if index not in held.chunks:
            async with self._reading(held):
                digest = await hashed(views)
            if held.released:
                raise HandoffUnknown(f"{ref.key.request_id} was released while its chunk {index} was offered")
            async with held.changed:
                held.chunks.setdefault(index, (views, digest))
                held.changed.notify_all()
        return Locator(self.name, {})

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        targets = fitting_all(plan, into)
        hashes = [await self._fetch_chunk(ref, index, target, timeout_s) for index, target in enumerate(targets)]
        return Fetched(self.name, plan.total, tuple(hashes))

    async def _fetch_chunk(self, ref: HandoffRef, index: int, target: list[memoryview], timeout_s: float) -> str:
        held = self._world.handoffs.get((ref.key, ref.epoch))
        if held is None or held.ref.secret != ref.secret:
            raise HandoffUnknown(f"{ref.key.request_id} epoch {ref.epoch} is not on offer in this process")
        try:
            async with asyncio.timeout(timeout_s), held.changed:
                await held.changed.wait_for(lambda: held.released or index in held.chunks)
        except TimeoutError as error:
            raise PeerLost(f"chunk {index} of {ref.key.request_id} was not offered within {timeout_s} s") from error
        if held.released:
            raise HandoffUnknown(f"{ref.key.request_id} epoch {ref.epoch} was released during the fetch")
        views, announced = held.chunks[index]
        async with self._reading(held):
            await copied(views, target)
        if (landed := await hashed(target)) != announced:
            raise DigestMismatch(f"chunk {index} of {ref.key.request_id} landed as {landed}, announced as {announced}")
        return landed

    @staticmethod
    @asynccontextmanager
    async def _reading(held: _Held) -> AsyncIterator[None]:
        """Inside, a release waits."""
        held.readers.add(reader := object())
        try:
            yield
        finally:
            held.readers.discard(reader)
            if not held.readers:
                held.unread.set()

    async def release(self, ref: HandoffRef) -> None:
        held = self._mine.pop((ref.key, ref.epoch), None)
        if held is None:
            return
        self._world.handoffs.pop((ref.key, ref.epoch), None)
        held.released = True
        async with held.changed:
            held.changed.notify_all()
        if held.readers:
            held.unread.clear()
            await held.unread.wait()

    def holding(self) -> Sequence[HandoffRef]:
        return [held.ref for held in self._mine.values()]

    def sweep(self) -> int:
        return 0
