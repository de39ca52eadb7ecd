"""The handoff ledger in this process: the tables of ``pdq.core.handoff``, executed in Python.

It keeps its promise of one atomic step by never awaiting within a method. Counters and the due list are computed from
the records when somebody asks: there is no second copy that could disagree. Only what has ended is kept as a total.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from pdq.core import errors
from pdq.core.audit import Books
from pdq.core.handoff import (
    KV_FIELDS,
    LIVE,
    RESTS_ON,
    RULES,
    TRANSITIONS,
    Author,
    Event,
    Retain,
    Side,
    State,
    releases_on,
)
from pdq.core.ids import mint_secret
from pdq.core.lease import Hold, Lease, RecordKey
from pdq.core.load import Count, reading, total
from pdq.core.messages import Priority
from pdq.core.refusals import refusal
from pdq.core.settings import LeaseSettings
from pdq.ports import Changes, Grant, Load, LogEntry, NewRecord, Record

_Name = TypeVar("_Name")
LOG_LIMIT: Final = 200
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(Record)}
_NO_KV: Final = {name: _DEFAULTS[name] for name in KV_FIELDS}


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryLedger:
    """``HandoffLedger`` in a dictionary; ``clock`` tells the ledger's time in Unix milliseconds."""

    def __init__(self, lease: LeaseSettings, *, clock: Callable[[], int] = wall_clock_ms) -> None:
        self._clock = clock
        self._look_ms = lease.ttl_ms
        self._ended_ttl_ms = lease.ended_ttl_s * 1000
        self._records: dict[RecordKey, Record] = {}
        self._logs: dict[RecordKey, deque[LogEntry]] = {}
        self._jobs: dict[tuple[str, str], RecordKey] = {}
        self._looks: dict[RecordKey, int] = {}
        """When a queued record comes up for a look."""
        self._ended: deque[tuple[int, RecordKey]] = deque()
        self._totals: defaultdict[str, Count] = defaultdict(Count)
        self._models: set[str] = set()
        self._salt = mint_secret()

    async def close(self) -> None:
        self._records.clear()
        self._logs.clear()
        self._jobs.clear()
        self._looks.clear()
        self._ended.clear()

    # --- Changes ------------------------------------------------------------------------------------------------------

    async def enqueue(self, new: NewRecord) -> tuple[Record, bool]:
        now = self._tick()
        if (found := self._records.get(new.key)) is not None:
            return found, False
        given = {name: getattr(new, name) for name in NewRecord.__struct_fields__ if name not in ("timeout_ms", "job")}
        record = Record(
            state=State.QUEUED, attempt=0, epoch=0, deadline_ms=now + new.timeout_ms, created_ms=now, **given
        )
        self._models.add(new.key.model)
        self._records[new.key] = record
        self._logs[new.key] = deque(maxlen=LOG_LIMIT)
        if new.job:
            self._jobs[new.key.model, new.job] = new.key
        self._look_at(record, now)
        self._log(record, now, "enqueue", "", 0, {})
        return record, True

    async def acquire(self, key: RecordKey, event: Event, worker: str, ttl_ms: int) -> Grant:
        if RULES[event].claims is None:
            raise ValueError(f"{event} claims no lease: use apply()")
        now = self._tick()
        record = self._cause(key, event, now, None, worker, ttl_ms, None, {})
        return Grant(record=record, epoch=record.epoch, now_ms=now)

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
        if RULES[event].claims is not None:
            raise ValueError(f"{event} claims a lease: use acquire()")
        return self._cause(key, event, self._tick(), epoch, worker, 0, changes, note or {})

    async def update(self, key: RecordKey, side: Side, epoch: int, changes: Changes) -> None:
        record = self._under_lease("update", key, side, epoch)
        self._records[key] = replace(record, **_given(changes))

    async def release(self, key: RecordKey, side: Side, epoch: int) -> None:
        record = self._under_lease("release", key, side, epoch)
        self._records[key] = replace(record, **{side.value: None})

    async def renew(self, holds: Sequence[Hold], ttl_ms: int) -> Sequence[Hold]:
        now = self._tick()
        lost: list[Hold] = []
        for hold in holds:
            record = self._records.get(hold.key)
            if record is None or not _holds(record, hold.side, hold.epoch, now):
                lost.append(hold)
            else:
                lease = replace(_lease(record, hold.side), until_ms=now + ttl_ms)
                self._records[hold.key] = replace(record, **{hold.side.value: lease})
        return lost

    async def reap(self, key: RecordKey, *, look_again: bool = False) -> Record:
        now = self._tick()
        record = self._found(key, "reap")
        run_out = {side.value: None for side in Side if not _running(record, side, now)}
        self._records[key] = record = replace(record, **run_out)
        self._look_at(record, now if look_again else None)
        return record

    def _cause(
        self,
        key: RecordKey,
        event: Event,
        now: int,
        epoch: int | None,
        worker: str,
        ttl_ms: int,
        changes: Changes | None,
        note: Mapping[str, Any],
    ) -> Record:
        """Judge author and time, then change the record: the same order of questions as ``transition.lua``."""
        rule = RULES[event]
        record = self._living(key, event.value)

        def refuse(kind: type[errors.PdqError], remaining_ms: int = 0) -> errors.PdqError:
            return refusal(kind.code, key, event.value, state=record.state.value, remaining_ms=remaining_ms)

        vouching = _vouching(record, rule.author, epoch, now)
        if vouching is None and (epoch is not None or rule.author in (Author.SOURCE, Author.SINK)):
            raise refuse(errors.StaleEpoch)
        if rule.author is Author.HOLDER_OF_STATE and epoch is None:
            side = RESTS_ON.get(record.state)
            if side is not None and _running(record, side, now):
                raise refuse(errors.LeaseHeld, _lease(record, side).until_ms - now)

        target = TRANSITIONS.get((record.state, event))
        late = now >= record.deadline_ms
        if target is None or (rule.author is Author.CLOCK and not late):
            raise refuse(errors.IllegalTransition)
        if late and not target.terminal:
            raise refuse(errors.DeadlineExceeded)

        if rule.claims is not None:
            if _running(record, rule.claims, now):
                raise refuse(errors.LeaseHeld, _lease(record, rule.claims).until_ms - now)
            if rule.counts_attempt and record.attempt >= record.policy.max_attempts:
                raise refuse(errors.AttemptsExhausted)

        if vouching is not None:
            worker = worker or _lease(record, vouching).worker
        change: dict[str, Any] = {"state": target}
        if rule.moves_source_to_sink:
            change |= {"sink": record.source, "source": None}
        change |= {side.value: None for side in releases_on(event, Retain(record.policy.retain))}
        if rule.voids_kv:
            change |= _NO_KV
        if rule.counts_attempt:
            change["attempt"] = record.attempt + 1
        if rule.claims is not None:
            change["epoch"] = epoch = record.epoch + 1
            change[rule.claims.value] = Lease(worker, epoch, now + ttl_ms)
        change |= _given(changes)
        if target.terminal:
            change["ended_ms"] = now
            self._ended.append((now + self._ended_ttl_ms, key))
            self._totals[key.model] = total((self._totals[key.model], _count(record)))
        self._records[key] = record = replace(record, **change)
        self._look_at(record, now)
        self._log(record, now, event.value, worker, epoch or 0, note)
        return record

    def _under_lease(self, doing: str, key: RecordKey, side: Side, epoch: int) -> Record:
        now = self._tick()
        record = self._living(key, doing)
        if not _holds(record, side, epoch, now):
            raise refusal(errors.StaleEpoch.code, key, doing, state=record.state.value)
        return record

    def _found(self, key: RecordKey, doing: str) -> Record:
        if (record := self._records.get(key)) is None:
            raise refusal(errors.RecordNotFound.code, key, doing)
        return record

    def _living(self, key: RecordKey, doing: str) -> Record:
        record = self._found(key, doing)
        if record.state.terminal:
            raise refusal(errors.RecordEnded.code, key, doing, state=record.state.value)
        return record

    def _log(self, record: Record, now: int, event: str, worker: str, epoch: int, note: Mapping[str, Any]) -> None:
        entry = LogEntry(at_ms=now, event=event, state=record.state, worker=worker, epoch=epoch, note=note)
        self._logs[record.key].append(entry)

    def _tick(self) -> int:
        """The time; records that ended long enough ago are forgotten first."""
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            _, key = self._ended.popleft()
            del self._records[key], self._logs[key]
            self._jobs = {job: of for job, of in self._jobs.items() if of != key}
        return now

    # --- Questions ----------------------------------------------------------------------------------------------------

    async def read(self, key: RecordKey) -> Record | None:
        self._tick()
        return self._records.get(key)

    async def read_many(self, keys: Sequence[RecordKey]) -> Sequence[Record | None]:
        self._tick()
        return [self._records.get(key) for key in keys]

    async def find(self, request_id: str) -> Record | None:
        self._tick()
        return next((record for key, record in self._records.items() if key.request_id == request_id), None)

    async def of_job(self, model: str, job: str) -> Record | None:
        self._tick()
        key = self._jobs.get((model, job))
        return None if key is None else self._records.get(key)

    async def history(self, key: RecordKey) -> Sequence[LogEntry]:
        self._tick()
        return list(self._logs.get(key, ()))

    async def due(self, model: str, limit: int) -> Sequence[Record]:
        now = self._tick()
        overdue = [record for record in self._live(model) if self._due_at(record) <= now]
        return sorted(overdue, key=self._due_at)[:limit]

    async def live(self, model: str) -> Sequence[Record]:
        return sorted(self._live(model), key=_expiry)

    async def load(self, model: str) -> Load:
        states = dict.fromkeys(LIVE, Count())
        queued: dict[Priority, dict[str, Count]] = {}
        tenants: dict[str, Count] = {}
        whole: dict[str, Count] = {}
        for record in self._live(model):
            _add(states, record.state, record)
            _add(tenants, record.tenant, record)
            if record.state is State.QUEUED:
                _add(queued.setdefault(record.priority, {}), record.tenant, record)
            if record.mode == "aggregated" and record.state in (State.QUEUED, State.PREFILLING):
                _add(whole, record.priority if record.state is State.QUEUED else record.state.value, record)
        return reading(states, self._totals[model], queued=queued, tenants=tenants, whole=whole)

    async def books(self, model: str, *, mend: bool = False) -> Books:
        return Books()  # nothing is kept beside the records

    async def models(self) -> Sequence[str]:
        return sorted(self._models)

    async def now_ms(self) -> int:
        return self._tick()

    async def salt(self) -> str:
        return self._salt

    def _look_at(self, record: Record, now: int | None) -> None:
        """If it is queued, it comes up for a look a lease's time after ``now``; None: no more."""
        if now is not None and record.state is State.QUEUED:
            self._looks[record.key] = now + self._look_ms
        else:
            self._looks.pop(record.key, None)

    def _due_at(self, record: Record) -> int:
        return min(_expiry(record), self._looks.get(record.key, record.deadline_ms))

    def _live(self, model: str) -> list[Record]:
        return [r for key, r in self._records.items() if key.model == model and not r.state.terminal]


def _vouching(record: Record, author: Author, epoch: int | None, now: int) -> Side | None:
    """The side whose running lease proves that ``epoch``'s holder may act as ``author``."""
    sides: tuple[Side | None, ...]
    match author:
        case Author.SOURCE:
            sides = (Side.SOURCE,)
        case Author.SINK:
            sides = (Side.SINK,)
        case Author.HOLDER_OF_STATE:
            sides = (RESTS_ON.get(record.state),)
        case _:
            sides = (Side.SOURCE, Side.SINK)
    return next((side for side in sides if side and epoch is not None and _holds(record, side, epoch, now)), None)


def _side(record: Record, side: Side) -> Lease | None:
    return record.source if side is Side.SOURCE else record.sink


def _lease(record: Record, side: Side) -> Lease:
    """A lease that is known to be there."""
    lease = _side(record, side)
    assert lease is not None
    return lease


def _running(record: Record, side: Side, now: int) -> bool:
    lease = _side(record, side)
    return lease is not None and lease.running(now)


def _holds(record: Record, side: Side, epoch: int, now: int) -> bool:
    return _running(record, side, now) and _lease(record, side).epoch == epoch


def _count(record: Record) -> Count:
    return Count(1, record.prompt_tokens, record.prompt_tokens + record.max_new_tokens)


def _add(counts: dict[_Name, Count], name: _Name, record: Record) -> None:
    counts[name] = total((counts.get(name, Count()), _count(record)))


def _expiry(record: Record) -> int:
    leases = [lease.until_ms for lease in (record.source, record.sink) if lease is not None]
    return min([record.deadline_ms, *leases])


def _given(changes: Changes | None) -> dict[str, Any]:
    return {} if changes is None else {name: value for name, value in asdict(changes).items() if value is not None}
