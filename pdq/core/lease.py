"""Leases: who holds one side of a handoff, under which epoch, until when on the ledger's clock."""

import msgspec

from pdq.core.handoff import Side


class RecordKey(msgspec.Struct, frozen=True, order=True):
    """Where a record lives: records of one model share a cluster slot, so the model is part of the name."""

    model: str
    request_id: str


class Lease(msgspec.Struct, frozen=True):
    """One side's claim. Judged only against the ledger's clock (``until_ms``, Unix milliseconds)."""

    worker: str
    epoch: int
    until_ms: int

    def running(self, now_ms: int) -> bool:
        return now_ms < self.until_ms


class Hold(msgspec.Struct, frozen=True):
    """What a holder needs to renew or prove its lease: the key, its side and its epoch."""

    key: RecordKey
    side: Side
    epoch: int


def renewal_period_s(ttl_ms: int) -> float:
    """Renew at a third of the TTL: two renewals may be lost before the lease is."""
    return ttl_ms / 3000
