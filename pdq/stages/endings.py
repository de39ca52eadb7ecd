"""Terminal events: whoever wins the transition to a terminal state emits it, and nobody else does."""

import logging
from collections.abc import Mapping
from typing import Any, Final, Literal

from pdq import failpoints
from pdq.core import names
from pdq.core.errors import (
    BadInput,
    DeadlineExceeded,
    IllegalTransition,
    PdqError,
    RecordEnded,
    RecordNotFound,
    RequestCancelled,
    StaleEpoch,
    StreamLost,
    may_retry,
)
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import Cancel, End, Failure, Resend, TokenEntry, Usage
from pdq.ports import Changes, HandoffLedger, Record, TokenBus
from pdq.stages.outbox import Outbox

log = logging.getLogger(__name__)

_WIRE: Final[Mapping[State, Literal["failed", "cancelled", "expired"]]] = {
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
}
_LATE: Final[Mapping[State, str]] = {
    State.QUEUED: "while it waited for its turn",
    State.PREFILLING: "while its prompt was being computed",
    State.READY: "when its prompt was computed, before its answer could go on",
    State.FETCHED: "while its answer was being generated",
}
"""Where a request was when its deadline passed, in words for its requester, who knows nothing of a record's states."""


def ending(error: PdqError) -> Event:
    """The terminal event that an error which nobody can repair leads to."""
    match error:
        case DeadlineExceeded():
            return Event.EXPIRE
        case RequestCancelled():
            return Event.CANCEL
        case _:
            return Event.FAIL


class Endings:
    def __init__(self, ledger: HandoffLedger, bus: TokenBus, outbox: Outbox, worker: str) -> None:
        self._ledger = ledger
        self._bus = bus
        self._outbox = outbox
        self._worker = worker

    async def unhappy(
        self,
        key: RecordKey,
        error: PdqError,
        *,
        epoch: int | None = None,
        emitted: int = 0,
        note: Mapping[str, Any] | None = None,
    ) -> bool:
        """End the request because of ``error``; False if it had already ended (or is not ours to end any more)."""
        if failpoints.armed:
            await failpoints.hit("ending.before", key.request_id)
        event = ending(error)
        if event is Event.EXPIRE:
            error = await self._late(key) or error
        changes = Changes(ended_code=error.code, ended_message=str(error), emitted=emitted or None)
        detail = {"code": error.code, **(note or {})}
        try:
            record = await self._ledger.apply(
                key, event, epoch=epoch, worker=self._worker, changes=changes, note=detail
            )
        except (RecordEnded, RecordNotFound, StaleEpoch, IllegalTransition):
            return False
        log.log(_level(error), "request %s ends %s: %s", key.request_id, record.state, error)
        if failpoints.armed and await failpoints.hit("ending.after", key.request_id):
            return True
        await self.tell_holders(key)
        await self._outbox.send(record.reply_to, (_last(record, record.emitted),))
        return True

    async def _late(self, key: RecordKey) -> DeadlineExceeded | None:
        """Whoever notices that a deadline has passed need not know where the request is."""
        record = await self._ledger.read(key)
        if record is None or record.state.terminal:
            return None
        return DeadlineExceeded(
            f"the request's deadline passed {_LATE[record.state]}: give it more time, or ask for fewer tokens"
        )

    async def repeat(self, key: RecordKey) -> None:
        """The request has ended, and there still was a job for it: whoever ended it may have died before it said so. Who
        has cancelled it knows."""
        record = await self._ledger.read(key)
        if record is not None and record.state.terminal and record.state is not State.CANCELLED:
            await self.again(record, record.emitted)

    async def again(self, record: Record, delivered: int) -> None:
        """Send the end of a terminal record to a requester that has ``delivered`` tokens."""
        if record.state is State.DONE:
            delivered = min(delivered, record.emitted)  # nobody has more
        await self._outbox.repeat(record.reply_to, _last(record, delivered))

    async def resend(self, model: str, wanted: Resend) -> None:
        """What this worker has sent from there on. If it knows nothing of that any more, and was the one that ended the
        request: the end, as the record has it."""
        if await self._outbox.resend(wanted):
            return
        key = RecordKey(model, wanted.request_id)
        record = await self._ledger.read(key)
        if record is not None and record.state.terminal and await ended_by(self._ledger, key) == self._worker:
            await self.again(record, wanted.seq)

    async def tell_holders(self, key: RecordKey) -> None:
        await self._bus.control(names.CANCEL_SUBJECT, Cancel((key.request_id,)))


def _level(error: PdqError) -> int:
    """What a requester asked for, or did wrong, is no trouble of the operator's."""
    return logging.INFO if isinstance(error, BadInput | DeadlineExceeded | RequestCancelled) else logging.WARNING


def _last(record: Record, delivered: int) -> TokenEntry:
    end = recorded_end(record, delivered)
    return TokenEntry(request_id=record.key.request_id, seq=delivered, end=end, client_id=record.client_id)


async def ended_by(ledger: HandoffLedger, key: RecordKey) -> str:
    """Who caused a record's last event; nobody if its log is gone."""
    history = await ledger.history(key)
    return history[-1].worker if history else ""


def recorded_end(record: Record, delivered: int) -> End:
    """The end of a terminal record, for a requester that has got ``delivered`` tokens and not the end."""
    usage = Usage(record.prompt_tokens, delivered)
    if record.state is not State.DONE:
        state = _WIRE[record.state]
        code, message = record.ended_code or state, record.ended_message or f"the request has ended: {state}"
        return End(state=state, usage=usage, error=Failure(code, message, may_retry(code)))
    if delivered < record.emitted:
        missing = record.emitted - delivered
        text = f"the request is done, but {missing} of its {record.emitted} tokens are lost"
        return End(state="failed", usage=usage, error=Failure(StreamLost.code, text))
    reason: Literal["stop", "length"] = "stop" if record.ended_code == "stop" else "length"
    return record.end or End(state="done", finish_reason=reason, usage=usage)
