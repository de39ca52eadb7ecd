"""The source's side of a handoff's bytes: offered chunk by chunk, held under a lease, let go exactly once.

A held handoff ends by the first of: the sink says that it needs it no more, a cancel, the lease is lost (the record ended
or somebody else's epoch is current), shutdown, or it was moved to a tier (``spill``). Only then are the engine's blocks
free again. A copy in a tier costs no blocks: it stays until the request has ended, or its TTL has.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pdq import failpoints
from pdq.core.errors import InvalidSettings, LedgerRefusal, PdqError
from pdq.core.layout import chunk_hash
from pdq.core.lease import Hold
from pdq.core.messages import Holding, OfferedHandoff
from pdq.core.settings import TransportSettings
from pdq.ports import Buffer, ChunkPlan, HandoffLedger, HandoffRef, KvTransport, Locator, PrefillRun
from pdq.stages.account import elapsed_ms
from pdq.stages.keepalive import Keepalive

log = logging.getLogger(__name__)

HASH_OFF_LOOP_BYTES = 4 * 1024 * 1024


COPYING = frozenset({"shm", "redis"})
"""Offering on these copies the bytes, whether somebody fetches them there or not."""


def offering(settings: TransportSettings) -> tuple[str, ...]:
    """The transports that a source offers on: the first in order, those that cost nothing until somebody fetches, and
    the tiers that are written through.

    Raises:
        InvalidSettings: that leaves none, or what shall be a tier is none.
    """
    if strange := [name for name in (*settings.write_through, *settings.spill) if name not in COPYING]:
        raise InvalidSettings(
            f"{strange[0]} does not outlive its source: PDQ_TRANSPORT_WRITE_THROUGH and PDQ_TRANSPORT_SPILL take shm "
            "and redis"
        )
    free = (name for name in settings.order if name not in COPYING)
    chosen = tuple(dict.fromkeys((*settings.order[:1], *free, *settings.write_through)))
    if not chosen:
        raise InvalidSettings("PDQ_TRANSPORT_ORDER is empty: name at least one of ucx, shm, redis")
    return chosen


@dataclass(frozen=True)
class Held:
    """One attempt's KV at its source."""

    ref: HandoffRef
    run: PrefillRun
    hold: Hold
    chunks: Sequence[Sequence[Buffer]]
    locators: tuple[Locator, ...]
    retained: bool
    """Its lease outlives the fetch, and is given back here."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever reads the chunks besides the transports."""
    since: float = field(default_factory=time.monotonic)

    def holding(self, doing: Literal["held", "releasing"]) -> Holding:
        return Holding(
            request_id=self.ref.key.request_id,
            side=self.hold.side,
            epoch=self.ref.epoch,
            doing=doing,
            blocks=self.run.blocks_held,
            bytes=self.run.plan.total,
            for_ms=elapsed_ms(self.since),
        )


class Offers:
    """Everything this worker offers now."""

    def __init__(
        self,
        transports: Mapping[str, KvTransport],
        settings: TransportSettings,
        keepalive: Keepalive,
        ledger: HandoffLedger,
        freed: Callable[[], None],
    ) -> None:
        self._transports = [transports[name] for name in offering(settings)]
        self._tiers = frozenset(settings.write_through)
        self._tier_ttl_s = settings.tier_ttl_s
        self._keepalive = keepalive
        self._ledger = ledger
        self._freed = freed
        self._held: dict[str, Held] = {}
        self._in_tiers: dict[str, tuple[HandoffRef, Sequence[KvTransport], float]] = {}
        """What is kept of handoffs that were let go, oldest first, and until when (``time.monotonic``)."""
        # A bound method is a new object each time, and the keepalive compares callbacks by identity.
        self._on_lost: Callable[[Hold], None] = lambda hold: self.let_go(hold.key.request_id, hold.epoch)
        self._releasing: dict[asyncio.Task[None], Held | None] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._releasing)

    async def offer(
        self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]
    ) -> tuple[str, tuple[Locator, ...]]:
        """Offer one finished chunk everywhere: (its hash, the handoff's locators)."""
        if plan.lengths[index] > HASH_OFF_LOOP_BYTES:
            digest = await asyncio.to_thread(chunk_hash, *parts)
        else:
            digest = chunk_hash(*parts)
        if failpoints.armed and await failpoints.hit("prefill.offering", ref.key.request_id):
            failpoints.damage(parts)
        locators: list[Locator] = []
        for transport in self._transports:
            try:
                locator = await transport.offer(ref, plan, index, parts)
                outlives = transport.name in self._tiers
                locators.append(msgspec.structs.replace(locator, epoch=ref.epoch, outlives=outlives))
            except PdqError as error:
                # One way less for the sink; the request only fails if no way is left.
                log.warning("cannot offer %s on %s: %s", ref.key.request_id, transport.name, error)
                if transport is self._transports[-1] and not locators:
                    raise
        return digest, tuple(locators)

    def keep(self, held: Held) -> None:
        """The attempt's computation is over; from now on only its KV is held. What is left of an earlier attempt goes: its
        lease is gone, whether this worker has noticed or not."""
        self.end(held.ref.key.request_id)
        self._held[held.ref.key.request_id] = held
        self._keepalive.hold(held.hold, self._on_lost)

    def offered(self, transport: KvTransport) -> list[OfferedHandoff]:
        """What ``transport`` serves of this worker's KV; a copy in a tier, which is left there on purpose, not."""
        left = {ref for ref, tiers, _ in self._in_tiers.values() if transport in tiers}
        return [OfferedHandoff(ref.key.request_id, ref.epoch) for ref in transport.holding() if ref not in left]

    def oldest(self) -> list[Held]:
        """What is held, in the order in which it came."""
        return list(self._held.values())

    def let_go(self, request_id: str, epoch: int | None = None) -> None:
        """Nobody needs the blocks any more. Released in the background; unknown ids (and other attempts than ``epoch``)
        are fine."""
        held = self._held.get(request_id)
        if held is None or (epoch is not None and held.ref.epoch != epoch):
            return
        del self._held[request_id]
        lease_runs = held.retained and self._keepalive.drop(held.hold, self._on_lost)
        self._background(held, self._let_go(held, lease_runs))
        self._remember(held.ref, [it for it in self._transports if it.name in self._tiers])

    def end(self, request_id: str) -> None:
        """The request has ended: the copies in tiers go, too."""
        held = self._held.get(request_id)
        self.let_go(request_id)
        if kept := self._in_tiers.pop(request_id, None):
            ref, tiers, _ = kept
            self._background(held, self._release(ref, tiers))

    def moved(self, held: Held, tier: KvTransport | None) -> None:
        """All of it was copied to ``tier``, or lay in one already, and the record says so."""
        self.let_go(held.ref.key.request_id, held.ref.epoch)
        self._remember(held.ref, [tier] if tier else [])

    def prune(self) -> None:
        """Copies whose TTL is over: nobody said that their requests have ended."""
        now = time.monotonic()
        while self._in_tiers and (first := next(iter(self._in_tiers.items())))[1][2] < now:
            del self._in_tiers[first[0]]
            self._background(None, self._release(*first[1][:2]))

    def _remember(self, ref: HandoffRef, tiers: Sequence[KvTransport]) -> None:
        if tiers:
            self._in_tiers[ref.key.request_id] = ref, tiers, time.monotonic() + self._tier_ttl_s

    def _background(self, held: Held | None, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._releasing[task] = held
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[None]) -> None:
        del self._releasing[task]
        if not task.cancelled() and (error := task.exception()):
            log.error("release failed", exc_info=error)
        self._freed()

    async def release(self, ref: HandoffRef, run: PrefillRun) -> None:
        """An attempt that came to nothing: no transport reads the blocks any more, then they go back to the pool."""
        try:
            await self._release(ref, self._transports)
        finally:
            run.release()
            self._freed()

    async def _let_go(self, held: Held, lease_runs: bool) -> None:
        try:
            await self._release(held.ref, [it for it in self._transports if it.name not in self._tiers])
            async with held.reading:
                pass
        finally:
            held.run.release()
            self._freed()
        if lease_runs:
            with suppress(LedgerRefusal):
                await self._ledger.release(held.hold.key, held.hold.side, held.hold.epoch)

    @staticmethod
    async def _release(ref: HandoffRef, transports: Sequence[KvTransport]) -> None:
        for transport in transports:
            try:
                await transport.release(ref)
            except PdqError as error:
                # A tier that is away frees by its own TTL. A peer that still reads blocks which are somebody else's now
                # finds out by their hash.
                log.warning("release of %s on %s: %s", ref.key.request_id, transport.name, error)

    def holdings(self) -> list[Holding]:
        """What this worker keeps for others to fetch, or is just letting go of."""
        kept = [held.holding("held") for held in self._held.values()]
        return kept + [held.holding("releasing") for held in self._releasing.values() if held]

    async def close(self) -> None:
        for request_id in list(self._held):
            self.let_go(request_id)
        if self._releasing:
            await asyncio.wait(self._releasing)
