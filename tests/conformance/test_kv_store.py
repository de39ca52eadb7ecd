"""The ``KvStore`` port: what lies in tiers and in shared memory, whoever put it there, and its deletion."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdq.adapters.processes import Server
from pdq.adapters.redis import RedisTierObjects
from pdq.adapters.redis_tier import RedisTier
from pdq.adapters.shm import ShmTransport
from pdq.adapters.shm_segments import ShmSegments
from pdq.core.audit import KvObject
from pdq.core.lease import RecordKey
from pdq.core.names import SHM_PREFIX
from pdq.core.settings import RedisSettings, TransportSettings
from pdq.ports import ChunkPlan, HandoffRef, KvStore, KvTransport

CHUNKS = (bytes(300_000), bytes(100), b"")
PLAN = ChunkPlan(tuple(map(len, CHUNKS)))


@dataclass
class Place:
    transport: KvTransport
    store: KvStore
    mine: Callable[[KvObject], bool]

    async def found(self) -> list[KvObject]:
        return [item for item in await self.store.objects() if self.mine(item)]

    async def offer(self, ref: HandoffRef) -> None:
        for index, chunk in enumerate(CHUNKS):
            await self.transport.offer(ref, PLAN, index, [chunk])


@pytest.fixture
async def redis_place(valkey: Server, model: str) -> AsyncIterator[Place]:
    tier = RedisTier(RedisSettings(url=valkey.url), TransportSettings())
    client = Redis.from_url(valkey.url)
    store = RedisTierObjects(client)
    yield Place(tier, store, lambda item: item.model == model)
    await store.close()
    await client.aclose()
    await tier.close()


@pytest.fixture
async def shm_place(tmp_path: Path) -> AsyncIterator[Place]:
    transport = ShmTransport(TransportSettings(shm_dir=str(tmp_path)))
    yield Place(transport, ShmSegments(tmp_path), lambda item: True)
    await transport.close()


@pytest.fixture(params=["redis", "shm"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


def ref(model: str, request_id: str = "r", epoch: int = 3) -> HandoffRef:
    return HandoffRef(RecordKey(model, request_id), epoch, "secret")


async def test_what_is_offered_is_there_once_for_each_handoff(place: Place, model: str) -> None:
    assert await place.found() == []
    await place.offer(ref(model))
    await place.offer(ref(model, "other"))
    found = await place.found()
    assert len(found) == 2
    assert {item.tier for item in found} == {place.store.name} == {place.transport.name}
    assert all(item.bytes >= PLAN.total for item in found)


async def test_a_tier_tells_whose_bytes_it_has_and_for_how_long(redis_place: Place, model: str) -> None:
    await redis_place.offer(ref(model))
    (item,) = await redis_place.found()
    assert (item.model, item.request_id, item.epoch, item.bytes, item.alive) == (model, "r", 3, PLAN.total, False)
    assert item.ttl_ms is not None
    assert 0 < item.ttl_ms <= 120_000


async def test_an_object_of_which_one_key_has_no_ttl_has_none(redis_place: Place, valkey: Server, model: str) -> None:
    await redis_place.offer(ref(model))
    (item,) = await redis_place.found()
    async with Redis.from_url(valkey.url) as client:
        await client.persist(f"{item.name}:head")
    assert [item.ttl_ms for item in await redis_place.found()] == [None]


async def test_only_what_is_named_is_deleted_from_a_tier(redis_place: Place, model: str) -> None:
    for each in (ref(model), ref(model, epoch=4), ref(model, "r2")):
        await redis_place.offer(each)
    named = [item for item in await redis_place.found() if (item.request_id, item.epoch) == ("r", 3)]
    assert await redis_place.store.discard(named) == 1
    assert sorted((item.request_id, item.epoch) for item in await redis_place.found()) == [("r", 4), ("r2", 3)]
    assert await redis_place.store.discard(named) == 0


async def test_a_segment_lives_as_long_as_its_process_has_it(shm_place: Place, model: str) -> None:
    await shm_place.offer(ref(model))
    (item,) = await shm_place.found()
    assert item.alive
    assert await shm_place.store.discard([item]) == 0
    assert len(await shm_place.found()) == 1


async def test_looking_at_a_segment_keeps_nobody_from_it(shm_place: Place, model: str) -> None:
    looking = asyncio.create_task(_forever(shm_place))
    for number in range(50):
        await shm_place.offer(ref(model, f"r{number}"))
        await shm_place.transport.release(ref(model, f"r{number}"))
    looking.cancel()
    assert all(item.alive for item in await shm_place.found())


async def _forever(place: Place) -> None:
    while True:
        await place.found()


async def test_a_segment_that_its_process_left_is_found_and_deleted(shm_place: Place, tmp_path: Path) -> None:
    (tmp_path / f"{SHM_PREFIX}left").write_bytes(bytes(5000))
    (item,) = await shm_place.found()
    assert (item.name, item.bytes, item.alive) == (f"{SHM_PREFIX}left", 5000, False)
    assert await shm_place.store.discard([item]) == 1
    assert await shm_place.found() == []
