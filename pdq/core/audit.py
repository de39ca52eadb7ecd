"""Who holds what, compared: the ledger's word against that of tiers, queues and the workers themselves.

``audit`` is a pure function of a ``View``, which is a moment's reading of everything. The reading is not atomic, so a
single one proves nothing: a suspicion counts once a second reading, a moment later, has the very same (``confirmed``).
That is what ``Finding.mark`` is for: an epoch, a sequence, an amount that a healthy system would have moved on from.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from pdq.core.handoff import Retain, Side, State
from pdq.core.lease import Lease
from pdq.core.messages import AccountAnswer, Holding

# --- What is compared -------------------------------------------------------------------------------------------------


class Books(Struct, frozen=True):
    """A model's counters (``ready:requests``, ``tenant:acme:prompt_tokens``; zeros left out) and due list, beside what
    follows from its records."""

    counted: Mapping[str, int] = {}
    recounted: Mapping[str, int] = {}
    strays: tuple[str, ...] = ()
    """Request ids on the due list without a live record."""
    late: tuple[str, ...] = ()
    """Request ids that stand there later than something of theirs runs out."""
    unindexed: tuple[str, ...] = ()
    """Live records that are not on it."""


class KvObject(Struct, frozen=True):
    """KV bytes that lie somewhere without a process around them."""

    tier: str
    name: str
    bytes: int
    model: str = ""
    request_id: str = ""
    """Empty where the place does not tell whose they are."""
    epoch: int = 0
    ttl_ms: int | None = None
    """When they vanish by themselves; None: never."""
    alive: bool = False
    """A living process vouches for them and will clear them away; or they are meant to outlive theirs, for now."""


class RecordSeen(Struct, frozen=True):
    """Of a handoff record, what the comparison needs."""

    model: str
    request_id: str
    state: State
    epoch: int
    created_ms: int
    deadline_ms: int
    ended_ms: int = 0
    source: Lease | None = None
    sink: Lease | None = None
    kv_epochs: tuple[int, ...] = ()
    """Attempts whose KV its locators lead to."""
    tier_epochs: tuple[int, ...] = ()
    """Of these, the attempts whose KV lies in a tier: until the request has ended, another sink can go on from there."""
    retain: Retain = Retain.FETCHED

    @property
    def leases(self) -> list[tuple[Side, Lease]]:
        both = ((Side.SOURCE, self.source), (Side.SINK, self.sink))
        return [(side, lease) for side, lease in both if lease is not None]

    def needs_kv_of(self, epoch: int) -> bool:
        """May a tier still keep the bytes of this attempt?"""
        if self.state.terminal:
            return False
        if self.source is not None and self.source.epoch == epoch:
            return True
        retained = self.state is not State.FETCHED or self.retain is not Retain.FETCHED
        return epoch in self.tier_epochs or (epoch in self.kv_epochs and retained)


class JobSeen(Struct, frozen=True):
    queue: str
    sequence: int
    published_ms: int
    request_id: str
    known: bool
    """Whoever published it has written the record first."""


class ModelSeen(Struct, frozen=True):
    model: str
    live: tuple[RecordSeen, ...] = ()
    books: Books | None = None
    """None: too large to compare in one step."""
    jobs: tuple[JobSeen, ...] | None = ()
    """Of all queues, delivered or not. None: too many to read."""
    dead_letters: int = 0


class WorkerSeen(Struct, frozen=True):
    worker: str
    registered: bool
    account: AccountAnswer | None
    """None: it was asked and did not answer."""


class View(Struct, frozen=True):
    now_ms: int
    grace_ms: int
    """What has run out is nobody's fault for so long: the reaper comes by."""
    models: tuple[ModelSeen, ...] = ()
    ended: tuple[RecordSeen, ...] = ()
    """Ended records that a worker, a job or a tier object mentions."""
    workers: tuple[WorkerSeen, ...] = ()
    objects: tuple[KvObject, ...] = ()


# --- What is found ----------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    SILENT_WORKER = "silent_worker"
    SILENT_HOLDER = "silent_holder"
    DEAD_HOLDER = "dead_holder"
    UNKNOWN_TO_HOLDER = "unknown_to_holder"
    LEASE_OVERDUE = "lease_overdue"
    DEADLINE_OVERDUE = "deadline_overdue"
    HELD_AFTER_END = "held_after_end"
    HELD_WITHOUT_LEASE = "held_without_lease"
    OFFER_WITHOUT_HOLDER = "offer_without_holder"
    BLOCKS_UNACCOUNTED = "blocks_unaccounted"
    BLOCKS_QUARANTINED = "blocks_quarantined"
    ORPHANED_OBJECT = "orphaned_object"
    OBJECT_WITHOUT_TTL = "object_without_ttl"
    COUNTER_DRIFT = "counter_drift"
    STRAY_DUE_ENTRY = "stray_due_entry"
    DUE_TOO_LATE = "due_too_late"
    RECORD_NOT_DUE = "record_not_due"
    JOB_WITHOUT_RECORD = "job_without_record"
    RECORD_WITHOUT_JOB = "record_without_job"


class Remedy(StrEnum):
    """What ``--reclaim`` does: only what the system's own programs do, too."""

    WAIT = "nothing now: it ends by itself when the lease runs out or the worker hears of it"
    RESTART = "nothing: drain and restart the worker"
    REAP = "reap the record: its place on the due list follows from it again"
    ROUND = "one reaper round: expire, requeue, yield or reap what has run out"
    FAIL = "fail the request, with its terminal event"
    RECOUNT = "recount the counters from the records"
    CANCEL = "tell the worker that the request has ended"
    RELEASE = "tell the worker that the handoff is fetched"
    DISCARD = "delete it"


class Finding(Struct, frozen=True):
    kind: Kind
    subject: str
    detail: str
    since_ms: int
    """On the ledger's clock; where nobody knows, when it was first seen."""
    remedy: Remedy
    model: str = ""
    request_id: str = ""
    worker: str = ""
    mark: str = ""
    """What is the same at a second look if it is the same trouble."""
    objects: tuple[KvObject, ...] = ()

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.kind, self.subject, self.mark


def confirmed(first: Iterable[Finding], second: Iterable[Finding]) -> list[Finding]:
    """What both readings have, since the earlier of the two."""
    before = {finding.identity: finding for finding in first}
    return [
        replace(finding, since_ms=min(finding.since_ms, before[finding.identity].since_ms))
        for finding in second
        if finding.identity in before
    ]


def audit(view: View) -> list[Finding]:
    """Everything in ``view`` that does not fit together."""
    records = {record.request_id: record for model in view.models for record in model.live}
    records |= {record.request_id: record for record in view.ended if record.request_id not in records}
    workers = {worker.worker: worker for worker in view.workers}
    found: list[Finding] = []
    for model in view.models:
        for record in model.live:
            found += _leases(record, workers, view)
        found += _books(model, view.now_ms)
        found += _jobs(model, records, workers.values(), view)
    for worker in view.workers:
        found += _worker(worker, records, view.now_ms)
    for item in view.objects:
        found += _object(item, records.get(item.request_id), view.now_ms)
    return found


# --- The ledger's leases ----------------------------------------------------------------------------------------------


def _leases(record: RecordSeen, workers: Mapping[str, WorkerSeen], view: View) -> Iterator[Finding]:
    subject = f"request {record.request_id}"
    key = (record.model, record.request_id)
    late = view.now_ms - record.deadline_ms
    if late > view.grace_ms:
        detail = f"{record.state}, its deadline passed {late} ms ago and nobody has ended it: does a reaper run?"
        yield Finding(Kind.DEADLINE_OVERDUE, subject, detail, record.deadline_ms, Remedy.ROUND, *key)
        return
    for side, lease in record.leases:
        trouble = _lease(record, side, lease, workers.get(lease.worker), view)
        if trouble is not None:
            kind, detail, since_ms = trouble
            remedy = Remedy.ROUND if kind is Kind.LEASE_OVERDUE else Remedy.WAIT
            mark = f"{side} {lease.epoch}"
            yield Finding(kind, subject, detail, since_ms, remedy, *key, lease.worker, mark)


def _lease(
    record: RecordSeen, side: Side, lease: Lease, worker: WorkerSeen | None, view: View
) -> tuple[Kind, str, int] | None:
    left = lease.until_ms - view.now_ms
    what = f"{record.state}, {side} lease of {lease.worker} (epoch {lease.epoch})"
    if left <= 0:
        if -left <= view.grace_ms:
            return None
        return Kind.LEASE_OVERDUE, f"{what} ran out {-left} ms ago and nobody has noticed", lease.until_ms
    if worker is None or worker.account is None:
        if worker is not None and worker.registered:
            return Kind.SILENT_HOLDER, f"{what} runs for {left} ms, but the worker does not answer", view.now_ms
        return Kind.DEAD_HOLDER, f"{what} runs for {left} ms, but the worker is not there any more", view.now_ms
    if side is Side.SOURCE and record.state is State.FETCHED:
        return None  # kept on for `retain`; whoever let go of it early harms nobody
    known = any((it.request_id, it.epoch) == (record.request_id, lease.epoch) for it in worker.account.holdings)
    if known:
        return None
    return Kind.UNKNOWN_TO_HOLDER, f"{what} runs for {left} ms, but the worker does not know of it", view.now_ms


# --- The ledger's counters and due list -------------------------------------------------------------------------------


def _books(model: ModelSeen, now_ms: int) -> Iterator[Finding]:
    books = model.books
    if books is None:
        return
    # A live record that is not on the due list is counted, and a recount misses it: that has to be mended first.
    for name in sorted(books.counted.keys() | books.recounted.keys()) if not books.unindexed else ():
        counted, right = books.counted.get(name, 0), books.recounted.get(name, 0)
        if counted != right:
            detail = f"{name} is {counted}, the records make {right}"
            subject, mark = f"counters of {model.model}", f"{name} {counted - right}"
            yield Finding(Kind.COUNTER_DRIFT, subject, detail, now_ms, Remedy.RECOUNT, model=model.model, mark=mark)
    for kind, ids, detail in (
        (Kind.STRAY_DUE_ENTRY, books.strays, "on the due list, but there is no live record"),
        (Kind.DUE_TOO_LATE, books.late, "on the due list later than its lease or deadline runs out"),
        (Kind.RECORD_NOT_DUE, books.unindexed, "live, but not on the due list: no reaper would visit it"),
    ):
        for request_id in ids:
            subject = f"request {request_id}"
            yield Finding(kind, subject, detail, now_ms, Remedy.REAP, model=model.model, request_id=request_id)


# --- Queues -----------------------------------------------------------------------------------------------------------


def _jobs(
    model: ModelSeen, records: Mapping[str, RecordSeen], workers: Iterable[WorkerSeen], view: View
) -> Iterator[Finding]:
    if model.jobs is None:
        return
    for job in model.jobs:
        if job.known and job.request_id not in records:
            subject = f"{job.queue} job {job.sequence} of {model.model}"
            detail = f"it is for request {job.request_id}, which has no record: who is delivered it rejects it"
            yield Finding(Kind.JOB_WITHOUT_RECORD, subject, detail, job.published_ms, Remedy.WAIT, model=model.model)
    queued = {job.request_id for job in model.jobs}
    in_hand = {holding.request_id for worker in workers for holding in _holdings(worker)}
    for record in model.live:
        age = view.now_ms - record.created_ms
        if age > view.grace_ms and record.request_id not in queued | in_hand:
            yield Finding(
                Kind.RECORD_WITHOUT_JOB,
                f"request {record.request_id}",
                f"{record.state}, but no queue has a job for it and no worker is at it: nobody will ever end it well",
                view.now_ms,
                Remedy.FAIL,
                model=model.model,
                request_id=record.request_id,
                mark=f"{record.state} {record.epoch}",
            )


# --- Workers ----------------------------------------------------------------------------------------------------------


def _worker(worker: WorkerSeen, records: Mapping[str, RecordSeen], now_ms: int) -> Iterator[Finding]:
    subject, name = f"worker {worker.worker}", worker.worker
    account = worker.account
    if account is None:
        if worker.registered:
            detail = "it is registered, but does not say what it holds: stopped, cut off or overwhelmed"
            yield Finding(Kind.SILENT_WORKER, subject, detail, now_ms, Remedy.WAIT, worker=name)
        return
    for holding in account.holdings:
        yield from _holding(worker, account, holding, records.get(holding.request_id), now_ms)
    mine = {(holding.request_id, holding.epoch) for holding in account.holdings}
    for transport, offers in account.offers.items():
        for offer in offers:
            if (offer.request_id, offer.epoch) not in mine:
                detail = f"offers request {offer.request_id} (epoch {offer.epoch}) on {transport}, but does not hold it"
                mark = f"{transport} {offer.request_id} {offer.epoch}"
                yield Finding(
                    Kind.OFFER_WITHOUT_HOLDER, subject, detail, now_ms, Remedy.RESTART, worker=name, mark=mark
                )
    used = account.total_blocks - account.free_blocks - account.quarantined_blocks
    known = sum(holding.blocks for holding in account.holdings)
    if used != known:
        detail = f"{used} of {account.total_blocks} blocks are in use, its requests have {known}"
        mark = str(used - known)
        yield Finding(Kind.BLOCKS_UNACCOUNTED, subject, detail, now_ms, Remedy.RESTART, worker=name, mark=mark)
    if account.quarantined_blocks:
        detail = (
            f"{account.quarantined_blocks} of {account.total_blocks} blocks are out of use since a transfer was cut"
        )
        yield Finding(Kind.BLOCKS_QUARANTINED, subject, detail, now_ms, Remedy.RESTART, worker=name)


def _holding(
    worker: WorkerSeen, account: AccountAnswer, holding: Holding, record: RecordSeen | None, now_ms: int
) -> Iterator[Finding]:
    role = f"{holding.side}, epoch {holding.epoch}, {holding.blocks} blocks"
    what = f"{holding.doing} request {holding.request_id} ({role})"
    if record is None or record.state.terminal:
        kind, remedy = Kind.HELD_AFTER_END, Remedy.CANCEL
        reason = "which has no record" if record is None else f"which is {record.state}"
        since_ms = now_ms - holding.for_ms if record is None else record.ended_ms
    elif not any((lease.worker, lease.epoch) == (worker.worker, holding.epoch) for _, lease in record.leases):
        kind, reason = Kind.HELD_WITHOUT_LEASE, f"which is at epoch {record.epoch} and gives it no such lease"
        # A release goes by request: it must not hit what this worker rightly holds under another epoch.
        alone = sum(other.request_id == holding.request_id for other in account.holdings) == 1
        remedy = Remedy.RELEASE if holding.doing == "held" and alone else Remedy.WAIT
        since_ms = now_ms - holding.for_ms
    else:
        return
    yield Finding(
        kind,
        f"worker {worker.worker}",
        f"{what}, {reason}",
        since_ms,
        remedy,
        model=account.model,
        request_id=holding.request_id,
        worker=worker.worker,
        mark=f"{holding.request_id} {holding.epoch}",
    )


def _holdings(worker: WorkerSeen) -> Sequence[Holding]:
    return worker.account.holdings if worker.account is not None else ()


# --- Tiers and shared memory ------------------------------------------------------------------------------------------


def _object(item: KvObject, record: RecordSeen | None, now_ms: int) -> Iterator[Finding]:
    if item.alive:
        return
    subject = f"{item.tier} object {item.name}"
    key = (item.model, item.request_id)
    if record is not None and record.needs_kv_of(item.epoch):
        if item.ttl_ms is None:
            detail = f"{item.bytes} bytes of a live request that would stay for ever if nobody deleted them"
            yield Finding(Kind.OBJECT_WITHOUT_TTL, subject, detail, now_ms, Remedy.WAIT, *key)
        return
    if not item.request_id:
        whose = "the process that made it is gone"
    elif record is None:
        whose = f"request {item.request_id} has no record"
    elif record.state.terminal:
        whose = f"request {item.request_id} is {record.state}"
    else:
        whose = (
            f"request {item.request_id} is {record.state} at epoch {record.epoch} and needs none of epoch {item.epoch}"
        )
    goes = "never goes by itself" if item.ttl_ms is None else f"goes by itself in {item.ttl_ms} ms"
    since_ms = record.ended_ms if record is not None and record.ended_ms else now_ms
    detail = f"{item.bytes} bytes; {whose}; {goes}"
    yield Finding(Kind.ORPHANED_OBJECT, subject, detail, since_ms, Remedy.DISCARD, *key, objects=(item,))
