"""The policies that are compared: pdq's own, pools of a fixed size, and two controllers that do not know each other."""

import math
from collections import Counter

from pdq.core.handoff import State
from pdq.core.pacing import Cause
from pdq.core.scaling import Memory, Observation, decide
from pdq.core.settings import ScalingSettings


class Coupled:
    """``pdq.core.scaling``, as it runs live."""

    def __init__(self, limits: ScalingSettings) -> None:
        self._limits = limits
        self._memory = Memory()
        self.causes: Counter[tuple[str, Cause]] = Counter()

    def sizes(self, seen: Observation, now_s: float) -> tuple[int, int]:
        decision = decide(seen, self._limits, self._memory, now_s)
        self._memory = decision.memory
        self.causes["prefill", decision.prefill.cause] += 1
        self.causes["decode", decision.decode.cause] += 1
        prefill, decode = decision.prefill.replicas, decision.decode.replicas
        assert prefill is not None
        assert decode is not None
        return prefill, decode


class Fixed:
    def __init__(self, prefill: int, decode: int) -> None:
        self._sizes = prefill, decode

    def sizes(self, seen: Observation, now_s: float) -> tuple[int, int]:
        return self._sizes


class Independent:
    """One controller per queue, each in the manner of a Kubernetes autoscaler on queue length: so many jobs (waiting or
    in hand) per worker, a tolerance of a tenth, a window in which the highest wish counts, at most a factor per step.
    Window, factor and bounds are those of pdq's policy, so that only the signal and the coupling differ."""

    TOLERANCE = 0.1

    def __init__(self, limits: ScalingSettings, prefill_jobs: float, decode_jobs: float) -> None:
        self._prefill = _QueueLength(limits, prefill_jobs, max(1, limits.prefill_min), limits.prefill_max)
        self._decode = _QueueLength(limits, decode_jobs, max(1, limits.decode_min), limits.decode_max)

    def sizes(self, seen: Observation, now_s: float) -> tuple[int, int]:
        assert seen.load is not None
        assert seen.prefill is not None
        assert seen.decode is not None
        jobs = seen.load.requests
        return (
            self._prefill.size(jobs[State.QUEUED] + jobs[State.PREFILLING], seen.prefill.replicas, now_s),
            self._decode.size(jobs[State.READY] + jobs[State.FETCHED], seen.decode.replicas, now_s),
        )


class _QueueLength:
    def __init__(self, limits: ScalingSettings, jobs_per_worker: float, least: int, most: int) -> None:
        self._limits = limits
        self._jobs_per_worker = jobs_per_worker
        self._least = least
        self._most = most
        self._wishes: list[tuple[float, int]] = []

    def size(self, jobs: int, replicas: int, now_s: float) -> int:
        ratio = jobs / (self._jobs_per_worker * replicas)
        steady = abs(ratio - 1) <= Independent.TOLERANCE
        wish = replicas if steady else math.ceil(jobs / self._jobs_per_worker)
        self._wishes = [it for it in self._wishes if it[0] >= now_s - self._limits.in_window_s]
        self._wishes.append((now_s, wish))
        if wish < replicas:
            wish = min(replicas, max(it for _, it in self._wishes))
        factor = self._limits.step_factor
        wish = min(max(wish, math.ceil(replicas / factor)), math.floor(replicas * factor))
        return min(max(wish, self._least), self._most)
