"""Readings of a ledger's counters, made by hand."""

from collections.abc import Mapping

from pdq.core.handoff import State
from pdq.core.load import Count, Load
from pdq.core.messages import Priority


def load(
    queued: Mapping[Priority, Mapping[str, Count]] | None = None,
    tenants: Mapping[str, Count] | None = None,
    **states: Count,
) -> Load:
    """A reading in which ``queued`` is what waits, and ``states`` is what else there is."""
    waiting = [count for each in (queued or {}).values() for count in each.values()]
    counts = {State(name): count for name, count in states.items()}
    counts[State.QUEUED] = Count(
        sum(count.requests for count in waiting),
        sum(count.prompt_tokens for count in waiting),
        sum(count.reserved_tokens for count in waiting),
    )
    return Load(
        requests={state: count.requests for state, count in counts.items()},
        prompt_tokens={state: count.prompt_tokens for state, count in counts.items()},
        reserved_tokens={state: count.reserved_tokens for state, count in counts.items()},
        queued=queued or {},
        tenants=tenants or {},
    )
