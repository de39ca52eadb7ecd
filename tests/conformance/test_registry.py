"""What every worker registry promises, over the in-memory one and a real Valkey."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from pdq.adapters.memory import MemoryRegistry
from pdq.adapters.processes import Server
from pdq.adapters.redis import RedisRegistry, connect
from pdq.core import names
from pdq.core.layout import Fingerprint, KvLayout
from pdq.core.settings import RedisSettings
from pdq.ports import BackendContract, Occupancy, Pool, WorkerInfo, WorkerRegistry
from tests.conformance.conftest import Time

LONG = 60_000
SHORT = 100


@dataclass
class Scene:
    registry: WorkerRegistry
    until: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
    """Lets time pass until the condition holds."""


@pytest.fixture
async def scene(url: str | None, time: Time) -> AsyncIterator[Scene]:
    if url is None:
        yield Scene(MemoryRegistry(clock=time.clock), time.until)
        return
    client = await connect(RedisSettings(url=url))
    registry = RedisRegistry(client)
    yield Scene(registry, time.until)
    await registry.close()
    await client.aclose()


def info(worker: str, model: str, pool: Pool = Pool.PREFILL) -> WorkerInfo:
    contract = BackendContract(
        name="sim",
        version="1",
        first_token="prefill",
        order=("on_start", "on_complete"),
        direction="pull",
        chunked=True,
        reentry=True,
        resume=True,
        layout=KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="uint8", block_size=4, chunk_tokens=8),
        fingerprint=Fingerprint(model=model, weights="w", tokenizer="t", dtype="uint8"),
        max_context=128,
    )
    return WorkerInfo(worker, pool, model, contract, Occupancy(8, 8, 0, 0), "host", 1, "ready", 0)


async def test_who_announces_itself_is_listed_with_what_it_said_last(scene: Scene, model: str) -> None:
    first, second = info(f"b-{model}", model), info(f"a-{model}", model, Pool.DECODE)
    await scene.registry.announce(first, LONG)
    await scene.registry.announce(second, LONG)
    assert list(await scene.registry.workers(model)) == [second, first]
    busy = replace(first, occupancy=Occupancy(8, 1, 3, 2), state="draining")
    await scene.registry.announce(busy, LONG)
    assert list(await scene.registry.workers(model)) == [second, busy]


async def test_workers_of_other_models_are_listed_only_when_nobody_asks_for_one(scene: Scene, model: str) -> None:
    mine, other = info(f"w1-{model}", model), info(f"w2-{model}", model + "x")
    await scene.registry.announce(mine, LONG)
    await scene.registry.announce(other, LONG)
    assert list(await scene.registry.workers(model)) == [mine]
    everyone = await scene.registry.workers()
    assert mine in everyone
    assert other in everyone


async def test_who_withdraws_is_gone_at_once(scene: Scene, model: str) -> None:
    await scene.registry.announce(info(f"w-{model}", model), LONG)
    await scene.registry.withdraw(f"w-{model}")
    assert list(await scene.registry.workers(model)) == []
    await scene.registry.withdraw(f"w-{model}")


async def test_who_falls_silent_vanishes_and_may_come_back(scene: Scene, model: str) -> None:
    silent, steady = info(f"w1-{model}", model), info(f"w2-{model}", model)
    await scene.registry.announce(silent, SHORT)
    await scene.registry.announce(steady, LONG)

    async def gone() -> bool:
        return list(await scene.registry.workers(model)) == [steady]

    await scene.until(gone)
    await scene.registry.announce(silent, LONG)
    assert list(await scene.registry.workers(model)) == [silent, steady]


async def test_names_of_dead_workers_do_not_pile_up_in_the_index(model: str, valkey: Server) -> None:
    client = await connect(RedisSettings(url=valkey.url))
    registry = RedisRegistry(client)
    await client.sadd(names.WORKERS_KEY, f"dead-{model}")
    await registry.workers()
    assert not await client.sismember(names.WORKERS_KEY, f"dead-{model}")
    await registry.close()
    await client.aclose()


async def test_what_the_last_worker_of_a_model_said_stays_when_all_have_gone(scene: Scene, model: str) -> None:
    assert await scene.registry.last(model) is None
    first, second = info(f"w1-{model}", model), info(f"w2-{model}", model, Pool.DECODE)
    await scene.registry.announce(first, LONG)
    await scene.registry.announce(second, SHORT)
    await scene.registry.withdraw(first.worker)

    async def gone() -> bool:
        return not await scene.registry.workers(model)

    await scene.until(gone)
    assert await scene.registry.last(model) == second
    assert await scene.registry.last(f"{model}x") is None
