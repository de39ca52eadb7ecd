"""A record as a Redis hash: one field per fact, in words and numbers that an operator can read with ``valkey-cli HGETALL``.

Fields that hold their default are left out. Only layout, locators and end are JSON.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, cast

import msgspec

from pdq.core.handoff import State
from pdq.core.layout import KvLayout
from pdq.core.lease import Lease, RecordKey
from pdq.core.messages import End, Policy, Priority
from pdq.ports import Changes, Locator, NewRecord, Record

_STATES: Final = {state.value.encode(): state for state in State}
_end = msgspec.json.Decoder(End)
_locators = msgspec.json.Decoder(tuple[Locator, ...])
_encode = msgspec.json.Encoder().encode

Argument = str | bytes | int
Mode = Literal["disaggregated", "aggregated"]


def of_new(new: NewRecord) -> list[Argument]:
    """Field, value, ... of a record as it is created."""
    policy = new.policy
    flat: list[Argument] = [
        "state", State.QUEUED.value,
        "attempt", 0,
        "epoch", 0,
        "reply_to", new.reply_to,
        "prompt_tokens", new.prompt_tokens,
        "max_new_tokens", new.max_new_tokens,
        "mode", new.mode,
        "priority", new.priority,
        "on_handoff_failure", policy.on_handoff_failure,
        "on_stream_failure", policy.on_stream_failure,
        "max_attempts", policy.max_attempts,
        "retain", policy.retain,
        "secret", new.secret,
    ]  # fmt: skip
    if new.tenant:
        flat += ("tenant", new.tenant)
    if new.client_id:
        flat += ("client_id", new.client_id)
    return flat


def of_changes(changes: Changes | None) -> list[Argument]:
    """Field, value, ... of what an author writes together with an event."""
    flat: list[Argument] = []
    if changes is None:
        return flat
    for name in Changes.__struct_fields__:
        value = getattr(changes, name)
        if value is None:
            continue
        if name == "layout":
            value = _layout_text(value)
        elif name in ("locators", "end"):
            value = _encode(value)
        elif name == "streaming":
            value = int(value)
        flat += (name, value)
    return flat


def record(key: RecordKey, flat: Sequence[Any], drops: Sequence[bytes] = (), sets: Sequence[bytes] = ()) -> Record:
    """The record stored as ``flat`` (field, value, ...), after ``drops`` (fields) and then ``sets`` (field, value, ...)."""
    f: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
    for name in drops:
        del f[name]
    f.update(zip(sets[::2], sets[1::2], strict=True))
    layout = f.get(b"layout")
    locators = f.get(b"locators")
    first_token = f.get(b"first_token")
    end = f.get(b"end")
    return Record(
        key=key,
        state=_STATES[f[b"state"]],
        attempt=int(f[b"attempt"]),
        epoch=int(f[b"epoch"]),
        deadline_ms=int(f[b"deadline_ms"]),
        reply_to=f[b"reply_to"].decode(),
        prompt_tokens=int(f[b"prompt_tokens"]),
        max_new_tokens=int(f[b"max_new_tokens"]),
        secret=f[b"secret"].decode(),
        policy=_policy(f[b"on_handoff_failure"], f[b"on_stream_failure"], f[b"max_attempts"], f[b"retain"]),
        mode=cast(Mode, f[b"mode"].decode()),
        tenant=f.get(b"tenant", b"").decode(),
        priority=cast(Priority, f[b"priority"].decode()),
        client_id=f.get(b"client_id", b"").decode(),
        source=_lease(f, b"source"),
        sink=_lease(f, b"sink"),
        fingerprint=f.get(b"fingerprint", b"").decode(),
        layout=_layout(layout) if layout else None,
        locators=_locators.decode(locators) if locators else (),
        digest=f.get(b"digest", b"").decode(),
        first_token=int(first_token) if first_token else None,
        emitted=int(f.get(b"emitted", 0)),
        streaming=f.get(b"streaming") == b"1",
        streams_lost=int(f.get(b"streams_lost", 0)),
        ended_code=f.get(b"ended_code", b"").decode(),
        ended_message=f.get(b"ended_message", b"").decode(),
        end=_end.decode(end) if end else None,
        created_ms=int(f[b"created_ms"]),
        ended_ms=int(f.get(b"ended_ms", 0)),
    )


def _lease(f: dict[bytes, bytes], side: bytes) -> Lease | None:
    worker = f.get(side + b"_worker")
    if worker is None:
        return None
    return Lease(worker.decode(), int(f[side + b"_epoch"]), int(f[side + b"_until_ms"]))


# A process sees a handful of policies and layouts, a thousand times a second.
@lru_cache(256)
def _policy(on_handoff_failure: bytes, on_stream_failure: bytes, max_attempts: bytes, retain: bytes) -> Policy:
    fields = {
        "on_handoff_failure": on_handoff_failure.decode(),
        "on_stream_failure": on_stream_failure.decode(),
        "max_attempts": int(max_attempts),
        "retain": retain.decode(),
    }
    return msgspec.convert(fields, Policy)


@lru_cache(256)
def _layout(text: bytes) -> KvLayout:
    return msgspec.json.decode(text, type=KvLayout)


@lru_cache(256)
def _layout_text(layout: KvLayout) -> bytes:
    return _encode(layout)
