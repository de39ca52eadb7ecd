"""Figures and tables as people read them."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def warn(message: str) -> None:
    """A line on standard error that is no failure."""
    print(f"pdq: {message}", file=sys.stderr)


def console() -> "Console":
    """Standard output; wide when it is no terminal, so that a pipe gets one line for each row."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def seconds(ms: float) -> str:
    """A duration for people: ``0.5 ms``, ``340 ms``, ``1.2 s``, ``95 s``."""
    if ms and abs(ms) < 10:
        return f"{ms:.1f} ms"
    if abs(ms) < 1000:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if abs(ms) < 60_000 else f"{ms / 1000:.0f} s"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class Progress:
    """What a command waits for, on stderr: one line that changes on a terminal, else a line for each change."""

    def __init__(self) -> None:
        self._shown = ""
        self._live = sys.stderr.isatty()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown and self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, line: str) -> None:
        if line != self._shown:
            print(
                f"\r\033[K{line}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True
            )
        self._shown = line
