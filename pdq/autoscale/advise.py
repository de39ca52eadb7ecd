"""Deciding without doing: for whoever scales by the exported figures, or wants to see first what would be done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from pdq.ports import Board, Pool, ScalingReport, WorkerRegistry


class Advise:
    """Decisions are for others to carry out; the workers that are there are those that shall run."""

    name: Final = "advise"

    def __init__(self, model: str, registry: WorkerRegistry) -> None:
        self._model = model
        self._registry = registry

    async def sizes(self) -> Mapping[Pool, int]:
        found = Counter(it.pool for it in await self._registry.workers(self._model) if it.state == "ready")
        return {pool: found[pool] for pool in Pool}

    async def scale(self, pool: Pool, replicas: int, leaving_first: Sequence[str]) -> None:
        pass

    async def trouble(self, pool: Pool) -> str:
        return ""


class Onlooker:
    """A ``Helm`` for somebody who decides for himself only: he leads nobody, and nobody reads his reports."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def fixed(self, model: str) -> Mapping[Pool, int]:
        return await self._board.fixed(model)

    async def lead(self, model: str, who: str, ttl_ms: int) -> bool:
        return True

    async def resign(self, model: str, who: str) -> None:
        pass

    async def report(self, model: str, report: ScalingReport, ttl_ms: int) -> None:
        pass
