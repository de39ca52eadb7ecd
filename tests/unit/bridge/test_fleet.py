"""What the bridge knows of the workers, and for how long."""

import pytest

from pdq.adapters.memory.registry import MemoryRegistry
from pdq.bridge.fleet import Fleet
from pdq.core.errors import Unavailable
from pdq.ports import Pool, WorkerInfo
from pdq.stages.census import FRESH_S, Census
from tests.unit.bridge.harness import MODEL, worker_info


class Registry(MemoryRegistry):
    readings = 0

    async def workers(self, model: str | None = None) -> list[WorkerInfo]:
        self.readings += 1
        return list(await super().workers(model))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_context_is_that_of_the_worker_with_the_least() -> None:
    registry = Registry()
    await registry.announce(worker_info(Pool.PREFILL, max_context=500), 60_000)
    await registry.announce(worker_info(Pool.DECODE, max_context=400), 60_000)
    assert await Fleet(Census(registry, Clock()), "disaggregated").max_context(MODEL) == 400


async def test_the_registry_is_read_once_a_second_however_many_ask() -> None:
    registry, clock = Registry(), Clock()
    await registry.announce(worker_info(Pool.PREFILL), 60_000)
    fleet = Fleet(Census(registry, clock), "disaggregated")
    for _ in range(10):
        await fleet.max_context(MODEL)
    assert registry.readings == 1
    clock.now += FRESH_S
    await fleet.max_context(MODEL)
    assert registry.readings == 2


async def test_a_model_whose_workers_have_gone_keeps_its_context_but_is_not_ready() -> None:
    registry, clock = Registry(), Clock()
    await registry.announce(worker_info(Pool.PREFILL, max_context=500), 60_000)
    await registry.announce(worker_info(Pool.DECODE, max_context=500), 60_000)
    fleet = Fleet(Census(registry, clock), "disaggregated")
    assert await fleet.missing([MODEL]) == []
    for pool in Pool:
        await registry.withdraw(worker_info(pool).worker)
    clock.now += FRESH_S
    assert await fleet.max_context(MODEL) == 500
    assert await fleet.missing([MODEL]) == [f"{MODEL}: no prefill worker", f"{MODEL}: no decode worker"]


async def test_a_model_that_never_had_a_worker_is_unavailable_with_a_time_to_come_back() -> None:
    with pytest.raises(Unavailable, match="no worker") as caught:
        await Fleet(Census(Registry(), Clock()), "disaggregated").max_context(MODEL)
    assert caught.value.retry_after_s > 0


async def test_a_bridge_that_starts_while_all_workers_have_gone_knows_what_they_could_take() -> None:
    registry = Registry()
    await registry.announce(worker_info(Pool.DECODE, max_context=500), 60_000)
    await registry.withdraw(worker_info(Pool.DECODE).worker)
    fleet = Fleet(Census(registry, Clock()), "disaggregated")
    assert await fleet.max_context(MODEL) == 500
    assert await fleet.missing([MODEL])
