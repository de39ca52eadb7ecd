"""Public traces as lists of requests.

Two formats, told apart by the first line: the CSV of Azure's LLM inference traces (``TIMESTAMP,ContextTokens,
GeneratedTokens``) and the JSON lines of Mooncake's (``timestamp`` in ms, ``input_length``, ``output_length``).
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from pdq.core.errors import InvalidRequest

COPY_SPREAD_S: Final = 60.0
MIN_RESERVED_OUTPUT: Final = 64


class Arrival(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def max_new_tokens(self) -> int:
        """What the client asked for. Traces do not say: the next power of two, at least 64, stands for a guess that is
        never too low and on average half again as much as is used."""
        return max(MIN_RESERVED_OUTPUT, 1 << (self.output_tokens - 1).bit_length())


class _MooncakeLine(Struct):
    timestamp: float
    input_length: int
    output_length: int


def read(path: Path) -> list[Arrival]:
    """The trace in ``path``, by time, which starts at 0.

    Raises:
        InvalidRequest: neither format, or a line that does not parse.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read trace {path}: {error}", field="trace") from error
    try:
        arrivals = list(_mooncake(lines) if lines and lines[0].startswith("{") else _azure(lines))
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"trace {path} is neither Azure's CSV nor Mooncake's JSON lines: {error}", field="trace"
        ) from error
    if not arrivals:
        raise InvalidRequest(f"trace {path} has no requests", field="trace")
    arrivals.sort()
    start_s = arrivals[0].at_s
    return [it._replace(at_s=it.at_s - start_s) for it in arrivals]


def _azure(lines: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield Arrival(at.timestamp(), int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for line in lines:
        it = decoder.decode(line)
        yield Arrival(it.timestamp / 1_000, it.input_length, max(1, it.output_length))


def copies(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """The same trace ``count`` times over itself, each copy a little later: more load, the same shape over time."""
    offsets = [COPY_SPREAD_S * copy / count for copy in range(count)]
    return sorted(it._replace(at_s=it.at_s + offset) for it in arrivals for offset in offsets)


def swing(arrivals: Sequence[Arrival], lowest: float) -> list[Arrival]:
    """The trace thinned out so that its load goes from the share ``lowest`` up to all of it and back, in one wave."""
    span_s, credit, kept = max(arrivals[-1].at_s, 1.0), 0.0, []
    for it in arrivals:
        credit += lowest + (1 - lowest) * (1 - math.cos(2 * math.pi * it.at_s / span_s)) / 2
        if credit >= 1:
            credit -= 1
            kept.append(it)
    return kept
