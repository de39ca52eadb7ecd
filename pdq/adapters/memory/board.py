"""What operators ask for and what the autoscaler decided, in this process."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from pdq.adapters.memory.ledger import wall_clock_ms
from pdq.ports import Pool, ScalingReport


class MemoryBoard:
    """``Board`` in dictionaries; ``clock`` tells Unix milliseconds."""

    def __init__(self, *, clock: Callable[[], int] = wall_clock_ms) -> None:
        self._clock = clock
        self._fixed: defaultdict[str, dict[Pool, int]] = defaultdict(dict)
        self._away: defaultdict[str, set[str]] = defaultdict(set)
        self._leaders: dict[str, tuple[int, str]] = {}
        self._reports: dict[str, tuple[int, ScalingReport]] = {}

    async def close(self) -> None:
        for kept in (self._fixed, self._away, self._leaders, self._reports):
            kept.clear()

    async def fix(self, model: str, pool: Pool, replicas: int | None) -> None:
        if replicas is None:
            self._fixed[model].pop(pool, None)
        else:
            self._fixed[model][pool] = replicas

    async def fixed(self, model: str) -> Mapping[Pool, int]:
        return dict(self._fixed[model])

    async def send_away(self, model: str, worker: str) -> None:
        self._away[model].add(worker)

    async def call_back(self, model: str, worker: str) -> bool:
        was_away = worker in self._away[model]
        self._away[model].discard(worker)
        return was_away

    async def away(self, model: str) -> frozenset[str]:
        return frozenset(self._away[model])

    async def lead(self, model: str, who: str, ttl_ms: int) -> bool:
        now = self._clock()
        until, leader = self._leaders.get(model, (now, who))
        if leader != who and now < until:
            return False
        self._leaders[model] = (now + ttl_ms, who)
        return True

    async def resign(self, model: str, who: str) -> None:
        if model in self._leaders and self._leaders[model][1] == who:
            del self._leaders[model]

    async def report(self, model: str, report: ScalingReport, ttl_ms: int) -> None:
        self._reports[model] = (self._clock() + ttl_ms, report)

    async def last_report(self, model: str) -> ScalingReport | None:
        until, report = self._reports.get(model, (0, None))
        return report if self._clock() < until else None
