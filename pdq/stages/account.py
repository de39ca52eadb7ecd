"""A worker's own account: what it holds, request by request, as its stages say it while they work.

It is what ``pdq audit`` compares the ledger with, so it says what *is*: block counts come from whoever has the blocks, in
the moment of the question, and are not written down when they are taken.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pdq.core.handoff import Side
from pdq.core.lease import Hold
from pdq.core.messages import Holding
from pdq.ports import Grant

Doing = Literal["waiting", "computing", "held", "releasing", "fetching", "decoding", "finishing"]


class HoldsBlocks(Protocol):
    """A ``PrefillRun`` or a ``DecodeSeat``."""

    @property
    def blocks_held(self) -> int: ...


@dataclass
class Entry:
    """One lease of this worker, and what it does under it."""

    hold: Hold
    doing: Doing = "waiting"
    blocks: HoldsBlocks | None = None
    kv_bytes: int = 0
    since: float = field(default_factory=time.monotonic)

    def holding(self) -> Holding:
        return Holding(
            request_id=self.hold.key.request_id,
            side=self.hold.side,
            epoch=self.hold.epoch,
            doing=self.doing,
            blocks=self.blocks.blocks_held if self.blocks is not None else 0,
            bytes=self.kv_bytes,
            for_ms=elapsed_ms(self.since),
        )


class Account:
    """The requests that this worker works on. (What it only holds for somebody to fetch is in ``Offers``.)"""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], Entry] = {}

    @contextmanager
    def under(self, hold: Hold) -> Iterator[None]:
        """A lease was taken; on leaving, nothing is held under it any more."""
        place = (hold.key.request_id, hold.epoch)
        self._entries[place] = Entry(hold)
        try:
            yield
        finally:
            del self._entries[place]

    def now(self, grant: Grant, doing: Doing, blocks: HoldsBlocks | None = None, kv_bytes: int = 0) -> None:
        """What the holder of ``grant`` does from now on, and who has its blocks."""
        entry = self._entries[grant.record.key.request_id, grant.epoch]
        entry.doing, entry.blocks, entry.kv_bytes, entry.since = doing, blocks, kv_bytes, time.monotonic()

    def adopted(self, grant: Grant) -> None:
        """The source has become the sink."""
        entry = self._entries[grant.record.key.request_id, grant.epoch]
        entry.hold = Hold(entry.hold.key, Side.SINK, entry.hold.epoch)

    def doing(self, what: Doing) -> int:
        """How many requests are at ``what`` now."""
        return sum(entry.doing == what for entry in self._entries.values())

    def holdings(self) -> list[Holding]:
        return [entry.holding() for entry in self._entries.values()]


def elapsed_ms(since: float) -> int:
    """Milliseconds since ``since``, a reading of ``time.monotonic``."""
    return int((time.monotonic() - since) * 1000)
