"""The exit statuses of all pdq programs and commands: what scripts and supervisors go by."""

from typing import Final

from pdq.core import errors

OTHER: Final = 1
BAD_INPUT: Final = 2
UNAVAILABLE: Final = 3
NOT_FOUND: Final = 4


def exit_status(error: errors.PdqError) -> int:
    """The status of a program that ``error`` has ended."""
    match error:
        case errors.BadInput() | errors.Incompatible():
            return BAD_INPUT
        case errors.Refused():
            return UNAVAILABLE
        case errors.RecordNotFound() | errors.WorkerNotFound():
            return NOT_FOUND
        case _:
            return OTHER
