"""KV that must make room is moved to a tier, and its record says so: it is fetched from there and not computed again.

Three occasions. This worker stops while somebody still has to fetch from it: all of it goes. It drains and shall not wait
for fetches: what nobody is fetching just now goes. Or KV that nobody fetches keeps it from serving those who wait: the
oldest goes, one at a time, and only what is old enough, because decode workers that keep up come for it sooner.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from pdq.core.errors import PdqError
from pdq.core.handoff import Side, State
from pdq.core.settings import TransportSettings
from pdq.ports import Changes, KvTransport, Locator, Queue
from pdq.stages.offers import Held, Offers
from pdq.stages.parts import Parts
from pdq.stages.room import Room

log = logging.getLogger(__name__)

PERIOD_S: Final = 0.2
AGE_S: Final = 1.0
LEAVE_S: Final = 4.0
"""For everything, when the worker leaves: it has been waited for, and is killed a little later."""


class Spill:
    def __init__(self, parts: Parts, settings: TransportSettings, offers: Offers, room: Room) -> None:
        self._parts = parts
        self._offers = offers
        self._room = room
        self._tiers = [parts.transports[name] for name in settings.spill]
        self.leaving = False
        """The worker drains, and shall not wait for fetches."""

    async def run(self) -> None:
        """Make room while somebody waits for it, and look after what lies in tiers; forever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self._offers.prune()
            try:
                if self._tiers:
                    for held in await self._in_the_way():
                        await self._move(held)
            except PdqError as error:
                log.warning("nothing is spilled now (%s): %s", error.code, error)

    async def all(self) -> None:
        """The worker leaves: whatever is still held, within bounds."""
        if not self._tiers:
            return
        moves = [asyncio.create_task(self._move(held)) for held in self._offers.oldest()]
        if moves:
            _, late = await asyncio.wait(moves, timeout=LEAVE_S)
            for move in late:
                move.cancel()
            await asyncio.gather(*moves, return_exceptions=True)

    async def _in_the_way(self) -> list[Held]:
        """The handoffs that shall go now."""
        if self.leaving:
            return await self._unclaimed(self._offers.oldest())
        now, parts = time.monotonic(), self._parts
        old = [held for held in self._offers.oldest() if now - held.since >= AGE_S]
        if not old or self._room.free() > 0:
            return []
        if not self._room.starved and not (await parts.jobs.depth(Queue.PREFILL, parts.model))[0]:
            return []
        return (await self._unclaimed(old))[:1]

    async def _unclaimed(self, those: Sequence[Held]) -> list[Held]:
        """Those that nobody is about to fetch."""
        records = await self._parts.ledger.read_many([held.ref.key for held in those])
        return [
            held
            for held, record in zip(those, records, strict=True)
            if record is not None and not (record.state is State.READY and record.sink is not None)
        ]

    async def _move(self, held: Held) -> None:
        ref, ledger, tier = held.ref, self._parts.ledger, self._tiers[0]
        copies = tuple(locator for locator in held.locators if locator.outlives)
        copied = not copies
        try:
            if copied:
                async with held.reading:
                    copies = (await self._copy(held, tier),)
            await ledger.update(ref.key, Side.SOURCE, ref.epoch, Changes(locators=copies))
            await ledger.release(ref.key, Side.SOURCE, ref.epoch)
        except PdqError as error:  # most likely it was fetched meanwhile, or the request is over
            log.info("the KV of %s is not moved to %s: %s", ref.key.request_id, tier.name, error)
            if copied:
                await tier.release(ref)
        else:
            log.info("the KV of %s lies in %s now", ref.key.request_id, copies[0].transport)
            self._offers.moved(held, tier if copied else None)

    @staticmethod
    async def _copy(held: Held, tier: KvTransport) -> Locator:
        for index, chunk in enumerate(held.chunks):
            locator = await tier.offer(held.ref, held.run.plan, index, chunk)
        return msgspec.structs.replace(locator, epoch=held.ref.epoch, outlives=True)
