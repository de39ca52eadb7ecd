"""A ledger's refusals in words, once: every adapter finds the same code and raises the same error.

The codes are those of ``pdq.core.errors``; a Lua script returns one of them, the in-memory ledger names one.
"""

from pdq.core import errors
from pdq.core.lease import RecordKey


def refusal(code: str, key: RecordKey, doing: str, *, state: str = "", remaining_ms: int = 0) -> errors.PdqError:
    """The error for ``code``: ``doing`` (an event, or "update") was refused for ``key``, whose record is in ``state``."""
    what = f"{doing} of request {key.request_id} (model {key.model})"
    match code:
        case errors.RecordNotFound.code:
            return errors.RecordNotFound(f"{what}: there is no such record; it was never accepted, or ended long ago")
        case errors.RecordEnded.code:
            return errors.RecordEnded(f"{what}: the record already is {state}", state=state)
        case errors.IllegalTransition.code:
            return errors.IllegalTransition(f"{what}: not allowed now that the record is {state}")
        case errors.StaleEpoch.code:
            return errors.StaleEpoch(
                f"{what}: the author's lease is not current (record is {state}); stop, and free what it covers"
            )
        case errors.LeaseHeld.code:
            return errors.LeaseHeld(
                f"{what}: another holder's lease runs for {remaining_ms} ms more (record is {state})",
                remaining_ms=remaining_ms,
            )
        case errors.DeadlineExceeded.code:
            return errors.DeadlineExceeded(f"{what}: the request's deadline has passed (record is {state})")
        case errors.AttemptsExhausted.code:
            # The request ends with it, so it is its requester who reads this.
            return errors.AttemptsExhausted(
                "every attempt that the request's policy allows was made, and none succeeded"
            )
        case _:
            raise ValueError(f"unknown refusal code {code!r}")
