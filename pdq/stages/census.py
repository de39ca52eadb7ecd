"""Who is alive, for those that ask at every request: the registry is read at most once a second, for all models."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from pdq.ports import WorkerInfo, WorkerRegistry
from pdq.stages.kept import Kept

FRESH_S: Final = 1.0


class Census:
    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._kept = Kept(registry.workers, FRESH_S, clock)

    async def workers(self) -> Sequence[WorkerInfo]:
        """The same sequence until it is read anew.

        Raises:
            Unavailable: the registry does not answer.
        """
        return await self._kept.get()

    async def last(self, model: str) -> WorkerInfo | None:
        """See ``WorkerRegistry.last``."""
        return await self._registry.last(model)
