"""Who says how large the pools shall be: the load, or a plan. An operator's fixed sizes stand in both."""

from collections.abc import Callable, Mapping
from typing import Protocol

from pdq.core.pacing import Cause
from pdq.core.scaling import Decision, Memory, Observation, PoolDecision, PoolSeen, decide
from pdq.core.settings import ScalingSettings
from pdq.ports import Pool


class Policy(Protocol):
    @property
    def automatic(self) -> bool:
        """Does it follow the load?"""

    def decide(self, seen: Observation, now_s: float) -> Decision: ...


class FollowLoad:
    """``pdq.core.scaling``, with its memory."""

    automatic = True

    def __init__(self, limits: ScalingSettings) -> None:
        self._limits = limits
        self._memory = Memory()

    def decide(self, seen: Observation, now_s: float) -> Decision:
        decision = decide(seen, self._limits, self._memory, now_s)
        self._memory = decision.memory
        return decision


class FollowPlan:
    """The sizes with which a system was started, as far as no operator has fixed others."""

    automatic = False

    def __init__(self, plan: Callable[[], Mapping[Pool, int]]) -> None:
        self._plan = plan

    def decide(self, seen: Observation, now_s: float) -> Decision:
        plan = self._plan()
        return Decision(_planned(seen.prefill, plan[Pool.PREFILL]), _planned(seen.decode, plan[Pool.DECODE]), Memory())


def _planned(pool: PoolSeen | None, planned: int) -> PoolDecision:
    if pool is None:
        return PoolDecision(None, Cause.NO_METRICS, "this pool could not be read: holding", {})
    inputs = {"replicas": pool.replicas, "ready": pool.ready}
    if pool.manual is not None:
        return PoolDecision(pool.manual, Cause.MANUAL, f"an operator has fixed {pool.manual}", inputs)
    return PoolDecision(planned, Cause.STEADY, f"{planned} are planned, and nobody has fixed another size", inputs)
