"""What one worker sends to requesters, and its memory of it, so that a lost frame can be sent again."""

import time
from collections.abc import Iterable

from pdq.core.messages import Resend, TokenEntry, TokenFrame
from pdq.core.stream import SentLog
from pdq.ports import TokenBus


class Outbox:
    def __init__(self, bus: TokenBus, worker: str) -> None:
        self._bus = bus
        self._worker = worker
        self._sent = SentLog()

    def remember(self, entry: TokenEntry) -> None:
        """Somebody else sent this entry, or it is just being sent."""
        self._sent.record(entry, time.monotonic())

    def forget(self, request_id: str) -> None:
        """The request left this worker without having ended."""
        self._sent.forget(request_id)

    async def send(self, reply_to: str, entries: Iterable[TokenEntry]) -> None:
        """One frame."""
        kept = tuple(entries)
        for entry in kept:
            self.remember(entry)
        await self._frame(reply_to, kept)

    async def repeat(self, reply_to: str, entry: TokenEntry) -> None:
        """Something that was sent before, or should have been: it adds nothing to what is remembered."""
        await self._frame(reply_to, (entry,))

    async def resend(self, wanted: Resend) -> bool:
        """False if nothing is known here from there on."""
        entry = self._sent.since(wanted.request_id, wanted.seq)
        if entry is not None:
            await self.repeat(wanted.reply_to, entry)
        return entry is not None

    async def _frame(self, reply_to: str, entries: tuple[TokenEntry, ...]) -> None:
        await self._bus.send(reply_to, TokenFrame(worker=self._worker, entries=entries))
