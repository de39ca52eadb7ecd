"""The handoff ledger on Redis or Valkey: every change is one Lua script and one round trip.

The scripts execute ``pdq.core.handoff``'s tables without knowing them: ``_executable`` turns each event's rows into the
argument that ``transition.lua`` works from. All keys of a script carry the model as their hash tag.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from pdq import failpoints
from pdq.adapters.redis import counters, fields
from pdq.adapters.redis.link import Link, Script, client_for, literally, source
from pdq.core import names
from pdq.core.audit import Books
from pdq.core.handoff import KV_FIELDS, RESTS_ON, RULES, Event, Retain, Side, predecessors, releases_on
from pdq.core.ids import mint_secret
from pdq.core.lease import Hold, RecordKey
from pdq.core.refusals import refusal
from pdq.core.settings import LeaseSettings, RedisSettings
from pdq.ports import Changes, Grant, Load, LogEntry, NewRecord, Record

SERVER_CLOCK: Final = source("clock")
BATCH: Final = 500
"""Records per script or pipeline: a long list must not keep the server from everyone else."""

BOOKS_LIMIT: Final = 20_000
"""Live records that are compared with the counters in one step: some 50 ms in which the server does nothing else."""

_encode = msgspec.json.Encoder().encode
_log_entry = msgspec.json.Decoder(LogEntry)


class RedisLedger:
    """``HandoffLedger`` on one Redis or Valkey. ``close`` closes the client only if the ledger was given a URL.

    ``clock`` is the Lua source of the function that tells the ledger's time: tests put one they can steer in its place.
    """

    def __init__(self, client_or_url: Redis | str, lease: LeaseSettings, *, clock: str = SERVER_CLOCK) -> None:
        self._owned = client_for(RedisSettings(url=client_or_url)) if isinstance(client_or_url, str) else None
        self._link = Link(self._owned or client_or_url)  # type: ignore[arg-type]
        self._rules = {event: _encode(_executable(event, lease)) for event in Event}
        self._look_ms = lease.ttl_ms
        self._ended_ttl_ms = lease.ended_ttl_s * 1000
        head = source("record")
        self._enqueue = Script(clock, head, source("enqueue"))
        self._transition = Script(clock, head, source("transition"))
        self._update = Script(clock, head, source("update"))
        self._reap = Script(clock, head, source("reap"))
        self._renew = Script(clock, source("renew"))
        self._due = Script(clock, source("due"))
        self._books = Script(clock, head, source("books"))
        self._unindexed_of = Script(source("unindexed"))
        self._now = Script(clock, "return clock()")

    async def close(self) -> None:
        await self._link.close()
        if self._owned is not None:
            await self._owned.aclose()

    # --- Changes ------------------------------------------------------------------------------------------------------

    async def enqueue(self, new: NewRecord) -> tuple[Record, bool]:
        verdict, _, *parts = await self._link.run(
            self._enqueue,
            (*_keys(new.key), *((names.job_key(new.key.model, new.job),) if new.job else ())),
            new.key.request_id,
            new.timeout_ms,
            self._look_ms,
            self._ended_ttl_ms,
            *fields.of_new(new),
            # First the index: a model without records is harmless, records that no reaper finds are not.
            after=("SADD", names.MODELS_KEY, new.key.model),
        )
        return fields.record(new.key, *parts), verdict == b"ok"

    async def acquire(self, key: RecordKey, event: Event, worker: str, ttl_ms: int) -> Grant:
        if RULES[event].claims is None:
            raise ValueError(f"{event} claims no lease: use apply()")
        record, now_ms = await self._cause(key, event, "", worker, ttl_ms, None, None)
        return Grant(record=record, epoch=record.epoch, now_ms=now_ms)

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
        record, _ = await self._cause(key, event, "" if epoch is None else epoch, worker, 0, changes, note)
        return record

    async def update(self, key: RecordKey, side: Side, epoch: int, changes: Changes) -> None:
        await self._under_lease("update", key, side, epoch, "keep", changes)

    async def release(self, key: RecordKey, side: Side, epoch: int) -> None:
        await self._under_lease("release", key, side, epoch, "release", None)

    async def renew(self, holds: Sequence[Hold], ttl_ms: int) -> Sequence[Hold]:
        lost: list[Hold] = []
        for model, group in groupby(sorted(holds, key=_model_of), key=_model_of):
            mine = list(group)
            for start in range(0, len(mine), BATCH):
                batch = mine[start : start + BATCH]
                keys = [names.due_key(model), *(names.record_key(model, hold.key.request_id) for hold in batch)]
                proofs = [part for hold in batch for part in (hold.key.request_id, hold.side.value, hold.epoch)]
                lost += [batch[place] for place in await self._link.run(self._renew, keys, ttl_ms, *proofs)]
        return lost

    async def reap(self, key: RecordKey, *, look_again: bool = False) -> Record:
        reply = await self._link.run(self._reap, _keys(key), key.request_id, self._look_ms if look_again else "")
        return fields.record(key, *_allowed(reply, key, "reap"))

    async def _cause(
        self,
        key: RecordKey,
        event: Event,
        epoch: int | str,
        worker: str,
        ttl_ms: int,
        changes: Changes | None,
        note: Mapping[str, Any] | None,
    ) -> tuple[Record, int]:
        if failpoints.armed:
            await failpoints.hit("ledger.change", key.request_id)
        reply = await self._link.run(
            self._transition,
            _keys(key),
            key.request_id,
            self._rules[event],
            epoch,
            worker,
            ttl_ms,
            _encode(note) if note else b"{}",
            *fields.of_changes(changes),
        )
        if failpoints.armed:
            await failpoints.hit("ledger.changed", key.request_id)
        return fields.record(key, *_allowed(reply, key, event.value)), reply[1]

    async def _under_lease(
        self, doing: str, key: RecordKey, side: Side, epoch: int, then: str, changes: Changes | None
    ) -> None:
        reply = await self._link.run(
            self._update, _keys(key), key.request_id, side.value, epoch, then, *fields.of_changes(changes)
        )
        _allowed(reply, key, doing)

    # --- Questions ----------------------------------------------------------------------------------------------------

    async def read(self, key: RecordKey) -> Record | None:
        flat = await self._link.call("HGETALL", names.record_key(key.model, key.request_id))
        return fields.record(key, flat) if flat else None

    async def read_many(self, keys: Sequence[RecordKey]) -> Sequence[Record | None]:
        found: list[Record | None] = []
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            stored = await self._link.many([("HGETALL", names.record_key(k.model, k.request_id)) for k in batch])
            found += [fields.record(key, flat) if flat else None for key, flat in zip(batch, stored, strict=True)]
        return found

    async def find(self, request_id: str) -> Record | None:
        found = await self.read_many([RecordKey(model, request_id) for model in await self.models()])
        return next((record for record in found if record is not None), None)

    async def of_job(self, model: str, job: str) -> Record | None:
        request_id: bytes | None = await self._link.call("GET", names.job_key(model, job))
        return None if request_id is None else await self.read(RecordKey(model, request_id.decode()))

    async def history(self, key: RecordKey) -> Sequence[LogEntry]:
        entries = await self._link.call("LRANGE", names.log_key(key.model, key.request_id), 0, -1)
        return [_log_entry.decode(entry) for entry in entries]

    async def due(self, model: str, limit: int) -> Sequence[Record]:
        ids = await self._link.run(self._due, [names.due_key(model)], limit)
        keys = [RecordKey(model, name.decode()) for name in ids]
        found = await self.read_many(keys)
        for key, record in zip(keys, found, strict=True):
            if record is None:  # evicted or deleted by hand: the script looks again, and takes it off the list
                await self._link.run(self._reap, _keys(key), key.request_id, "")
        return [record for record in found if record is not None]

    async def live(self, model: str) -> Sequence[Record]:
        ids = await self._link.call("ZRANGE", names.due_key(model), 0, -1)
        found = await self.read_many([RecordKey(model, name.decode()) for name in ids])
        return [record for record in found if record is not None and not record.state.terminal]

    async def load(self, model: str) -> Load:
        return counters.load(await self._link.call("HGETALL", names.load_key(model)))

    async def books(self, model: str, *, mend: bool = False) -> Books | None:
        keys = (names.due_key(model), names.load_key(model))
        unindexed = await self._unindexed(model)
        mend = mend and not unindexed  # these are counted, and the script does not find them
        reply = await self._link.run(self._books, keys, names.record_key(model, ""), BOOKS_LIMIT, int(mend))
        if not reply:
            return None
        counted, recounted, strays, late = reply
        return Books(
            counted=counters.figures(counted),
            recounted=counters.figures(recounted),
            strays=tuple(name.decode() for name in strays),
            late=tuple(name.decode() for name in late),
            unindexed=unindexed,
        )

    async def _unindexed(self, model: str) -> tuple[str, ...]:
        prefix = names.record_key(model, "")
        found: list[str] = []
        async for stored in self._link.scan(literally(prefix) + "*"):
            ids = [key.decode().removeprefix(prefix) for key in stored]
            keys = [names.due_key(model), *(names.record_key(model, name) for name in ids)]
            found += [ids[place] for place in await self._link.run(self._unindexed_of, keys, *ids)]
        return tuple(found)

    async def models(self) -> Sequence[str]:
        return sorted(name.decode() for name in await self._link.call("SMEMBERS", names.MODELS_KEY))

    async def now_ms(self) -> int:
        return int(await self._link.run(self._now, ()))

    async def salt(self) -> str:
        await self._link.call("SET", names.SALT_KEY, mint_secret(), "NX")
        stored: bytes = await self._link.call("GET", names.SALT_KEY)
        return stored.decode()


def _executable(event: Event, lease: LeaseSettings) -> dict[str, Any]:
    """One event's rows of the tables, as ``transition.lua`` takes them."""
    rule = RULES[event]
    moves = predecessors(event)
    return {
        "event": event,
        "moves": moves,
        "ends": all(target.terminal for target in moves.values()),
        "author": rule.author,
        "rests_on": dict(RESTS_ON),
        "claims": rule.claims or False,
        "releases": {retain.value: releases_on(event, retain) for retain in Retain},
        "moves_source_to_sink": rule.moves_source_to_sink,
        "voids": KV_FIELDS if rule.voids_kv else (),
        "counts_attempt": rule.counts_attempt,
        "look_ms": lease.ttl_ms,
        "ended_ttl_ms": lease.ended_ttl_s * 1000,
    }


def _keys(key: RecordKey) -> tuple[str, str, str, str]:
    model, request_id = key.model, key.request_id
    return (
        names.record_key(model, request_id),
        names.log_key(model, request_id),
        names.load_key(model),
        names.due_key(model),
    )


def _model_of(hold: Hold) -> str:
    return hold.key.model


def _allowed(reply: Sequence[Any], key: RecordKey, doing: str) -> Sequence[Any]:
    """What follows ``{"ok", now_ms}`` in a script's reply.

    Raises:
        PdqError: the refusal that the script returned instead.
    """
    if reply[0] == b"ok":
        return reply[2:]
    code, *context = reply
    state, remaining_ms = context or (b"", 0)
    raise refusal(code.decode(), key, doing, state=state.decode(), remaining_ms=remaining_ms)
