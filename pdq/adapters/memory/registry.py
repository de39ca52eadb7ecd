"""Who is alive, in this process."""

from collections.abc import Callable, Sequence

from pdq.adapters.memory.ledger import wall_clock_ms
from pdq.ports import WorkerInfo


class MemoryRegistry:
    """``WorkerRegistry`` in a dictionary; ``clock`` tells Unix milliseconds."""

    def __init__(self, *, clock: Callable[[], int] = wall_clock_ms) -> None:
        self._clock = clock
        self._until: dict[str, tuple[int, WorkerInfo]] = {}
        self._last: dict[str, WorkerInfo] = {}

    async def close(self) -> None:
        self._until.clear()
        self._last.clear()

    async def announce(self, info: WorkerInfo, ttl_ms: int) -> None:
        self._until[info.worker] = (self._clock() + ttl_ms, info)
        self._last[info.model] = info

    async def withdraw(self, worker: str) -> None:
        self._until.pop(worker, None)

    async def workers(self, model: str | None = None) -> Sequence[WorkerInfo]:
        now = self._clock()
        self._until = {worker: entry for worker, entry in self._until.items() if now < entry[0]}
        alive = [info for _, (_, info) in sorted(self._until.items())]
        return [info for info in alive if model is None or info.model == model]

    async def last(self, model: str) -> WorkerInfo | None:
        return self._last.get(model)
