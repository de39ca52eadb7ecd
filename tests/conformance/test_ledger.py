"""What every ledger promises about states, authors, leases and the deadline, over memory and a real Valkey."""

import itertools
from typing import Any

import pytest

from pdq.core import errors, names
from pdq.core.handoff import LIVE, RULES, TERMINAL, TRANSITIONS, Event, Side, State
from pdq.core.lease import RecordKey
from pdq.core.messages import Policy
from pdq.ports import Changes, NewRecord
from tests.conformance.ledgers import (
    KV,
    LONG,
    SHORT,
    SOON,
    Story,
    World,
    bring,
    cause,
    proof,
)

# --- The table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "event"), sorted(TRANSITIONS), ids=str)
async def test_every_row_of_the_table_leads_where_it_says(world: World, state: State, event: Event) -> None:
    takes_over = event is Event.BEGIN and state is State.PREFILLING
    expires = event is Event.EXPIRE
    story = await bring(world, state, ttl=SHORT if takes_over else LONG, timeout_ms=SOON if expires else LONG)
    if event is Event.CLAIM and story.sink:
        await world.ledger.release(story.key, Side.SINK, story.sink)
    if takes_over or expires:
        await world.advance(SOON)
    before = await world.ledger.read(story.key)
    after = await cause(world, story, event, proof(story, event, state))
    assert after.state is TRANSITIONS[state, event]
    assert after == await world.ledger.read(story.key)
    assert before is not None
    assert after.epoch == before.epoch + (RULES[event].claims is not None)
    assert after.attempt == before.attempt + (event is Event.BEGIN)
    entry = (await world.ledger.history(story.key))[-1]
    assert (entry.event, entry.state) == (event, after.state)
    load = await world.ledger.load(world.model)
    assert load.requests == {state: int(state is after.state) for state in LIVE}
    assert load.prompt_tokens == {state: 10 * (state is after.state) for state in LIVE}
    assert load.reserved_tokens == {state: 15 * (state is after.state) for state in LIVE}
    if after.state.terminal:
        assert (after.source, after.sink) == (None, None)
        assert after.ended_ms
        assert not await world.ledger.live(world.model)


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(sorted(LIVE), Event) if pair not in TRANSITIONS], ids=str
)
async def test_what_is_not_in_the_table_is_refused_and_changes_nothing(
    world: World, state: State, event: Event
) -> None:
    story = await bring(world, state)
    before = await world.snapshot(story.key)
    with pytest.raises((errors.IllegalTransition, errors.StaleEpoch)):
        await cause(world, story, event, proof(story, event, state))
    assert await world.snapshot(story.key) == before


@pytest.mark.parametrize("event", Event)
async def test_a_record_that_ended_refuses_every_event(world: World, event: Event) -> None:
    for state in sorted(TERMINAL):
        story = await bring(world, state, timeout_ms=SHORT if state is State.EXPIRED else LONG)
        before = await world.snapshot(story.key)
        with pytest.raises(errors.RecordEnded) as caught:
            await cause(world, story, event, 1)
        assert caught.value.state == state
        assert await world.snapshot(story.key) == before


@pytest.mark.parametrize("event", Event)
async def test_an_unknown_record_is_not_found(world: World, event: Event) -> None:
    with pytest.raises(errors.RecordNotFound):
        await cause(world, Story(world.key()), event, 1)


# --- Leases and epochs ------------------------------------------------------------------------------------------------

HELD_EVENTS = [
    (State.PREFILLING, Event.READY),
    (State.PREFILLING, Event.ADOPT),
    (State.PREFILLING, Event.FINISH),
    (State.PREFILLING, Event.REQUEUE),
    (State.READY, Event.FETCHED),
    (State.READY, Event.YIELD),
    (State.READY, Event.REQUEUE),
    (State.FETCHED, Event.FINISH),
    (State.FETCHED, Event.YIELD),
    (State.FETCHED, Event.REQUEUE),
    (State.FETCHED, Event.FAIL),
    (State.PREFILLING, Event.CANCEL),
]


@pytest.mark.parametrize(("state", "event"), HELD_EVENTS, ids=str)
async def test_a_wrong_epoch_is_stale_and_changes_nothing(world: World, state: State, event: Event) -> None:
    story = await bring(world, state)
    before = await world.snapshot(story.key)
    for epoch in (0, 99):
        with pytest.raises(errors.StaleEpoch):
            await cause(world, story, event, epoch)
    assert await world.snapshot(story.key) == before


@pytest.mark.parametrize(("state", "event"), HELD_EVENTS, ids=str)
async def test_a_lease_that_ran_out_is_no_proof(world: World, state: State, event: Event) -> None:
    story = await bring(world, state, ttl=SOON)
    await world.advance(SOON)
    before = await world.snapshot(story.key)
    with pytest.raises(errors.StaleEpoch):
        await cause(world, story, event, story.sink or story.source)
    assert await world.snapshot(story.key) == before


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in HELD_EVENTS if RULES[pair[1]].author == "holder_of_state"]
)
async def test_without_an_epoch_the_holders_running_lease_is_respected_until_it_ran_out(
    world: World, state: State, event: Event
) -> None:
    story = await bring(world, state, ttl=SOON)
    with pytest.raises(errors.LeaseHeld) as caught:
        await cause(world, story, event)
    assert 0 < caught.value.remaining_ms <= SOON
    await world.advance(SOON)
    assert (await cause(world, story, event)).state is TRANSITIONS[state, event]


async def test_an_unclaimed_ready_record_may_be_requeued_by_anyone(world: World) -> None:
    story = await bring(world, State.READY)
    await world.ledger.release(story.key, Side.SINK, story.sink)
    assert (await world.ledger.apply(story.key, Event.REQUEUE)).state is State.QUEUED


async def test_a_running_lease_is_not_taken_not_even_by_its_holder(world: World) -> None:
    story = await bring(world, State.PREFILLING)
    for worker in ("p1", "p2"):
        with pytest.raises(errors.LeaseHeld) as caught:
            await world.ledger.acquire(story.key, Event.BEGIN, worker, LONG)
        assert 0 < caught.value.remaining_ms <= LONG
    await world.ledger.acquire(story.key, Event.CLAIM, "d1", LONG)
    with pytest.raises(errors.LeaseHeld):
        await world.ledger.acquire(story.key, Event.CLAIM, "d2", LONG)


async def test_a_grant_tells_epoch_record_and_clock(world: World) -> None:
    key = await world.enqueue()
    grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
    source = grant.record.source
    assert source is not None
    assert (source.worker, source.epoch, source.until_ms) == ("p1", grant.epoch, grant.now_ms + LONG)
    assert 0 < grant.record.deadline_ms - grant.now_ms <= LONG
    assert grant.now_ms <= await world.ledger.now_ms()


async def test_a_new_attempt_voids_the_old_ones_kv_and_sink(world: World) -> None:
    key = await world.enqueue()
    first = await world.ledger.acquire(key, Event.BEGIN, "p1", SOON)
    await world.ledger.update(key, Side.SOURCE, first.epoch, KV)
    sink = await world.ledger.acquire(key, Event.CLAIM, "d1", LONG)
    await world.advance(SOON)
    second = await world.ledger.acquire(key, Event.BEGIN, "p2", LONG)
    assert second.epoch == sink.epoch + 1
    record = second.record
    assert (record.attempt, record.sink, record.layout, record.locators, record.digest) == (2, None, None, (), "")
    with pytest.raises(errors.StaleEpoch):
        await world.ledger.update(key, Side.SINK, sink.epoch, Changes(emitted=1))
    with pytest.raises(errors.StaleEpoch):
        await world.ledger.apply(key, Event.READY, epoch=first.epoch)


async def test_requeue_keeps_what_the_client_has_and_clears_what_the_kv_was(world: World) -> None:
    story = await bring(world, State.READY)
    await world.ledger.update(story.key, Side.SINK, story.sink, Changes(emitted=3, first_token=0))
    record = await world.ledger.apply(story.key, Event.REQUEUE, epoch=story.sink)
    assert (record.emitted, record.first_token) == (3, 0)
    assert (record.layout, record.locators, record.digest) == (None, (), "")
    assert (record.source, record.sink) == (None, None)


async def test_attempts_are_counted_and_end(world: World) -> None:
    key = await world.enqueue(policy=Policy(max_attempts=2))
    for attempt in (1, 2):
        grant = await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
        assert grant.record.attempt == attempt
        await world.ledger.apply(key, Event.REQUEUE, epoch=grant.epoch)
    before = await world.snapshot(key)
    with pytest.raises(errors.AttemptsExhausted):
        await world.ledger.acquire(key, Event.BEGIN, "p1", LONG)
    assert await world.snapshot(key) == before


async def test_adopt_makes_the_source_the_sink_under_the_same_epoch(world: World) -> None:
    story = await bring(world, State.PREFILLING)
    record = await world.ledger.apply(story.key, Event.ADOPT, epoch=story.source)
    assert record.source is None
    assert record.sink is not None
    assert (record.sink.worker, record.sink.epoch) == ("p1", story.source)
    await world.ledger.apply(story.key, Event.FINISH, epoch=story.source)


@pytest.mark.parametrize("retain", ["fetched", "first_token", "done"])
async def test_fetched_releases_the_source_unless_the_policy_retains_it(world: World, retain: Any) -> None:
    story = await bring(world, State.FETCHED, policy=Policy(retain=retain))
    record = await world.ledger.read(story.key)
    assert record is not None
    assert (record.source is None) == (retain == "fetched")
    if record.source is not None:
        await world.ledger.release(story.key, Side.SOURCE, story.source)
        record = await world.ledger.read(story.key)
        assert record is not None
        assert record.source is None
    assert record.sink is not None
    with pytest.raises(errors.StaleEpoch):
        await world.ledger.release(story.key, Side.SOURCE, story.source)


# --- Deadline ---------------------------------------------------------------------------------------------------------


async def test_past_the_deadline_only_an_end_is_allowed(world: World) -> None:
    story = await bring(world, State.READY, timeout_ms=SOON)
    other = await bring(world, State.PREFILLING, timeout_ms=SOON)
    queued = await bring(world, State.QUEUED, timeout_ms=SOON)
    with pytest.raises(errors.IllegalTransition):
        await world.ledger.apply(story.key, Event.EXPIRE)
    await world.advance(SOON)
    with pytest.raises(errors.DeadlineExceeded):
        await world.ledger.acquire(queued.key, Event.BEGIN, "p1", LONG)
    with pytest.raises(errors.DeadlineExceeded):
        await world.ledger.acquire(other.key, Event.CLAIM, "d1", LONG)
    for which, event in ((story, Event.FETCHED), (story, Event.YIELD), (story, Event.REQUEUE), (other, Event.READY)):
        with pytest.raises(errors.DeadlineExceeded):
            await world.ledger.apply(which.key, event, epoch=which.sink or which.source)
    assert (await world.ledger.apply(other.key, Event.FINISH, epoch=other.source)).state is State.DONE
    assert (await world.ledger.apply(story.key, Event.EXPIRE)).state is State.EXPIRED
    assert (await world.ledger.apply(queued.key, Event.CANCEL)).state is State.CANCELLED


async def test_a_request_is_found_by_the_job_of_its_producer_as_long_as_its_record_is_kept(world: World) -> None:
    key, job = RecordKey(world.model, "0197c0de-0000-7000-8000-000000000001"), names.place("PDQ_PREFILL", 7)
    new = NewRecord(key, "pdq.tokens.a", 10, 5, LONG, "secret", job=job)
    record, _ = await world.ledger.enqueue(new)
    await world.ledger.enqueue(new)
    assert await world.ledger.of_job(world.model, job) == record
    assert await world.ledger.of_job(world.model, names.place("PDQ_LOCAL", 7)) is None
    assert await world.ledger.of_job(f"{world.model}x", job) is None
    await world.ledger.apply(key, Event.CANCEL)
    ended = await world.ledger.of_job(world.model, job)
    assert ended is not None
    assert ended.state is State.CANCELLED


async def test_the_salt_is_random_and_the_same_for_everybody(world: World) -> None:
    salt = await world.ledger.salt()
    assert len(salt) >= 16
    assert await world.ledger.salt() == salt
