"""What becomes of a delivered job, decided in one place from the error that ended its handling."""

from typing import Final, NamedTuple

from pdq.core import errors


class Ack(NamedTuple):
    """The job is finished with, or someone else's business now."""


class Leave(NamedTuple):
    """Say nothing. If another worker has the job in hands, its word counts; if nobody has, it is delivered again after
    ``ack_wait``."""


class Retry(NamedTuple):
    """Deliver again after ``delay_s``."""

    delay_s: float


class Reject(NamedTuple):
    """Never again: dead-letter it with this reason, and end the request as failed."""

    code: str
    detail: str


MAX_RETRIES_OF_HELD: Final = 20
"""Past this many deliveries, far below ``max_deliver``, a job that another worker holds is not asked for any more."""

Verdict = Ack | Leave | Retry | Reject


def verdict(error: BaseException | None, deliveries: int) -> Verdict:
    """The fate of a job whose handling ended with ``error`` on its ``deliveries``-th delivery (1 is the first).

    How often a *request* may be attempted is the ledger's business (``max_attempts``); a redelivery by itself proves
    nothing. So errors that a retry can help are retried with a growing delay, and never counted here.
    """
    match error:
        case None:
            return Ack()
        case errors.RecordEnded() | errors.RequestCancelled() | errors.IllegalTransition():
            # The request has ended, or it is past this stage: nothing is left to do.
            return Ack()
        case errors.TurnedAway():
            # A refusal is an answer, not a fault: nothing for the dead letters, and it is the requester's to come back.
            return Ack()
        case errors.StaleEpoch():
            # Another worker may have it. Or nobody: the lease ran out while this process, or the ledger, stood still.
            return Leave()
        case errors.LeaseHeld() if deliveries > MAX_RETRIES_OF_HELD:
            # Its holder lives long, and the broker counts every delivery.
            return Leave()
        case errors.LeaseHeld():
            return Retry(delay_s=max(error.remaining_ms, 50) / 1000)
        case errors.PdqError() if not error.retryable:
            return Reject(code=error.code, detail=str(error))
        case errors.PdqError():
            return Retry(delay_s=backoff_s(deliveries))
        case _:
            return Reject(code=errors.PdqError.code, detail=f"{type(error).__name__}: {error}")


def backoff_s(deliveries: int) -> float:
    """0.1 s, doubled per delivery, at most 5 s."""
    return float(min(0.1 * 2 ** min(max(deliveries - 1, 0), 10), 5.0))
