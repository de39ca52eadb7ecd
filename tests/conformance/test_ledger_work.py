"""What every ledger promises about fields, renewal, the reaper's list, questions, and many callers at once."""

import asyncio

import pytest
from redis.asyncio import Redis

from pdq.adapters.processes import Server
from pdq.core import errors, names
from pdq.core.handoff import Event, Side, State
from pdq.core.lease import Hold
from pdq.core.messages import End, Policy, Usage
from pdq.ports import Changes, Grant, Locator, NewRecord, Record
from tests.conformance.ledgers import (
    KV,
    LAYOUT,
    LONG,
    SHORT,
    SOON,
    World,
    bring,
    redis_world,
)

# --- Fields, renewal, release -----------------------------------------------------------------------------------------


async def test_enqueue_twice_changes_nothing(world: World) -> None:
    key = world.key()
    new = NewRecord(
        key,
        "pdq.tokens.é",
        7,
        3,
        LONG,
        "s",
        Policy("reject", "fail", 5, "done"),
        "aggregated",
        "ten ant",
        "batch",
        "c{}:1",
    )
    first, created = await world.ledger.enqueue(new)
    assert created
    assert first.deadline_ms - first.created_ms == LONG
    for name in NewRecord.__struct_fields__:
        if name not in ("timeout_ms", "job"):
            assert getattr(first, name) == getattr(new, name)
    before = await world.snapshot(key)
    assert await world.ledger.enqueue(NewRecord(key, "other", 1, 1, 1, "x")) == (first, False)
    assert await world.snapshot(key) == before


async def test_every_field_of_changes_is_written_and_read_back(world: World) -> None:
    story = await bring(world, State.PREFILLING)
    values = {
        "fingerprint": "f",
        "layout": LAYOUT,
        "locators": (Locator("ucx", {"a": "ü"}, 3), Locator("redis", {}, outlives=True)),
        "digest": "d",
        "first_token": 0,
        "emitted": 4,
        "streaming": True,
        "streams_lost": 2,
        "prompt_tokens": 100,
        "max_new_tokens": 50,
        "ended_code": "x",
        "ended_message": "m\n",
        "end": End(state="done", finish_reason="stop", stop_reason=7, tail="é\n", usage=Usage(1, 2)),
    }
    assert set(values) == set(Changes.__struct_fields__)
    await world.ledger.update(story.key, Side.SOURCE, story.source, Changes(**values))
    record = await world.ledger.read(story.key)
    assert {name: getattr(record, name) for name in values} == values
    load = await world.ledger.load(world.model)
    assert (load.prompt_tokens[State.PREFILLING], load.reserved_tokens[State.PREFILLING]) == (100, 150)
    await world.ledger.apply(story.key, Event.REQUEUE, epoch=story.source, changes=Changes(max_new_tokens=1))
    load = await world.ledger.load(world.model)
    assert (load.prompt_tokens[State.QUEUED], load.reserved_tokens[State.QUEUED]) == (100, 101)
    assert (load.requests[State.PREFILLING], load.reserved_tokens[State.PREFILLING]) == (0, 0)


async def test_update_and_release_need_a_running_lease_of_that_side(world: World) -> None:
    story = await bring(world, State.READY, ttl=SOON)
    for side, epoch in ((Side.SOURCE, story.sink), (Side.SINK, story.source), (Side.SINK, 9)):
        with pytest.raises(errors.StaleEpoch):
            await world.ledger.update(story.key, side, epoch, Changes(emitted=9))
        with pytest.raises(errors.StaleEpoch):
            await world.ledger.release(story.key, side, epoch)
    await world.ledger.release(story.key, Side.SOURCE, story.source)
    await world.advance(SOON)
    with pytest.raises(errors.StaleEpoch):
        await world.ledger.update(story.key, Side.SINK, story.sink, Changes(emitted=9))
    await world.ledger.apply(story.key, Event.CANCEL)
    for refused in (errors.RecordEnded, errors.RecordNotFound):
        key = story.key if refused is errors.RecordEnded else world.key()
        with pytest.raises(refused):
            await world.ledger.update(key, Side.SINK, story.sink, Changes(emitted=9))
        with pytest.raises(refused):
            await world.ledger.release(key, Side.SINK, story.sink)


async def test_renewal_prolongs_what_is_held_and_tells_what_is_lost(world: World) -> None:
    kept = await bring(world, State.READY, ttl=SOON)
    late = await bring(world, State.PREFILLING, ttl=SHORT)
    ended = await bring(world, State.DONE)
    stale = Hold(kept.key, Side.SINK, 77)
    gone = Hold(world.key(), Side.SOURCE, 1)
    held = [Hold(kept.key, Side.SOURCE, kept.source), Hold(kept.key, Side.SINK, kept.sink)]
    lost = [Hold(late.key, Side.SOURCE, late.source), Hold(ended.key, Side.SINK, ended.sink), stale, gone]
    assert list(await world.ledger.renew(held, LONG)) == []
    await world.advance(SOON)
    assert sorted(await world.ledger.renew([*lost, *held], LONG), key=str) == sorted(lost, key=str)
    assert await world.ledger.renew([], LONG) == []
    record = await world.ledger.read(kept.key)
    assert record is not None
    assert record.sink is not None
    assert record.sink.until_ms > await world.ledger.now_ms() + SOON
    assert [r.key for r in await world.ledger.due(world.model, 10)] == [late.key]


async def test_a_thousand_leases_of_two_models_are_renewed_at_once(world: World) -> None:
    other = World(world.ledger, world.advance, world.model + " twin")
    stories = await asyncio.gather(*[bring(w, State.PREFILLING) for w in [world, other] for _ in range(510)])
    holds = [Hold(story.key, Side.SOURCE, story.source) for story in stories]
    holds[700] = Hold(holds[700].key, Side.SOURCE, 5)
    assert list(await world.ledger.renew(holds, LONG)) == [holds[700]]


# --- Due and reap -----------------------------------------------------------------------------------------------------


async def test_due_lists_what_ran_out_the_longest_overdue_first_and_no_more_than_asked(world: World) -> None:
    await bring(world, State.PREFILLING)
    first = await bring(world, State.PREFILLING, ttl=SHORT)
    second = await bring(world, State.QUEUED, timeout_ms=SOON)
    assert not [r for r in await world.ledger.due(world.model, 10) if r.key == second.key]
    await world.advance(SOON)
    assert [r.key for r in await world.ledger.due(world.model, 10)] == [first.key, second.key]
    assert [r.key for r in await world.ledger.due(world.model, 1)] == [first.key]


async def test_reaping_clears_only_leases_that_ran_out_and_changes_no_state(world: World) -> None:
    key = await world.enqueue()
    source = await world.ledger.acquire(key, Event.BEGIN, "p1", SOON)
    await world.ledger.apply(key, Event.READY, epoch=source.epoch, changes=KV)
    sink = await world.ledger.acquire(key, Event.CLAIM, "d1", LONG)
    assert (await world.ledger.reap(key)).source is not None
    await world.advance(SOON)
    history = await world.ledger.history(key)
    record = await world.ledger.reap(key)
    assert (record.state, record.source) == (State.READY, None)
    assert record.sink is not None
    assert record.sink.epoch == sink.epoch
    assert record.locators == KV.locators
    assert await world.ledger.history(key) == history
    assert not await world.ledger.due(world.model, 10)


async def test_reaping_does_not_hide_a_passed_deadline(world: World) -> None:
    key = await world.enqueue(timeout_ms=SHORT)
    await world.advance(SHORT)
    await world.ledger.reap(key)
    assert [r.key for r in await world.ledger.due(world.model, 10)] == [key]
    await world.ledger.apply(key, Event.EXPIRE)
    assert not await world.ledger.due(world.model, 10)
    assert (await world.ledger.reap(key)).state is State.EXPIRED
    with pytest.raises(errors.RecordNotFound):
        await world.ledger.reap(world.key())


# --- Questions --------------------------------------------------------------------------------------------------------


async def test_records_are_found_listed_and_read_in_order(world: World) -> None:
    ledger = world.ledger
    a, b, c = [await world.enqueue() for _ in range(3)]
    await ledger.apply(b, Event.FAIL, changes=Changes(ended_code="engine_failed", ended_message="why"))
    assert await ledger.read(world.key()) is None
    found = await ledger.read_many([c, world.key(), a])
    assert [record and record.key for record in found] == [c, None, a]
    assert {record.key for record in await ledger.live(world.model)} == {a, c}
    assert world.model in await ledger.models()
    record = await ledger.find(b.request_id)
    assert record is not None
    assert (record.key, record.ended_code, record.ended_message) == (b, "engine_failed", "why")
    assert await ledger.find("nobody") is None


async def test_history_tells_who_did_what_when_and_why(world: World) -> None:
    key = await world.enqueue()
    grant = await world.ledger.acquire(key, Event.BEGIN, 'p"1', LONG)
    note = {"served": "shm", "refused": {"ucx": "peer_lost", "ü": [1, None]}}
    await world.ledger.apply(key, Event.READY, epoch=grant.epoch, note=note)
    await world.ledger.apply(key, Event.CANCEL, worker="bridge-1")
    log = await world.ledger.history(key)
    assert [(e.event, e.state, e.worker, e.epoch) for e in log] == [
        ("enqueue", State.QUEUED, "", 0),
        ("begin", State.PREFILLING, 'p"1', 1),
        ("ready", State.READY, 'p"1', 1),
        ("cancel", State.CANCELLED, "bridge-1", 0),
    ]
    assert log[2].note == note
    assert [e.at_ms for e in log] == sorted(e.at_ms for e in log)
    assert await world.ledger.history(world.key()) == []


async def test_the_log_is_bounded(world: World) -> None:
    key = await world.enqueue(policy=Policy(max_attempts=100))
    grants: list[Grant] = []
    for _ in range(100):
        grants.append(await world.ledger.acquire(key, Event.BEGIN, "p1", LONG))
        await world.ledger.apply(key, Event.REQUEUE, epoch=grants[-1].epoch)
    log = await world.ledger.history(key)
    assert len(log) == 200
    assert log[-1].epoch == grants[-1].epoch


# --- The books --------------------------------------------------------------------------------------------------------


async def test_books_of_records_in_every_state_agree(world: World) -> None:
    for state in State:
        await bring(world, state, timeout_ms=SOON if state is State.EXPIRED else LONG)
    books = await world.ledger.books(world.model)
    assert books is not None
    assert books.counted == books.recounted
    assert (books.strays, books.late, books.unindexed) == ((), (), ())
    assert await world.ledger.books(world.model, mend=True) == books
    assert await world.ledger.books(world.model) == books


async def test_books_that_were_tampered_with_tell_and_are_mended(valkey: Server, model: str) -> None:
    async with redis_world(valkey.url, model) as world:
        held, hidden, late = [await bring(world, state) for state in (State.READY, State.QUEUED, State.FETCHED)]
        before = await world.ledger.load(model)
        client = Redis.from_url(valkey.url)
        await client.hset(names.load_key(model), mapping={"ready": "7 70 105", "queued:interactive:": "junk"})
        await client.zadd(names.due_key(model), {"ghost": 1, late.key.request_id: 2**52})
        await client.zrem(names.due_key(model), hidden.key.request_id)
        books = await world.ledger.books(model, mend=True)
        assert books is not None
        assert (books.strays, books.late) == (("ghost",), (late.key.request_id,))
        assert books.unindexed == (hidden.key.request_id,)
        assert books.counted["ready:requests"] == 7
        # Not before every live record is found again.
        for story in (hidden, late):
            await world.ledger.reap(story.key)
        await world.ledger.due(model, 10)
        books = await world.ledger.books(model, mend=True)
        assert books is not None
        assert (books.strays, books.late, books.unindexed) == ((), (), ())
        assert books.counted != books.recounted
        books = await world.ledger.books(model)
        assert books is not None
        assert books.counted == books.recounted
        assert await world.ledger.load(model) == before
        assert (await world.ledger.read(held.key)) is not None
        await client.aclose()


# --- Many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "event", "crowd"), [(State.QUEUED, Event.BEGIN, 50), (State.PREFILLING, Event.CLAIM, 2)]
)
async def test_of_many_claimants_exactly_one_wins(world: World, state: State, event: Event, crowd: int) -> None:
    story = await bring(world, state)
    outcomes = await asyncio.gather(
        *[world.ledger.acquire(story.key, event, f"w{i}", LONG) for i in range(crowd)], return_exceptions=True
    )
    assert sum(isinstance(outcome, Grant) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, errors.LeaseHeld) for outcome in outcomes) == crowd - 1


async def test_of_many_ends_exactly_one_wins_and_the_counters_return_to_zero(world: World) -> None:
    story = await bring(world, State.FETCHED)
    ends = [(Event.FINISH, story.sink), (Event.CANCEL, None), (Event.FAIL, story.sink), (Event.CANCEL, None)]
    outcomes = await asyncio.gather(
        *[world.ledger.apply(story.key, event, epoch=epoch) for event, epoch in ends], return_exceptions=True
    )
    assert sum(isinstance(outcome, Record) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, errors.RecordEnded) for outcome in outcomes) == 3
    load = await world.ledger.load(world.model)
    assert {*load.requests.values(), *load.prompt_tokens.values(), *load.reserved_tokens.values()} == {0}
