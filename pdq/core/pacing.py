"""How fast a pool follows what it needs: windows, steps, cooldowns, bounds, and workers that never become ready.

``pdq.core.scaling`` says how many workers the load calls for; this module lets a pool get there without swinging.
Growth starts only past the *activation* thresholds and goes to what the *targets* need. A pool shrinks only to what
every observation of a whole window would have found enough by the targets: if N - 1 workers would not have met them all
that time, N stay. Between the two a load may vary without anything moving.
"""

import math
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from pdq.core.settings import ScalingSettings


class Cause(StrEnum):
    """Why a pool has the size that was decided, as a metric label."""

    STEADY = "steady"
    OUT = "out"
    IN = "in"
    FROM_ZERO = "from_zero"
    TO_ZERO = "to_zero"
    WINDOW = "window"
    """A change is called for, but not for long enough."""
    COOLDOWN = "cooldown"
    """A change is called for, but the last one was just now."""
    LIMIT = "limit"
    """More is called for than the pool may have."""
    HANDOFFS = "handoffs"
    """Prefill would grow, but decode is what holds requests up."""
    MANUAL = "manual"
    NO_METRICS = "no_metrics"


class Need(NamedTuple):
    """What the load calls for, in workers."""

    activation: int
    """With fewer than these an activation threshold is passed: grow."""
    target: int
    """So many meet the targets: grow to it."""
    keep: int
    """Shrink to no fewer than these."""


class PoolMemory(Struct, frozen=True):
    """What one pool's next decision has to know of the earlier ones."""

    decided: int | None = None
    changed_s: float | None = None
    """When the size was last changed."""
    growing_since_s: float | None = None
    """Since when every observation has called for growth."""
    kept: tuple[tuple[float, int], ...] = ()
    """(when, how many were to be kept), over the window for scaling in."""
    seen: tuple[tuple[float, int, int], ...] = ()
    """(when, replicas, ready), over the time in which a worker must become ready."""


class Bounds(NamedTuple):
    floor: int
    most: int


class Step(NamedTuple):
    replicas: int
    cause: Cause
    why: str
    memory: PoolMemory


def note(memory: PoolMemory, replicas: int, ready: int, limits: ScalingSettings, now_s: float) -> PoolMemory:
    """Remember one observation of the pool."""
    recent = [it for it in memory.seen if it[0] >= now_s - limits.ready_within_s - limits.period_s]
    return replace(memory, seen=(*recent, (now_s, replicas, ready)))


def overdue(memory: PoolMemory, limits: ScalingSettings, now_s: float) -> int:
    """Workers that were asked for long ago and have not been ready ever since. One that was ready has not failed to
    start: it is being replaced."""
    if not memory.seen or memory.seen[0][0] > now_s - limits.ready_within_s:
        return 0
    asked = min(replicas for _, replicas, _ in memory.seen)
    return max(0, asked - max(ready for _, _, ready in memory.seen))


def pace(need: Need, replicas: int, bounds: Bounds, memory: PoolMemory, limits: ScalingSettings, now_s: float) -> Step:
    """The next size of a pool of ``replicas`` workers, and why it is not yet what the load calls for."""
    late = overdue(memory, limits, now_s)
    # Nobody waits for a worker that does not come: others stand in for it, but no more of them than are needed, so that
    # a pool in which nothing ever starts does not grow without end.
    activation, target, keep = (it + min(late, it) for it in need)
    failed = f"; {late} did not become ready in {limits.ready_within_s:.0f} s and are not counted on" if late else ""

    kept = [*(it for it in memory.kept if it[0] >= now_s - limits.in_window_s), (now_s, keep)]
    growing_since = (
        (memory.growing_since_s if memory.growing_since_s is not None else now_s) if activation > replicas else None
    )
    memory = replace(memory, kept=tuple(kept), growing_since_s=growing_since)

    def stay(cause: Cause, why: str) -> Step:
        return Step(replicas, cause, why + failed, replace(memory, decided=replicas))

    def change(size: int, cause: Cause, why: str) -> Step:
        changed = replace(memory, decided=size, changed_s=now_s, growing_since_s=None)
        return Step(size, cause, why + failed, changed)

    if replicas == 0 and bounds.floor > 0:
        size = min(max(bounds.floor, min(target, math.ceil(limits.step_factor))), bounds.most)
        return change(size, Cause.FROM_ZERO, f"there is no worker, {max(1, target)} are called for")
    if not bounds.floor <= replicas <= bounds.most:
        size = min(max(replicas, bounds.floor), bounds.most)
        return change(size, Cause.LIMIT, f"{replicas} are outside {bounds.floor} to {bounds.most}")

    since = math.inf if memory.changed_s is None else now_s - memory.changed_s
    if growing_since is not None:
        if replicas >= bounds.most:
            return stay(Cause.LIMIT, f"{target} are called for, {bounds.most} are allowed")
        if now_s - growing_since < limits.out_window_s:
            return stay(Cause.WINDOW, f"{target} are called for, since {now_s - growing_since:.0f} s")
        if since < limits.out_cooldown_s:
            return stay(Cause.COOLDOWN, f"{target} are called for, the last change was {since:.0f} s ago")
        step = max(replicas + 1, math.floor(replicas * limits.step_factor))
        return change(min(max(target, activation), step, bounds.most), Cause.OUT, f"{target} are called for")

    lowest = max(bounds.floor, max(count for _, count in kept))
    if lowest >= replicas:
        return stay(Cause.STEADY, f"{replicas} are enough, {replicas - 1} were not at all times")
    if kept[0][0] > now_s - limits.in_window_s + limits.period_s:
        return stay(Cause.WINDOW, f"{lowest} would do, since {now_s - kept[0][0]:.0f} s")
    if since < limits.in_cooldown_s:
        return stay(Cause.COOLDOWN, f"{lowest} would do, the last change was {since:.0f} s ago")
    size = max(lowest, math.ceil(replicas / limits.step_factor))
    return change(size, Cause.IN, f"{lowest} would have met the targets for {limits.in_window_s:.0f} s")
