"""Every error pdq raises on purpose, as one tree.

    PdqError
    ├── BadInput                 the sender must change something; never retried
    │   ├── InvalidRequest         a client's request field is wrong (names the field)
    │   │   ├── UnknownModel         nobody serves this model
    │   │   └── ContextTooLong       prompt, or prompt + max_tokens, exceeds the model's context
    │   ├── InvalidMessage         bytes on a queue, subject or socket do not parse as what they must be
    │   └── InvalidSettings        an environment variable or flag cannot be understood
    ├── Refused                  nothing is wrong with the request; come back later
    │   ├── Overloaded             a limit is reached (carries retry_after_s)
    │   │   └── TenantLimit          a limit or fair share of this tenant; others are served
    │   └── Unavailable            broker or ledger unreachable, or no worker serves the model yet
    ├── TurnedAway               refused before it had a record, and its requester was told: its job is done with
    ├── LedgerRefusal            the handoff record does not allow this change; nothing was changed
    │   ├── RecordNotFound         no such record (never created, or ended long ago)
    │   ├── RecordEnded            the record is terminal
    │   ├── IllegalTransition      TRANSITIONS has no row for this state and event
    │   ├── StaleEpoch             the author's lease was lost to another holder, or has run out
    │   └── LeaseHeld              someone else's lease is still running (carries remaining_ms)
    ├── WorkerNotFound           no live worker has this name
    ├── TransferFailed           KV bytes did not arrive through this locator; the next one may work
    │   ├── PeerLost               connection refused, reset or timed out
    │   ├── HandoffUnknown         the source does not hold it (released, never offered, or wrong secret)
    │   ├── DigestMismatch         bytes arrived, but not the bytes that were offered
    │   └── BufferAtRisk           the fetch ended, but a late write may still land in its buffers: quarantine them
    ├── Incompatible             two sides can never work together; never retried
    │   ├── IncompatibleLayout
    │   └── IncompatibleContract
    ├── EngineFailed             the engine raised while computing
    ├── CapacityExhausted        no free KV blocks now
    ├── HandoffRejected          KV could not be fetched, and the request's policy forbids to recompute it
    ├── StreamLost               tokens were sent, their worker died, and the stream cannot be continued
    ├── DeadlineExceeded         the request's absolute deadline has passed
    ├── RequestCancelled         the client went away or asked to stop
    ├── AttemptsExhausted        every allowed attempt failed
    └── JobLost                  a request has a record, but no queue has a job for it

``code`` is the stable, machine-readable name that travels in terminal events, dead letters and HTTP bodies;
``retryable`` says whether the same work may succeed if it is tried again. HTTP status, queue verdict and exit code
are derived from these at the edges, nowhere else.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final


class PdqError(Exception):
    """Base of the tree. The message says what was wrong, with which value, and what to do."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False


class BadInput(PdqError):
    code = "bad_input"


class InvalidRequest(BadInput):
    """A field of a client's request is wrong. ``field`` is its path, as the client wrote it."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownModel(InvalidRequest):
    code = "model_not_found"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class InvalidMessage(BadInput):
    code = "invalid_message"


class InvalidSettings(BadInput):
    code = "invalid_settings"


class Refused(PdqError):
    """``reason`` is what admission counts it under (``pdq.core.admission.Reason``); empty if somebody else refused."""

    code = "refused"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class Overloaded(Refused):
    code = "overloaded"


class TenantLimit(Overloaded):
    code = "tenant_limit"


class Unavailable(Refused):
    code = "unavailable"


class TurnedAway(PdqError):
    code = "turned_away"


class LedgerRefusal(PdqError):
    code = "ledger_refusal"


class RecordNotFound(LedgerRefusal):
    code = "record_not_found"


class RecordEnded(LedgerRefusal):
    """The record already is in a terminal state. ``state`` is that state's name."""

    code = "record_ended"

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class IllegalTransition(LedgerRefusal):
    code = "illegal_transition"


class StaleEpoch(LedgerRefusal):
    code = "stale_epoch"


class LeaseHeld(LedgerRefusal):
    """Another holder's lease still runs; trying again after ``remaining_ms`` may succeed."""

    code = "lease_held"
    retryable = True

    def __init__(self, message: str, *, remaining_ms: int) -> None:
        super().__init__(message)
        self.remaining_ms = remaining_ms


class WorkerNotFound(PdqError):
    code = "worker_not_found"


class TransferFailed(PdqError):
    code = "transfer_failed"
    retryable = True


class PeerLost(TransferFailed):
    code = "peer_lost"


class HandoffUnknown(TransferFailed):
    code = "handoff_unknown"


class DigestMismatch(TransferFailed):
    code = "digest_mismatch"


class BufferAtRisk(TransferFailed):
    code = "buffer_at_risk"


class Incompatible(PdqError):
    code = "incompatible"


class IncompatibleLayout(Incompatible):
    code = "incompatible_layout"


class IncompatibleContract(Incompatible):
    code = "incompatible_contract"


class EngineFailed(PdqError):
    code = "engine_failed"
    retryable = True


class CapacityExhausted(PdqError):
    code = "capacity_exhausted"
    retryable = True


class HandoffRejected(PdqError):
    code = "handoff_rejected"


class StreamLost(PdqError):
    code = "stream_lost"


class DeadlineExceeded(PdqError):
    code = "deadline_exceeded"


class RequestCancelled(PdqError):
    code = "cancelled"


class AttemptsExhausted(PdqError):
    code = "attempts_exhausted"


class JobLost(PdqError):
    code = "job_lost"
    retryable = True


def _tree(kind: type[PdqError]) -> Iterator[type[PdqError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


BY_CODE: Final[Mapping[str, type[PdqError]]] = {kind.code: kind for kind in _tree(PdqError)}
"""What a record or a message keeps of an error is its code: the class says the rest. Not what other modules derive."""


def may_retry(code: str) -> bool:
    """``retryable`` of an error of which only the code is left; a code that this release does not know is not."""
    return BY_CODE.get(code, PdqError).retryable
