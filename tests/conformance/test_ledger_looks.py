"""What every ledger promises about queued records: each comes up for a look, long before its deadline."""

from collections.abc import AsyncIterator, Sequence
from typing import Final

import pytest

from pdq.core.handoff import Event
from pdq.core.lease import RecordKey
from pdq.core.settings import LeaseSettings
from tests.conformance.ledgers import LONG, SHORT, SOON, World, memory_world, redis_world

LEASE: Final = LeaseSettings(ttl_ms=SOON)


@pytest.fixture
async def world(url: str | None, model: str) -> AsyncIterator[World]:
    async with redis_world(url, model, LEASE) if url else memory_world(model, LEASE) as made:
        yield made


async def due(world: World) -> Sequence[RecordKey]:
    return [record.key for record in await world.ledger.due(world.model, 10)]


async def test_a_queued_record_comes_up_for_a_look_after_a_leases_time(world: World) -> None:
    key = await world.enqueue()
    assert await due(world) == []
    await world.advance(SOON)
    assert await due(world) == [key]


async def test_reaped_it_is_left_until_its_deadline(world: World) -> None:
    key = await world.enqueue(timeout_ms=4 * SOON)
    await world.advance(SOON)
    await world.ledger.reap(key)
    assert await due(world) == []
    await world.advance(SOON)
    assert await due(world) == []
    await world.advance(2 * SOON)
    assert await due(world) == [key]


async def test_it_can_be_put_back_for_another_look(world: World) -> None:
    key = await world.enqueue()
    await world.advance(SOON)
    await world.ledger.reap(key, look_again=True)
    assert await due(world) == []
    await world.advance(SOON)
    assert await due(world) == [key]


async def test_another_look_does_not_come_after_the_deadline(world: World) -> None:
    key = await world.enqueue(timeout_ms=SOON + SHORT)
    await world.advance(SOON)
    await world.ledger.reap(key, look_again=True)
    await world.advance(SHORT)
    assert await due(world) == [key]


async def test_who_has_begun_is_not_looked_at_and_who_is_queued_again_is(world: World) -> None:
    key = await world.enqueue()
    grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
    await world.advance(SOON)
    assert await due(world) == []
    assert (await world.ledger.reap(key, look_again=True)).source is not None
    await world.advance(SOON)
    assert await due(world) == []
    await world.ledger.apply(key, Event.REQUEUE, epoch=grant.epoch)
    assert await due(world) == []
    await world.advance(SOON)
    assert await due(world) == [key]
    await world.ledger.apply(key, Event.CANCEL)
    assert await due(world) == []
