"""The sink's side of a handoff's bytes: try the locators in order, verify, count why one did not serve.

Having metadata, or having submitted a transfer, is not readiness: ``land`` returns only when every byte of every chunk
lies in the seat's buffers and the manifest's digest agrees with the record.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from pdq import failpoints
from pdq.core.errors import BufferAtRisk, DigestMismatch, HandoffUnknown, TransferFailed
from pdq.core.layout import manifest_digest
from pdq.core.settings import TransportSettings
from pdq.ports import ChunkPlan, DecodeSeat, Fetched, HandoffRef, KvTransport, Locator, Record
from pdq.stages.work import cancelling

log = logging.getLogger(__name__)

Tried = list[tuple[str, str]]
Reserve = Callable[[], Awaitable[DecodeSeat]]
Ready = Callable[[], Awaitable[Record]]


class Landed:
    """A seat whose KV is complete and verified, and how it got there."""

    def __init__(self, seat: DecodeSeat, record: Record, fetched: Fetched, tried: Tried, seconds: float) -> None:
        self.seat = seat
        self.record = record
        self.fetched = fetched
        self.tried = tried
        self.seconds = seconds

    def note(self) -> dict[str, object]:
        return {
            "transport": self.fetched.transport,
            "bytes": self.fetched.bytes,
            "transfer_ms": round(self.seconds * 1000, 3),
            "tried": self.tried,
        }


class Fetcher:
    def __init__(self, transports: Mapping[str, KvTransport], settings: TransportSettings) -> None:
        self._transports = transports
        self._settings = settings

    def usable(self, record: Record, now_ms: int) -> tuple[list[Locator], Tried]:
        """The record's locators in this worker's order, and those that are out of question, with the reason.

        A source whose lease has run out may have reused its blocks: its own memory is not asked any more, only tiers.
        """
        rank: dict[str, int] = {name: place for place, name in enumerate(self._settings.order)}
        source_alive = record.source is not None and record.source.running(now_ms)
        good: list[Locator] = []
        tried: Tried = []
        for locator in sorted(record.locators, key=lambda it: rank.get(it.transport, len(rank))):
            if locator.transport not in self._transports:
                tried.append((locator.transport, "not_enabled"))
            elif not source_alive and not locator.outlives:
                tried.append((locator.transport, "source_lost"))
            else:
                good.append(locator)
        return good, tried

    async def land(
        self, record: Record, now_ms: int, plan: ChunkPlan, reserve: Reserve, ready: Ready, again: Ready
    ) -> Landed:
        """Fetch into a fresh seat from the first locator that serves.

        ``ready`` waits until the record is ``ready`` and returns it: a fetch may start before (overlap), but ends after.
        ``again`` does the same with a record read anew: its source may have moved the KV to a tier meanwhile.

        Raises:
            TransferFailed: no locator served; the message lists what was tried.
        """
        tried: Tried = []
        started = time.monotonic()
        seat: DecodeSeat | None = None
        try:
            while True:
                locators, excluded = self.usable(record, now_ms)
                tried += excluded
                for locator in locators:
                    if seat is None:
                        seat = await reserve()
                        if failpoints.armed:
                            await failpoints.hit("decode.reserved", record.key.request_id)
                    try:
                        if failpoints.armed:
                            await failpoints.hit("decode.fetching", record.key.request_id)
                        fetched = await self._fetch(locator, record, plan, seat)
                        if failpoints.armed and await failpoints.hit("decode.landed", record.key.request_id):
                            fetched = msgspec.structs.replace(
                                fetched, hashes=(failpoints.WRONG_DIGEST, *fetched.hashes[1:])
                            )
                        record = await ready()
                        _verify(record, plan, fetched)
                    except BufferAtRisk as error:
                        seat.quarantine()
                        seat = None
                        tried.append((locator.transport, error.code))
                        if cancelling():  # the transport had to report the risk instead of the cancellation
                            raise asyncio.CancelledError from error
                    except TransferFailed as error:
                        log.warning("%s over %s: %s", record.key.request_id, locator.transport, error)
                        tried.append((locator.transport, error.code))
                    else:
                        seat.landed()
                        return Landed(seat, record, fetched, tried, time.monotonic() - started)
                current = await again()
                if (current.locators, current.state) == (record.locators, record.state):
                    break
                record = current
        except BaseException:
            if seat is not None:
                seat.leave()
            raise
        if seat is not None:
            seat.leave()
        reasons = ", ".join(f"{name}: {why}" for name, why in tried) or "the record has no locator"
        raise HandoffUnknown(f"KV of {record.key.request_id} cannot be fetched ({reasons})")

    async def _fetch(self, locator: Locator, record: Record, plan: ChunkPlan, seat: DecodeSeat) -> Fetched:
        transport = self._transports[locator.transport]
        ref = HandoffRef(record.key, locator.epoch, record.secret)
        return await transport.fetch(locator, ref, plan, seat.buffers, self._settings.fetch_timeout_s)


def _verify(record: Record, plan: ChunkPlan, fetched: Fetched) -> None:
    digest = manifest_digest(list(plan.lengths), list(fetched.hashes))
    if digest != record.digest:
        raise DigestMismatch(
            f"KV of {record.key.request_id} over {fetched.transport} has digest {digest}, the record says {record.digest}"
        )
