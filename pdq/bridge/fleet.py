"""What the live workers can do, from their registrations.

A model whose workers have all gone still is a model: its requests wait in the queue until somebody scales up from zero,
and what its workers could take is what the last of them said, also for a bridge that was started since. Only a model that
never had a worker cannot be judged, and is refused for now.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, Literal

from pdq.core.errors import Unavailable
from pdq.ports import Pool, WorkerInfo
from pdq.stages.census import Census

RETRY_AFTER_S: Final = 2.0


class Fleet:
    def __init__(self, census: Census, mode: Literal["disaggregated", "aggregated", "auto"]) -> None:
        self._census = census
        self._mode = mode
        self._workers: Sequence[WorkerInfo] = ()
        self._max_context: dict[str, int] = {}

    async def max_context(self, model: str) -> int:
        """What every live worker of ``model`` can take, prompt and output together.

        Raises:
            Unavailable: there never was a worker of this model, or the registry does not answer.
        """
        await self._refresh()
        known = self._max_context.get(model)
        if known is None and (last := await self._census.last(model)) is not None:
            known = self._max_context[model] = last.contract.max_context
        if known is None:
            raise Unavailable(f"no worker serves model {model!r} yet", retry_after_s=RETRY_AFTER_S)
        return known

    def known_context(self, model: str) -> int | None:
        return self._max_context.get(model)

    async def missing(self, models: Collection[str]) -> list[str]:
        """What each model lacks to be served, in words."""
        await self._refresh()
        ready = [info for info in self._workers if info.state == "ready"]
        count = Counter((info.model, info.pool) for info in ready)
        whole = Counter(info.model for info in ready if info.pool is Pool.DECODE and info.aggregated)
        lacking = []
        for model in models:
            if self._mode == "aggregated":
                if not whole[model]:
                    lacking.append(f"{model}: no decode worker that takes whole requests")
            else:
                lacking += [f"{model}: no {pool.value} worker" for pool in Pool if not count[model, pool]]
        return lacking

    async def _refresh(self) -> None:
        workers = await self._census.workers()
        if workers is not self._workers:
            self._workers = workers
            contexts: dict[str, int] = {}
            for info in workers:
                contexts[info.model] = min(info.contract.max_context, contexts.get(info.model, 2**31))
            self._max_context |= contexts
