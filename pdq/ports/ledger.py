"""The ledger: handoff records, their leases, and what is counted of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from pdq.core.audit import Books
from pdq.core.handoff import Event, Side, State
from pdq.core.layout import KvLayout
from pdq.core.lease import Hold, Lease, RecordKey
from pdq.core.load import Load
from pdq.core.messages import End, Policy, Priority


class Locator(Struct, frozen=True):
    """Where one transport serves a handoff's bytes. ``address`` is the transport's own affair.

    ``epoch`` is that of the attempt whose bytes they are: it outlives the source's lease when a tier does.
    """

    transport: str
    address: Mapping[str, str]
    epoch: int = 0
    outlives: bool = False
    """The bytes outlive their source's process: they lie in a tier."""


class NewRecord(Struct, frozen=True):
    """What is known when a request is accepted. ``timeout_ms`` becomes the absolute deadline on the ledger's clock."""

    key: RecordKey
    reply_to: str
    prompt_tokens: int
    max_new_tokens: int
    timeout_ms: int
    secret: str
    policy: Policy = Policy()
    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    tenant: str = ""
    priority: Priority = "interactive"
    client_id: str = ""
    job: str = ""
    """Where the job lies (``names.place``) of a producer that does not know the request's id."""


class Record(Struct, frozen=True):
    """The handoff record as read back. See ``pdq.core.handoff`` for what its state means."""

    key: RecordKey
    state: State
    attempt: int
    epoch: int
    deadline_ms: int
    reply_to: str
    prompt_tokens: int
    max_new_tokens: int
    secret: str
    policy: Policy
    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    tenant: str = ""
    priority: Priority = "interactive"
    client_id: str = ""
    source: Lease | None = None
    sink: Lease | None = None
    fingerprint: str = ""
    layout: KvLayout | None = None
    locators: tuple[Locator, ...] = ()
    digest: str = ""
    first_token: int | None = None
    """The token that the prefill side sampled and emitted, if it owns the first token."""
    emitted: int = 0
    """Tokens sent to the client so far, as of the last write that carried it."""
    streaming: bool = False
    """A decode worker has begun to send: the client may have more than ``emitted`` tokens, and only it knows how many."""
    streams_lost: int = 0
    """Decode workers that died while they streamed, and whose sequence another one continued from the same KV."""
    ended_code: str = ""
    """For a terminal record: finish reason, or error code."""
    ended_message: str = ""
    end: End | None = None
    """How a request that is done ended, where that is more than ``ended_code``: its worker may die before it says so."""
    created_ms: int = 0
    ended_ms: int = 0


class Changes(Struct, frozen=True, omit_defaults=True):
    """Fields that an author writes together with an event, in the same atomic step. ``None`` leaves a field alone."""

    fingerprint: str | None = None
    layout: KvLayout | None = None
    locators: tuple[Locator, ...] | None = None
    digest: str | None = None
    first_token: int | None = None
    emitted: int | None = None
    streaming: bool | None = None
    streams_lost: int | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    ended_code: str | None = None
    ended_message: str | None = None
    end: End | None = None


class Grant(Struct, frozen=True):
    """A lease, given. ``now_ms`` is the ledger's clock at the grant, so ``record.deadline_ms - now_ms`` is what is left."""

    record: Record
    epoch: int
    now_ms: int


class LogEntry(Struct, frozen=True):
    """One applied transition, as ``pdq trace`` shows it."""

    at_ms: int
    event: str
    state: State
    worker: str
    epoch: int
    note: Mapping[str, Any] = {}


class HandoffLedger(Protocol):
    """Records and leases. Every method is one atomic step (one Lua script, one round trip) unless it says otherwise.

    The executors of ``TRANSITIONS`` and ``RULES`` raise, and change nothing, with ``RecordNotFound``, ``RecordEnded``,
    ``IllegalTransition``, ``StaleEpoch`` (the named epoch is not current, or its lease has run out) or ``LeaseHeld``.
    """

    async def enqueue(self, new: NewRecord) -> tuple[Record, bool]:
        """Create the record in ``queued``. If it exists, nothing changes: (the existing record, False)."""

    async def acquire(self, key: RecordKey, event: Event, worker: str, ttl_ms: int) -> Grant:
        """``BEGIN`` or ``CLAIM``: take the source or sink lease for ``ttl_ms``; raises the epoch.

        ``BEGIN`` counts an attempt and raises ``AttemptsExhausted`` past ``policy.max_attempts`` (changing nothing).
        Past the deadline both raise ``DeadlineExceeded``.
        """

    async def apply(
        self,
        key: RecordKey,
        event: Event,
        *,
        epoch: int | None = None,
        worker: str = "",
        changes: Changes | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> Record:
        """Cause any other event; returns the record after it. ``note`` goes to the log only."""

    async def update(self, key: RecordKey, side: Side, epoch: int, changes: Changes) -> None:
        """Write fields without an event, under a running lease (progress, early locators, ``emitted``)."""

    async def release(self, key: RecordKey, side: Side, epoch: int) -> None:
        """Let one lease go without changing the state (a source that outlived ``fetched`` under ``retain``)."""

    async def renew(self, holds: Sequence[Hold], ttl_ms: int) -> Sequence[Hold]:
        """Prolong many leases; returns those that are lost (record ended, epoch not current, or run out)."""

    async def read(self, key: RecordKey) -> Record | None: ...

    async def read_many(self, keys: Sequence[RecordKey]) -> Sequence[Record | None]: ...

    async def find(self, request_id: str) -> Record | None:
        """By request id alone, over all models (several round trips; for operators)."""

    async def of_job(self, model: str, job: str) -> Record | None:
        """The request whose ``NewRecord.job`` was that (two round trips)."""

    async def history(self, key: RecordKey) -> Sequence[LogEntry]: ...

    async def due(self, model: str, limit: int) -> Sequence[Record]:
        """Live records of which a lease or the deadline has run out, and those that have been queued for a lease's time and
        nobody has looked at since: the reaper's work. Cost grows with these only."""

    async def reap(self, key: RecordKey, *, look_again: bool = False) -> Record:
        """Clear every lease that has run out and put the record back at its next real expiry; no state change.
        ``look_again``: if it is queued, at most a lease's time away."""

    async def live(self, model: str) -> Sequence[Record]:
        """All records that are not terminal (for operators; cost grows with them)."""

    async def load(self, model: str) -> Load: ...

    async def books(self, model: str, *, mend: bool = False) -> Books | None:
        """What is kept beside the records, compared with them (for operators; cost grows with live records). None: there
        are too many to hold the ledger up for. ``mend`` sets the counters to what follows from the records, unless some
        of these are not on the due list. Finding those takes several steps."""

    async def models(self) -> Sequence[str]: ...

    async def now_ms(self) -> int: ...

    async def salt(self) -> str:
        """A random text that is made once for this ledger, and the same for everybody who may read the ledger."""
