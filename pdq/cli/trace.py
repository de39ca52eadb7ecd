"""``pdq trace``: the life of one request, told from its record and the ledger's log of it.

``account`` is a pure fold over the log: one ``Attempt`` for every ``begin``, within it one ``Decoding`` for every worker
that claimed or adopted the KV. What stages measured comes from the notes of the log entries, what passed between two
entries from their times. A log may have lost its oldest entries; then the account begins where the log does.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import typer
from msgspec import Struct
from msgspec.structs import replace

from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, StateDir, System, talk
from pdq.cli.human import seconds, size
from pdq.core.errors import RecordNotFound
from pdq.core.handoff import Event, State
from pdq.core.settings import Settings
from pdq.ports import LogEntry, Record

ENQUEUE: Final = "enqueue"
"""The first entry of a log: the record was created."""
LOST: Final = "lost"
"""How an attempt or a decoding ended when the next one began without a word from it."""


class Decoding(Struct, frozen=True):
    """One decode worker's part."""

    worker: str
    epoch: int
    waited_ms: int | None = None
    """From the KV being ready to this worker's claim; None if it claimed earlier (overlap) or adopted."""
    transport: str = ""
    """Which transport delivered the KV; empty if nothing was transferred."""
    bytes: int = 0
    transfer_ms: float | None = None
    tried: tuple[tuple[str, str], ...] = ()
    """Transports that failed before, each with its error."""
    tokens: int = 0
    decode_ms: float | None = None
    outcome: str = ""
    """The event that ended it; empty while it goes on."""
    reason: str = ""


class Attempt(Struct, frozen=True):
    """One prefill, and what was done with its KV."""

    number: int = 0
    worker: str = ""
    epoch: int = 0
    queued_ms: int = 0
    """In the queue before this attempt."""
    prefill_ms: float | None = None
    prompt_tokens: int = 0
    decodings: tuple[Decoding, ...] = ()
    outcome: str = ""
    """The event that ended it; empty while it goes on."""
    reason: str = ""


class Account(Struct, frozen=True):
    """One request, from acceptance to its end or until now."""

    request_id: str
    model: str
    state: State
    mode: str
    prompt_tokens: int
    tokens: int
    """Sent to the client."""
    queued_ms: int | None
    """From acceptance to the first prefill; None if there was none."""
    first_token_ms: float | None
    """From acceptance to the first token."""
    total_ms: int | None
    """From acceptance to the end; None for a live request."""
    tokens_per_s: float | None
    """Of the decoding that finished the request."""
    ended_code: str
    ended_message: str
    attempts: tuple[Attempt, ...]


def account(record: Record, history: Sequence[LogEntry]) -> Account:
    """Tell what happened from the record and its log."""
    telling = _Telling(queued_at=record.created_ms)
    for entry in history:
        telling.add(entry)
    last = next((d for attempt in reversed(telling.attempts) for d in reversed(attempt.decodings)), None)
    began_at = telling.began_at
    return Account(
        request_id=record.key.request_id,
        model=record.key.model,
        state=record.state,
        mode=record.mode,
        prompt_tokens=record.prompt_tokens,
        tokens=max(record.emitted, telling.tokens),
        queued_ms=None if began_at is None else began_at - record.created_ms,
        first_token_ms=telling.first_token_ms,
        total_ms=record.ended_ms - record.created_ms if record.state.terminal else None,
        tokens_per_s=1000 * last.tokens / last.decode_ms if last and last.decode_ms and last.tokens else None,
        ended_code=record.ended_code,
        ended_message=record.ended_message,
        # The log may have lost its beginning, but its last attempt is the record's.
        attempts=tuple(
            replace(attempt, number=record.attempt - before)
            for before, attempt in zip(reversed(range(len(telling.attempts))), telling.attempts, strict=True)
        ),
    )


class _Telling:
    """The state of the fold."""

    def __init__(self, queued_at: int) -> None:
        self.attempts: list[Attempt] = []
        self.began_at: int | None = None
        self.first_token_ms: float | None = None
        self.tokens = 0
        self._queued_at = queued_at
        self._ready_at: int | None = None

    def add(self, entry: LogEntry) -> None:
        note = entry.note
        if self.first_token_ms is None:
            self.first_token_ms = note.get("first_token_ms")
        match entry.event:
            case Event.BEGIN:
                self._begin(entry)
            case Event.CLAIM | Event.ADOPT:
                waited = entry.at_ms - self._ready_at if self._ready_at is not None else None
                self._end_decoding(LOST)
                decoding = Decoding(entry.worker, entry.epoch, waited_ms=waited)
                self._attempt(decodings=(*self._current.decodings, decoding), **_known(Attempt, note))
            case Event.READY:
                self._ready_at = entry.at_ms
                self._attempt(**_known(Attempt, note))
            case Event.FETCHED:
                self._decoding(**_known(Decoding, note))
            case Event.YIELD:
                self._end_decoding(entry.event, **_known(Decoding, note))
                self._ready_at = entry.at_ms
            case Event.REQUEUE | Event.FINISH | Event.FAIL | Event.CANCEL | Event.EXPIRE:
                self.tokens = max(self.tokens, note.get("tokens", 0))
                reason = note.get("reason") or note.get("code") or ""
                if self.attempts:
                    self._end_decoding(entry.event, **_known(Decoding, note))
                    known = {} if self._current.decodings else _known(Attempt, note)
                    self._attempt(**{**known, "outcome": entry.event, "reason": reason})
                self._queued_at = entry.at_ms

    def _begin(self, entry: LogEntry) -> None:
        if self.attempts and not self._current.outcome:
            self._end_decoding(LOST)
            self._attempt(outcome=LOST)
        if self.began_at is None:
            self.began_at = entry.at_ms
        queued = max(entry.at_ms - self._queued_at, 0)
        self.attempts.append(Attempt(worker=entry.worker, epoch=entry.epoch, queued_ms=queued))
        self._ready_at = None

    @property
    def _current(self) -> Attempt:
        if not self.attempts:
            self.attempts.append(Attempt())
        return self.attempts[-1]

    def _attempt(self, **changes: Any) -> None:
        self.attempts[-1:] = [replace(self._current, **changes)]

    def _decoding(self, **changes: Any) -> None:
        if decodings := self._current.decodings:
            self._attempt(decodings=(*decodings[:-1], replace(decodings[-1], **changes)))

    def _end_decoding(self, outcome: str, **changes: Any) -> None:
        """End the current decoding, if there is one that goes on."""
        if self._current.decodings and not self._current.decodings[-1].outcome:
            self._decoding(outcome=outcome, **changes)


def _known(kind: type[Struct], note: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of a note that are fields of ``kind``."""
    known = {name: note[name] for name in kind.__struct_fields__ if name in note}
    if "tried" in known:
        known["tried"] = tuple((str(transport), str(error)) for transport, error in known["tried"])
    return known


# --- The command ------------------------------------------------------------------------------------------------------


async def find(system: System, request_id: str) -> Account:
    """
    Raises:
        RecordNotFound: no such request, or it ended too long ago.
    """
    record = await system.ledger.find(request_id)
    if record is None:
        raise RecordNotFound(
            f"no request {request_id!r}: it never was, or it ended longer ago than PDQ_LEASE_ENDED_TTL_S keeps records"
        )
    return account(record, await system.ledger.history(record.key))


def trace(
    request_id: Annotated[str, typer.Argument(help="As in the response's x-request-id header or in a token entry.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Tell what happened to one request: waiting, prefill, handoff, decode, every attempt, who did what."""

    async def work(system: System, settings: Settings) -> Account:
        return await find(system, request_id)

    found = talk(state_dir, work)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    for line in lines(found):
        typer.echo(line)


def lines(told: Account) -> Iterator[str]:
    """The account as text."""
    yield f"request {told.request_id} of {told.model} ({told.mode})"
    ended = f" ({told.ended_code}{': ' if told.ended_message else ''}{told.ended_message})" if told.ended_code else ""
    total = "" if told.total_ms is None else f" after {seconds(told.total_ms)}"
    yield f"  {told.state}{ended}{total}: {told.prompt_tokens} prompt tokens, {told.tokens} tokens out"
    if told.first_token_ms is not None:
        yield f"  first token after {seconds(told.first_token_ms)}"
    if told.tokens_per_s is not None:
        yield f"  {told.tokens_per_s:.1f} tokens/s"
    for attempt in told.attempts:
        yield f"attempt {attempt.number}"
        yield f"  queue    {seconds(attempt.queued_ms)}"
        took = "" if attempt.prefill_ms is None else f", {seconds(attempt.prefill_ms)}"
        count = f", {attempt.prompt_tokens} tokens" if attempt.prompt_tokens else ""
        yield f"  prefill  {attempt.worker or 'unknown worker'}{count}{took}"
        for decoding in attempt.decodings:
            yield from _decoding_lines(decoding)
        if attempt.outcome not in ("", Event.FINISH):
            yield f"  ended    {attempt.outcome}{f': {attempt.reason}' if attempt.reason else ''}"


def _decoding_lines(decoding: Decoding) -> Iterator[str]:
    waited = "" if decoding.waited_ms is None else f", waited {seconds(decoding.waited_ms)} for a decode worker"
    for transport, error in decoding.tried:
        yield f"  handoff  {transport} failed: {error}"
    if decoding.transport:
        took = "" if decoding.transfer_ms is None else f" in {seconds(decoding.transfer_ms)}"
        yield f"  handoff  {size(decoding.bytes)} over {decoding.transport}{took}{waited}"
    count = f", {decoding.tokens} tokens" if decoding.tokens else ""
    took = "" if decoding.decode_ms is None else f", {seconds(decoding.decode_ms)}"
    yield f"  decode   {decoding.worker}{count}{took}"
    if decoding.outcome not in ("", Event.FINISH):
        yield f"  ended    {decoding.outcome}{f': {decoding.reason}' if decoding.reason else ''}"
