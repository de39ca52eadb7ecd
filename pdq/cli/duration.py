"""Durations on the command line: ``60s``, ``2m``, ``500ms``, or plain seconds."""

import re
from typing import Annotated, Final

import typer

_UNITS: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S: Final = 7 * 24 * 3600.0


def parse(text: str | float) -> float:
    """Seconds.

    Raises:
        typer.BadParameter: that is no duration, or one of more than a week.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?) ?(ms|s|m|h)?", str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration: write 60s, 2m, 500ms, 1h, or seconds")
    seconds = float(found[1]) * _UNITS[found[2] or ""]
    if seconds > _LONGEST_S:
        raise typer.BadParameter(f"{text!r} is more than a week")
    return seconds


Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        parser=parse,
        metavar="DURATION",
        help="Then it stops, and releases or hands back what is left: `60s`, `2m`, `500ms`. Default: "
        "PDQ_DRAIN_DEADLINE_S.",
    ),
]
