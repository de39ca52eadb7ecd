"""What is seen of one model before each decision: counters, rates, both pools.

What cannot be read is ``None`` and never zero, so that a pool is left as it is for as long as nothing is known of it.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from pdq.core.errors import PdqError
from pdq.core.load import Load, Meter, Tally, measure
from pdq.core.scaling import Observation, PoolSeen
from pdq.ports import Actuator, HandoffLedger, Pool, ScalingReport, WorkerInfo, WorkerRegistry

T = TypeVar("T")


class Helm(Protocol):
    """What of a ``Board`` a decision needs."""

    async def fixed(self, model: str) -> Mapping[Pool, int]: ...
    async def lead(self, model: str, who: str, ttl_ms: int) -> bool: ...
    async def resign(self, model: str, who: str) -> None: ...
    async def report(self, model: str, report: ScalingReport, ttl_ms: int) -> None: ...


class Sight(NamedTuple):
    """One observation, the workers from which it was made, and what could not be read."""

    observation: Observation
    workers: Sequence[WorkerInfo]
    unread: str
    """In words; empty if everything could be."""


class Observer:
    """Reads one model's state again and again; the rates follow from each reading and the one before."""

    def __init__(
        self, model: str, ledger: HandoffLedger, registry: WorkerRegistry, board: Helm, actuator: Actuator
    ) -> None:
        self._model: Final = model
        self._ledger = ledger
        self._registry = registry
        self._board = board
        self._actuator = actuator
        self._meter = Meter()

    async def observe(self, now_s: float) -> Sight:
        unread: list[str] = []

        async def tried(what: str, reading: Awaitable[T]) -> T | None:
            try:
                return await reading
            except PdqError as error:
                unread.append(f"{what}: {error}")
                return None

        load = await tried("counters", self._ledger.load(self._model))
        workers = await tried("registrations", self._registry.workers(self._model))
        sizes = await tried(f"sizes ({self._actuator.name})", self._actuator.sizes())
        fixed = await tried("what operators have fixed", self._board.fixed(self._model))
        self._measure(load, workers, now_s)
        prefill, decode = (_seen(pool, workers, sizes, fixed) for pool in Pool)
        observation = Observation(load, self._meter.rates, prefill, decode)
        return Sight(observation, workers or (), "; ".join(unread))

    def _measure(self, load: Load | None, workers: Sequence[WorkerInfo] | None, now_s: float) -> None:
        """A reading of which one half is missing is skipped: the next one covers the longer time."""
        if load is None or workers is None:
            return
        prefill = [it for it in workers if it.pool is Pool.PREFILL]
        tallies = {it.worker: Tally(it.occupancy.tokens, it.occupancy.busy_s) for it in prefill}
        self._meter = measure(self._meter, load, tallies, now_s)


def _seen(
    pool: Pool,
    workers: Sequence[WorkerInfo] | None,
    sizes: Mapping[Pool, int] | None,
    fixed: Mapping[Pool, int] | None,
) -> PoolSeen | None:
    """``None`` if any of it is unknown: without the fixed sizes, too, an operator might be overruled."""
    if workers is None or sizes is None or fixed is None or pool not in sizes:
        return None
    ready = [it for it in workers if it.pool is pool and it.state == "ready"]
    return PoolSeen(sizes[pool], len(ready), sum(map(_kv_tokens, ready)), fixed.get(pool))


def _kv_tokens(worker: WorkerInfo) -> int:
    blocks = worker.occupancy.total_blocks - worker.occupancy.quarantined_blocks
    return blocks * worker.contract.layout.block_size


def missed_least_first(pool: Pool, workers: Sequence[WorkerInfo]) -> list[str]:
    """The order in which workers leave: those that drain already, then by what they hold, and of equals the youngest."""

    def missed(worker: WorkerInfo) -> tuple[bool, int, int, int]:
        now = worker.occupancy
        blocks = now.total_blocks - now.free_blocks
        return worker.state == "ready", now.held + now.running, blocks, -worker.started_ms

    return [it.worker for it in sorted((it for it in workers if it.pool is pool), key=missed)]
