"""What every ledger counts, over memory and a real Valkey: by class, by tenant, and since the beginning."""

import asyncio
from typing import Final

import pytest
from redis.asyncio import Redis

from pdq.adapters.processes import Server
from pdq.core import names
from pdq.core.handoff import Event, Side, State
from pdq.core.load import Count, total
from pdq.core.messages import Policy
from pdq.ports import Changes, Load, NewRecord
from tests.conformance.ledgers import LONG, SOON, World, bring, redis_world

ONE: Final = Count(1, 10, 15)
TWO: Final = Count(2, 20, 30)
THREE: Final = Count(3, 30, 45)
AWKWARD: Final = ("", ":", "a:b", "interactive:a", "tenant:", "ended", "\u00fc\u6f22 \n\t*{}", "x" * 256)
"""Names of tenants, which are any text."""


async def test_a_model_without_requests_has_nothing_to_count(world: World) -> None:
    load = await world.ledger.load(world.model)
    assert (load.queued, load.tenants, load.accepted, load.ended) == ({}, {}, Count(), Count())
    assert set(load.requests.values()) == {0}


async def test_what_is_queued_is_counted_by_class_and_tenant(world: World) -> None:
    for tenant, priority in (("a", "interactive"), ("a", "batch"), ("a", "batch"), ("b", "batch"), ("", "interactive")):
        await world.enqueue(tenant=tenant, priority=priority)  # type: ignore[arg-type]
    load = await world.ledger.load(world.model)
    assert load.queued == {"interactive": {"a": ONE, "": ONE}, "batch": {"a": TWO, "b": ONE}}
    assert load.tenants == {"a": THREE, "b": ONE, "": ONE}
    assert load.requests[State.QUEUED] == 5
    assert load.prompt_tokens[State.QUEUED] == 50
    assert load.reserved_tokens[State.QUEUED] == 75


async def test_a_request_is_its_tenants_from_acceptance_to_end_and_queued_only_while_it_is(world: World) -> None:
    key = await world.enqueue(tenant="a")
    grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
    load = await world.ledger.load(world.model)
    assert not any(load.queued.values())
    assert load.tenants == {"a": ONE}
    await world.ledger.apply(key, Event.ADOPT, epoch=grant.epoch)
    assert (await world.ledger.load(world.model)).tenants == {"a": ONE}
    await world.ledger.apply(key, Event.FINISH, epoch=grant.epoch)
    assert (await world.ledger.load(world.model)).tenants == {}


async def test_what_one_worker_does_whole_is_counted_once_more_until_its_prompt_is_computed(world: World) -> None:
    await world.enqueue()
    await world.enqueue(mode="aggregated", priority="batch")
    key = await world.enqueue(mode="aggregated")
    assert (await world.ledger.load(world.model)).whole == {"interactive": ONE, "batch": ONE}
    grant = await world.ledger.acquire(key, Event.BEGIN, "d1", LONG)
    assert (await world.ledger.load(world.model)).whole == {"prefilling": ONE, "batch": ONE}
    await world.ledger.apply(key, Event.ADOPT, epoch=grant.epoch)
    load = await world.ledger.load(world.model)
    assert load.whole == {"batch": ONE}
    assert load.queued == {"interactive": {"": ONE}, "batch": {"": ONE}}


async def test_a_tenant_that_has_ended_everything_is_gone_from_the_reading(world: World) -> None:
    gone = [await world.enqueue(tenant="gone") for _ in range(3)]
    await world.enqueue(tenant="here")
    for key, event in zip(gone, (Event.CANCEL, Event.FAIL, Event.CANCEL), strict=True):
        await world.ledger.apply(key, event)
    load = await world.ledger.load(world.model)
    assert load.tenants == {"here": ONE}
    assert load.queued["interactive"] == {"here": ONE}


@pytest.mark.parametrize("tenant", AWKWARD)
async def test_a_tenant_may_have_any_name(world: World, tenant: str) -> None:
    await world.enqueue(tenant=tenant, priority="batch")
    key = await world.enqueue(tenant=tenant)
    await world.enqueue(tenant=tenant + "2")
    await world.ledger.apply(key, Event.CANCEL)
    load = await world.ledger.load(world.model)
    assert load.queued["batch"] == {tenant: ONE}
    assert load.tenants == {tenant: ONE, tenant + "2": ONE}
    assert load.ended == ONE


@pytest.mark.parametrize("state", State)
async def test_what_was_accepted_is_what_has_ended_and_what_has_not(world: World, state: State) -> None:
    await bring(world, state, timeout_ms=SOON if state is State.EXPIRED else LONG)
    load = await world.ledger.load(world.model)
    assert load.accepted == ONE
    assert load.ended == (ONE if state.terminal else Count())


async def test_a_request_that_is_queued_again_was_accepted_once(world: World) -> None:
    key = await world.enqueue(policy=Policy(max_attempts=5), tenant="a")
    for _ in range(3):
        grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
        await world.ledger.apply(key, Event.REQUEUE, epoch=grant.epoch)
    load = await world.ledger.load(world.model)
    assert (load.accepted, load.ended) == (ONE, Count())
    assert load.queued == {"interactive": {"a": ONE}}
    assert load.tenants == {"a": ONE}


async def test_a_request_that_was_there_already_is_not_accepted_again(world: World) -> None:
    key = await world.enqueue(tenant="a")
    before = await world.ledger.load(world.model)
    again = NewRecord(key, "pdq.tokens.me", 99, 99, LONG, "other", tenant="b")
    await world.ledger.enqueue(again)
    assert await world.ledger.load(world.model) == before
    await world.ledger.apply(key, Event.CANCEL)
    ended = await world.ledger.load(world.model)
    await world.ledger.enqueue(again)
    assert await world.ledger.load(world.model) == ended


async def test_numbers_that_are_corrected_are_corrected_everywhere(world: World) -> None:
    key = await world.enqueue(tenant="a")
    grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
    await world.ledger.update(key, Side.SOURCE, grant.epoch, Changes(prompt_tokens=100, max_new_tokens=50))
    corrected = Count(1, 100, 150)
    load = await world.ledger.load(world.model)
    assert (load.tenants, load.accepted, load.ended) == ({"a": corrected}, corrected, Count())
    await world.ledger.apply(key, Event.REQUEUE, epoch=grant.epoch)
    assert (await world.ledger.load(world.model)).queued == {"interactive": {"a": corrected}}
    await world.ledger.apply(key, Event.CANCEL, changes=Changes(prompt_tokens=1))
    load = await world.ledger.load(world.model)
    assert (load.tenants, load.accepted, load.ended) == ({}, corrected, corrected)


async def test_of_many_tenants_at_once_every_reading_fits_together(world: World) -> None:
    def fits(load: Load) -> bool:
        live = sum(load.requests.values())
        by_tenant = total(load.tenants.values()).requests
        by_class = sum(total(tenants.values()).requests for tenants in load.queued.values())
        ended = load.accepted.requests - load.ended.requests
        return live == by_tenant == ended and by_class == load.requests[State.QUEUED]

    async def life(tenant: str) -> None:
        key = await world.enqueue(tenant=tenant)
        grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
        await world.ledger.apply(key, Event.FINISH, epoch=grant.epoch)

    lives = asyncio.gather(*[life(f"t{n % 7}") for n in range(100)])
    readings: list[Load] = []
    while not lives.done():
        readings.append(await world.ledger.load(world.model))
        await asyncio.sleep(0)
    await lives
    assert all(map(fits, readings))
    assert (await world.ledger.load(world.model)).ended.requests == 100


# --- As Redis keeps it ------------------------------------------------------------------------------------------------


async def test_the_hash_does_not_grow_with_tenants_that_have_gone(valkey: Server, model: str) -> None:
    async with redis_world(valkey.url, model) as world:
        client = Redis.from_url(valkey.url)
        for n in range(50):
            key = await world.enqueue(tenant=f"tenant {n}", priority="batch" if n % 2 else "interactive")
            await world.ledger.apply(key, Event.CANCEL)
        assert await client.hgetall(names.load_key(model)) == {b"ended": b"50 500 750"}
        await client.aclose()


async def test_drift_of_a_tenants_counters_is_shown_by_name_and_mended(valkey: Server, model: str) -> None:
    async with redis_world(valkey.url, model) as world:
        await world.enqueue(tenant="a:b", priority="batch")
        before = await world.ledger.load(model)
        client = Redis.from_url(valkey.url)
        tampered = {"tenant:a:b": "3 10 15", "queued:batch:ghost": "1 1 1", "tenant:junk": "junk", "nonsense": "1 2 3"}
        await client.hset(names.load_key(model), mapping=tampered)
        books = await world.ledger.books(model, mend=True)
        assert books is not None
        shown = books.counted.keys() | books.recounted.keys()
        wrong = {name for name in shown if books.counted.get(name, 0) != books.recounted.get(name, 0)}
        assert {name.rpartition(":")[0] for name in wrong} == set(tampered)
        assert (books.counted["tenant:a:b:requests"], books.recounted["tenant:a:b:requests"]) == (3, 1)
        books = await world.ledger.books(model)
        assert books is not None
        assert books.counted == books.recounted
        assert await world.ledger.load(model) == before
        await client.aclose()


async def test_mending_leaves_the_total_of_what_has_ended(valkey: Server, model: str) -> None:
    async with redis_world(valkey.url, model) as world:
        await world.ledger.apply(await world.enqueue(), Event.CANCEL)
        await world.ledger.books(model, mend=True)
        assert (await world.ledger.load(model)).ended == ONE
        await world.ledger.apply(await world.enqueue(), Event.CANCEL)
        assert (await world.ledger.load(model)).ended == TWO
