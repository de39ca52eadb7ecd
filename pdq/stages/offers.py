"""The source's side of a handoff's bytes: offered chunk by chunk, held under a lease, let go exactly once.

A held handoff ends by the first of: the sink says it has fetched it, a cancel, the lease is lost (the record ended or
somebody else's epoch is current), shutdown. Only then are the engine's blocks free again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pdq import failpoints
from pdq.core.errors import InvalidSettings, PdqError
from pdq.core.layout import chunk_hash
from pdq.core.lease import Hold
from pdq.core.settings import TransportSettings
from pdq.ports import Buffer, ChunkPlan, HandoffRef, KvTransport, Locator, PrefillRun
from pdq.stages.keepalive import Keepalive

log = logging.getLogger(__name__)

HASH_OFF_LOOP_BYTES = 4 * 1024 * 1024


COPYING = frozenset({"shm", "redis"})
"""Offering on these copies the bytes, whether somebody fetches them there or not."""


def offering(settings: TransportSettings) -> tuple[str, ...]:
    """The transports that a source offers on: the first in order, those that cost nothing until somebody fetches, and
    the tiers that are written through.

    Raises:
        InvalidSettings: that leaves none.
    """
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


class Offers:
    """Everything this worker offers now."""

    def __init__(
        self,
        transports: Mapping[str, KvTransport],
        settings: TransportSettings,
        keepalive: Keepalive,
        freed: Callable[[], None],
    ) -> None:
        self._transports = [transports[name] for name in offering(settings)]
        self._keepalive = keepalive
        self._freed = freed
        self._held: dict[str, Held] = {}
        # A bound method is a new object each time, and the keepalive compares callbacks by identity.
        self._on_lost: Callable[[Hold], None] = lambda hold: self.let_go(hold.key.request_id, hold.epoch)
        self._releasing: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()

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
                locators.append(msgspec.structs.replace(locator, epoch=ref.epoch))
            except PdqError as error:
                # One way less for the sink; the request only fails if no way is left.
                log.warning("cannot offer %s on %s: %s", ref.key.request_id, transport.name, error)
                if transport is self._transports[-1] and not locators:
                    raise
        return digest, tuple(locators)

    def keep(self, held: Held) -> None:
        """The attempt's computation is over; from now on only its KV is held."""
        self._held[held.ref.key.request_id] = held
        self._keepalive.hold(held.hold, self._on_lost)

    def let_go(self, request_id: str, epoch: int | None = None) -> None:
        """Release in the background; unknown ids (and other attempts than ``epoch``) are fine."""
        held = self._held.get(request_id)
        if held is None or (epoch is not None and held.ref.epoch != epoch):
            return
        del self._held[request_id]
        self._keepalive.drop(held.hold, self._on_lost)
        task = asyncio.create_task(self.release(held.ref, held.run))
        self._releasing.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releasing.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("release failed", exc_info=error)
        self._gone.set()
        self._freed()

    async def release(self, ref: HandoffRef, run: PrefillRun) -> None:
        """No transport reads the blocks any more, then they go back to the pool."""
        try:
            for transport in self._transports:
                try:
                    await transport.release(ref)
                except PdqError as error:
                    # A tier that is away frees by its own TTL.
                    log.warning("release of %s on %s: %s", ref.key.request_id, transport.name, error)
        finally:
            run.release()
            self._freed()

    async def empty(self) -> None:
        """Until nothing is held any more."""
        while len(self):
            self._gone.clear()
            await self._gone.wait()

    async def close(self) -> None:
        for request_id in list(self._held):
            self.let_go(request_id)
        if self._releasing:
            await asyncio.wait(self._releasing)
