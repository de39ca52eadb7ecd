"""A model's counters as a Redis hash: one field per counter, ``requests prompt_tokens reserved_tokens``.

The fields are the states after ``queued`` (``prefilling``), what is queued by class and tenant
(``queued:interactive:acme``), what every tenant has (``tenant:acme``), what one worker shall do whole and has not
prefilled (``whole:interactive`` and ``whole:batch`` of what is queued, ``whole:prefilling``), and what has ended
(``ended``). A counter that has come to zero is not there. ``record.lua`` moves them.
"""

from collections.abc import Iterator, Sequence
from typing import Final, cast

from pdq.core.handoff import LIVE, State
from pdq.core.load import Count, Load, reading, total
from pdq.core.messages import Priority

_NOTHING: Final = Count()
_JUNK: Final = Count(-1, -1, -1)
"""What holds no numbers: impossible, so that a comparison shows it."""


def load(flat: Sequence[bytes]) -> Load:
    states: dict[State, Count] = dict.fromkeys(sorted(LIVE), _NOTHING)
    queued: dict[Priority, dict[str, Count]] = {}
    tenants: dict[str, Count] = {}
    whole: dict[str, Count] = {}
    ended = _NOTHING
    for name, count in _counters(flat):
        if count is _JUNK:
            continue
        kind, _, whose = name.partition(":")
        if kind == "queued":
            priority, _, tenant = whose.partition(":")
            queued.setdefault(cast(Priority, priority), {})[tenant] = count
        elif kind == "tenant":
            tenants[whose] = count
        elif kind == "whole":
            whole[whose] = count
        elif kind == "ended":
            ended = count
        elif kind in states:
            states[State(kind)] = count
    states[State.QUEUED] = total(count for of_class in queued.values() for count in of_class.values())
    return reading(states, ended, queued=queued, tenants=tenants, whole=whole)


def figures(flat: Sequence[bytes]) -> dict[str, int]:
    """Every number by its name (``ready:requests``), zeros left out."""
    named = {
        f"{name}:{what}": getattr(count, what) for name, count in _counters(flat) for what in Count.__struct_fields__
    }
    return {name: number for name, number in named.items() if number}


def _counters(flat: Sequence[bytes]) -> Iterator[tuple[str, Count]]:
    for name, numbers in zip(flat[::2], flat[1::2], strict=True):
        try:
            requests, prompt, reserved = map(int, numbers.split())
        except ValueError:
            yield name.decode(), _JUNK
        else:
            yield name.decode(), Count(requests, prompt, reserved)
