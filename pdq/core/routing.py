"""Where a request runs: prefill in its own pool, or the whole of it on one worker.

Disaggregation costs a handoff, and pays when it spares running sequences a long prefill between their steps. So short
prompts stay with a decode worker, and so does what would wait for the prefill pool longer than a decode worker needs
to compute it. Every decision has a reason that is counted: a pool that silently never disaggregates shows at once.
"""

from enum import StrEnum
from typing import Final, Literal, NamedTuple

from pdq.core.admission import Capacity
from pdq.core.settings import HandoffSettings


class Why(StrEnum):
    """What a decision is counted under."""

    CONFIGURED = "configured"
    """``handoff.mode`` leaves no choice."""
    SHORT_PROMPT = "short_prompt"
    NO_PREFILL_WORKER = "no_prefill_worker"
    PREFILL_BUSY = "prefill_busy"
    """Its wait would be longer than computing the prompt locally."""
    LONG_PROMPT = "long_prompt"
    """``auto`` found nothing that speaks against disaggregating."""


class Route(NamedTuple):
    queue: Literal["prefill", "local"]
    mode: Literal["disaggregated", "aggregated"]
    reason: Why


ROUTES: Final = (
    Route("prefill", "disaggregated", Why.CONFIGURED),
    Route("prefill", "aggregated", Why.CONFIGURED),
    Route("prefill", "disaggregated", Why.LONG_PROMPT),
    Route("local", "aggregated", Why.SHORT_PROMPT),
    Route("local", "aggregated", Why.NO_PREFILL_WORKER),
    Route("local", "aggregated", Why.PREFILL_BUSY),
)
"""All there are."""

_DISAGGREGATED, _AGGREGATED, _LONG, _SHORT, _ALONE, _BUSY = ROUTES


def route(prompt_tokens: int, wait_s: float | None, capacity: Capacity, handoff: HandoffSettings) -> Route:
    """``wait_s`` is the prefill queue's, None if it was never measured."""
    match handoff.mode:
        case "disaggregated":
            return _DISAGGREGATED
        case "aggregated":
            return _AGGREGATED
    if prompt_tokens <= handoff.auto_local_tokens:
        return _SHORT
    if not capacity.decode_workers:
        return _LONG  # whoever comes first: prefill need not wait for a decode pool that starts
    if not capacity.prefill_workers:
        return _ALONE
    speed = capacity.rates.prefill_tokens_per_s
    if wait_s is not None and speed is not None and wait_s > prompt_tokens / speed:
        return _BUSY
    return _LONG
