"""The comparison behind ``pdq audit``: a view that fits together has no finding, and each kind of trouble has its own."""

from typing import Any

import pytest
from msgspec.structs import replace

from pdq.core.audit import (
    Books,
    Finding,
    JobSeen,
    Kind,
    KvObject,
    ModelSeen,
    RecordSeen,
    Remedy,
    View,
    WorkerSeen,
    audit,
    confirmed,
)
from pdq.core.handoff import Retain, Side, State
from pdq.core.lease import Lease
from pdq.core.messages import AccountAnswer, Holding, OfferedHandoff

NOW = 1_000_000
READY = RecordSeen(
    model="m",
    request_id="r",
    state=State.READY,
    epoch=2,
    created_ms=NOW - 60_000,
    deadline_ms=NOW + 60_000,
    source=Lease("p", 1, NOW + 5_000),
    sink=Lease("d", 2, NOW + 5_000),
    kv_epochs=(1,),
)
"""Prefill worker ``p`` holds its KV, decode worker ``d`` is fetching it."""
HELD = Holding("r", Side.SOURCE, 1, "held", 4, 4096, 50)
FETCHING = Holding("r", Side.SINK, 2, "fetching", 6, 4096, 20)
JOB = JobSeen("decode", 7, NOW - 100, "r", known=True)
TIER = KvObject("redis", "pdq:{m}:kv:r:1", 4096, "m", "r", 1, 50_000)
BOOKS = Books(counted={"ready:requests": 1}, recounted={"ready:requests": 1})


def account(worker: str, *holdings: Holding, **changed: Any) -> WorkerSeen:
    used = sum(holding.blocks for holding in holdings)
    offers = {"ucx": tuple(OfferedHandoff(it.request_id, it.epoch) for it in holdings if it.doing == "held")}
    answer = AccountAnswer(worker, "m", holdings, 64, 64 - used, 0, offers, ())
    return WorkerSeen(worker, True, replace(answer, **changed))


P, D = account("p", HELD), account("d", FETCHING)
SILENT = WorkerSeen("p", registered=True, account=None)
GONE = WorkerSeen("p", registered=False, account=None)


def view(
    *records: RecordSeen,
    workers: tuple[WorkerSeen, ...] = (P, D),
    jobs: tuple[JobSeen, ...] | None = (JOB,),
    books: Books | None = BOOKS,
    objects: tuple[KvObject, ...] = (TIER,),
) -> View:
    live = tuple(record for record in records if not record.state.terminal)
    ended = tuple(record for record in records if record.state.terminal)
    return View(NOW, 1_000, (ModelSeen("m", live, books, jobs),), ended, workers, objects)


def ended(state: State = State.DONE) -> RecordSeen:
    return replace(READY, state=state, ended_ms=NOW - 700, source=None, sink=None)


def seen(found: list[Finding]) -> set[tuple[Kind, str, Remedy]]:
    return {(finding.kind, finding.subject, finding.remedy) for finding in found}


FETCHED = replace(READY, state=State.FETCHED, source=None)
FINE = {
    "a request in the middle of its handoff": view(READY),
    "nothing at all": View(NOW, 1_000),
    "a lease that has just run out, which the reaper will find": view(replace(READY, sink=Lease("d", 2, NOW - 900))),
    "a deadline that has just passed": view(replace(READY, deadline_ms=NOW - 900)),
    "a worker that misses from the registry and answers": view(READY, workers=(replace(P, registered=False), D)),
    "more jobs than are read": view(READY, jobs=None),
    "more records than are compared in one step": view(READY, books=None),
    "a request so young that its job is on its way": view(
        replace(READY, state=State.QUEUED, created_ms=NOW - 500, source=None, sink=None, kv_epochs=()),
        workers=(),
        jobs=(),
        objects=(),
    ),
    "a producer's job that no worker has taken yet": view(
        READY, jobs=(JOB, JobSeen("prefill", 8, NOW - 90_000, "later", known=False))
    ),
    "a job of a request that was cancelled while it waited": view(ended(), workers=(), books=Books(), objects=()),
    "a request in a worker's hands whose job is gone": view(READY, jobs=()),
    "KV of a running prefill, before the record says where it is": view(
        replace(READY, state=State.PREFILLING, sink=None, kv_epochs=()),
        workers=(account("p", replace(HELD, doing="computing")),),
    ),
    "a segment whose process lives": view(READY, objects=(KvObject("shm", "pdq-kv-1", 4096, alive=True),)),
    "a tier copy that is kept to the end": view(replace(FETCHED, retain=Retain.DONE), workers=(account("p"), D)),
    "a copy in a tier, from which another sink could go on": view(
        replace(FETCHED, tier_epochs=(1,)), workers=(account("p"), D)
    ),
    "a source that let go of a retained copy before its lease ended": view(
        replace(READY, state=State.FETCHED, retain=Retain.FIRST_TOKEN), workers=(account("p"), D)
    ),
}


@pytest.mark.parametrize("clean", FINE.values(), ids=FINE)
def test_there_is_no_finding_for(clean: View) -> None:
    assert audit(clean) == []


REQUEST, PREFILL, DECODE = "request r", "worker p", "worker d"
TROUBLE = {
    "a worker that does not answer, and what it holds": (
        view(READY, workers=(SILENT, D)),
        {(Kind.SILENT_WORKER, PREFILL, Remedy.WAIT), (Kind.SILENT_HOLDER, REQUEST, Remedy.WAIT)},
    ),
    "a lease whose holder is dead": (
        view(READY, workers=(GONE, D)),
        {(Kind.DEAD_HOLDER, REQUEST, Remedy.WAIT)},
    ),
    "a lease that its holder does not know": (
        view(READY, workers=(P, account("d"))),
        {(Kind.UNKNOWN_TO_HOLDER, REQUEST, Remedy.WAIT)},
    ),
    "a lease that its holder knows under another epoch only": (
        view(READY, workers=(P, account("d", replace(FETCHING, epoch=1)))),
        {(Kind.UNKNOWN_TO_HOLDER, REQUEST, Remedy.WAIT), (Kind.HELD_WITHOUT_LEASE, DECODE, Remedy.WAIT)},
    ),
    "a lease that ran out long ago": (
        view(replace(READY, sink=Lease("d", 2, NOW - 1_001))),
        {(Kind.LEASE_OVERDUE, REQUEST, Remedy.ROUND)},
    ),
    "a deadline that passed long ago": (
        view(replace(READY, deadline_ms=NOW - 1_001)),
        {(Kind.DEADLINE_OVERDUE, REQUEST, Remedy.ROUND)},
    ),
    "blocks held for a request that has ended": (
        view(ended(), jobs=(), books=Books(), objects=()),
        {(Kind.HELD_AFTER_END, PREFILL, Remedy.CANCEL), (Kind.HELD_AFTER_END, DECODE, Remedy.CANCEL)},
    ),
    "blocks held for a request that nobody knows": (
        view(jobs=(), books=Books(), objects=(), workers=(P,)),
        {(Kind.HELD_AFTER_END, PREFILL, Remedy.CANCEL)},
    ),
    "KV that was fetched and is held on": (
        view(FETCHED, objects=()),
        {(Kind.HELD_WITHOUT_LEASE, PREFILL, Remedy.RELEASE)},
    ),
    "KV of a former attempt beside that of the current one, which a release would hit too": (
        view(READY, workers=(account("p", HELD, replace(HELD, epoch=0)), D)),
        {(Kind.HELD_WITHOUT_LEASE, PREFILL, Remedy.WAIT)},
    ),
    "an offer that the worker itself does not know of": (
        view(READY, workers=(account("p", HELD, offers={"ucx": (OfferedHandoff("old", 3),)}), D)),
        {(Kind.OFFER_WITHOUT_HOLDER, PREFILL, Remedy.RESTART)},
    ),
    "blocks that no request has": (
        view(READY, workers=(account("p", HELD, free_blocks=59), D)),
        {(Kind.BLOCKS_UNACCOUNTED, PREFILL, Remedy.RESTART)},
    ),
    "quarantined blocks": (
        view(READY, workers=(P, account("d", FETCHING, free_blocks=50, quarantined_blocks=8))),
        {(Kind.BLOCKS_QUARANTINED, DECODE, Remedy.RESTART)},
    ),
    "tier bytes of a request that has ended": (
        view(ended(), workers=(), jobs=(), books=Books()),
        {(Kind.ORPHANED_OBJECT, f"redis object {TIER.name}", Remedy.DISCARD)},
    ),
    "tier bytes of a request that nobody knows": (
        view(workers=(), jobs=(), books=Books(), objects=(replace(TIER, ttl_ms=None),)),
        {(Kind.ORPHANED_OBJECT, f"redis object {TIER.name}", Remedy.DISCARD)},
    ),
    "tier bytes of a former attempt": (
        view(READY, objects=(replace(TIER, epoch=0),)),
        {(Kind.ORPHANED_OBJECT, f"redis object {TIER.name}", Remedy.DISCARD)},
    ),
    "tier bytes of a handoff that was fetched": (
        view(FETCHED, workers=(account("p"), D)),
        {(Kind.ORPHANED_OBJECT, f"redis object {TIER.name}", Remedy.DISCARD)},
    ),
    "tier bytes that would never go by themselves": (
        view(READY, objects=(replace(TIER, ttl_ms=None),)),
        {(Kind.OBJECT_WITHOUT_TTL, f"redis object {TIER.name}", Remedy.WAIT)},
    ),
    "a segment whose process is gone": (
        view(READY, objects=(KvObject("shm", "pdq-kv-1", 4096),)),
        {(Kind.ORPHANED_OBJECT, "shm object pdq-kv-1", Remedy.DISCARD)},
    ),
    "counters that the records do not make": (
        view(READY, books=replace(BOOKS, counted={"ready:requests": 3, "queued:requests": -1})),
        {(Kind.COUNTER_DRIFT, "counters of m", Remedy.RECOUNT)},
    ),
    "counters of a tenant that has nothing here": (
        view(READY, books=replace(BOOKS, counted={"ready:requests": 1, "tenant:a:b:requests": 1})),
        {(Kind.COUNTER_DRIFT, "counters of m", Remedy.RECOUNT)},
    ),
    "a due list that does not fit the records": (
        view(READY, books=replace(BOOKS, strays=("gone",), late=("r",), unindexed=("lost",))),
        {
            (Kind.STRAY_DUE_ENTRY, "request gone", Remedy.REAP),
            (Kind.DUE_TOO_LATE, REQUEST, Remedy.REAP),
            (Kind.RECORD_NOT_DUE, "request lost", Remedy.REAP),
        },
    ),
    "a job whose record is gone": (
        view(READY, jobs=(JOB, JobSeen("prefill", 9, NOW - 50, "gone", known=True))),
        {(Kind.JOB_WITHOUT_RECORD, "prefill job 9 of m", Remedy.WAIT)},
    ),
    "a request that no queue and no worker has": (
        view(replace(READY, state=State.QUEUED, source=None, sink=None, kv_epochs=()), workers=(), jobs=(), objects=()),
        {(Kind.RECORD_WITHOUT_JOB, REQUEST, Remedy.FAIL)},
    ),
}


@pytest.mark.parametrize(("wrong", "expected"), TROUBLE.values(), ids=TROUBLE)
def test_it_finds(wrong: View, expected: set[tuple[Kind, str, Remedy]]) -> None:
    found = audit(wrong)
    assert seen(found) == expected
    for finding in found:
        assert finding.detail
        assert 0 < finding.since_ms <= NOW


def test_every_kind_of_finding_is_in_the_table() -> None:
    assert {kind for _, expected in TROUBLE.values() for kind, _, _ in expected} == set(Kind)


def test_what_both_readings_have_counts_since_the_earlier_one() -> None:
    first, second = view(READY, workers=(SILENT, D)), view(READY, workers=(SILENT, D))
    later = replace(second, now_ms=NOW + 500)
    assert {finding.since_ms for finding in confirmed(audit(first), audit(later))} == {NOW}


def test_what_has_moved_on_between_the_readings_is_no_finding() -> None:
    lost = view(READY, workers=(P, account("d")))
    renewed = view(replace(READY, epoch=3, sink=Lease("d", 3, NOW + 9_000)), workers=(P, account("d")))
    assert audit(lost)
    assert audit(renewed)
    assert confirmed(audit(lost), audit(renewed)) == []
    drift, other = (replace(BOOKS, counted={"ready:requests": count}) for count in (2, 3))
    assert confirmed(audit(view(READY, books=drift)), audit(view(READY, books=other))) == []
