"""Queued requests without a job: which the reaper ends, which it leaves, and when it looks again."""

from collections.abc import Sequence
from typing import Any

import pytest

from pdq.core.errors import Unavailable
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import DecodeJob, Failure, OutputAnswer, PrefillJob, encode
from pdq.core.settings import LeaseSettings
from pdq.ports import JobQueue, Queue, Record, StoredJob
from pdq.stages import lost
from pdq.stages.accept import Accept
from pdq.stages.endings import Endings
from pdq.stages.reaper import Reaper
from tests.kv import until
from tests.unit.stages.parts import MODEL, REPLY_TO, World

LOOK_MS = LeaseSettings().ttl_ms


@pytest.fixture(autouse=True)
def silence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "ANSWER_S", 0.01)


class Spied:
    """The queue, with a word on how often it was read; ``meanwhile`` happens after that."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.read = 0
        self.too_long = False
        self.down = False
        self.meanwhile: Any = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._world.queue, name)

    async def stored(self, queue: Queue, model: str, limit: int) -> Sequence[StoredJob] | None:
        self.read += 1
        if self.down:
            raise Unavailable("the broker is away")
        found = await self._world.queue.stored(queue, model, limit)
        if self.meanwhile is not None:
            await self.meanwhile
            self.meanwhile = None
        return None if self.too_long else found


def reaper(world: World, queue: Spied | None = None) -> Reaper:
    endings = Endings(world.ledger, world.bus, world.parts.outbox, "reaper")
    jobs: JobQueue = queue or world.queue  # type: ignore[assignment]
    return Reaper(world.ledger, jobs, world.bus, endings, LeaseSettings())


def job_of(key: RecordKey) -> PrefillJob:
    return PrefillJob(model=MODEL, reply_to=REPLY_TO, prompt_token_ids=(1,) * 10, request_id=key.request_id)


async def due(world: World) -> Sequence[Record]:
    return await world.ledger.due(MODEL, 10)


async def test_a_queued_request_without_a_job_or_a_requester_is_failed() -> None:
    world = World()
    await world.listen()
    key = await world.queued()
    world.now_ms += LOOK_MS
    await reaper(world).round()
    record = await world.read(key)
    assert (record.state, record.ended_code) == (State.FAILED, "job_lost")
    assert not await due(world)


async def test_its_end_says_that_another_try_may_help() -> None:
    world = World()
    await world.listen()
    await world.queued()
    world.now_ms += LOOK_MS
    await reaper(world).round()
    await until(lambda: bool(world.got))
    [entry] = world.got
    assert entry.end is not None
    assert isinstance(entry.end.error, Failure)
    assert (entry.end.error.code, entry.end.error.retryable) == ("job_lost", True)


async def test_nobody_looks_before_whoever_wrote_the_record_had_time_to_publish() -> None:
    world = World()
    key = await world.queued()
    world.now_ms += LOOK_MS - 1
    assert await reaper(world).round() == 0
    assert (await world.read(key)).state is State.QUEUED


async def test_a_requester_that_waits_is_believed_and_the_queues_are_not_read() -> None:
    world = World()
    await world.listen(OutputAnswer("r", wanted=True))
    key = await world.queued()
    world.now_ms += LOOK_MS
    queue = Spied(world)
    await reaper(world, queue).round()
    assert queue.read == 0
    assert (await world.read(key)).state is State.QUEUED
    world.now_ms += 2 * LOOK_MS
    assert not await due(world), "it was looked at once"


async def test_a_requester_that_wants_nothing_is_no_reason_to_leave_a_lost_request() -> None:
    world = World()
    await world.listen(OutputAnswer("r", wanted=False))
    key = await world.queued()
    world.now_ms += LOOK_MS
    await reaper(world).round()
    assert (await world.read(key)).state is State.FAILED


@pytest.mark.parametrize("queue", [Queue.PREFILL, Queue.LOCAL])
@pytest.mark.parametrize("in_hand", [False, True])
async def test_a_request_whose_job_waits_or_is_in_a_workers_hands_is_left(queue: Queue, in_hand: bool) -> None:
    world = World()
    key = await world.queued()
    await world.queue.publish(queue, MODEL, encode(job_of(key)))
    if in_hand:
        await world.queue.pull(queue, MODEL, limit=1, wait_s=1)
    world.now_ms += LOOK_MS
    await reaper(world).round()
    assert (await world.read(key)).state is State.QUEUED
    assert not await due(world)


async def test_a_request_on_its_way_back_to_prefill_is_left_while_its_decode_job_is_there() -> None:
    world = World()
    record = await world.fetched()
    assert record.sink is not None
    await world.ledger.apply(record.key, Event.REQUEUE, epoch=record.sink.epoch)
    job = DecodeJob(job=job_of(record.key), source="prefill-0", attempt=1)
    await world.queue.publish(Queue.DECODE, MODEL, encode(job))
    world.now_ms += LOOK_MS
    await reaper(world).round()
    assert (await world.read(record.key)).state is State.QUEUED


async def test_a_request_that_went_back_to_prefill_without_any_job_is_failed() -> None:
    world = World()
    record = await world.fetched()
    assert record.sink is not None
    await world.ledger.apply(record.key, Event.REQUEUE, epoch=record.sink.epoch)
    world.now_ms += LOOK_MS
    await reaper(world).round()
    assert (await world.read(record.key)).state is State.FAILED


async def test_a_request_that_begins_while_the_queues_are_read_is_left() -> None:
    world = World()
    key = await world.queued()
    world.now_ms += LOOK_MS
    queue = Spied(world)
    queue.meanwhile = world.ledger.acquire(key, Event.BEGIN, "prefill-0", LOOK_MS)
    await reaper(world, queue).round()
    assert (await world.read(key)).state is State.PREFILLING


async def test_a_request_that_begins_and_comes_back_while_the_queues_are_read_is_left() -> None:
    world = World()
    key = await world.queued()
    world.now_ms += LOOK_MS

    async def to_and_fro() -> None:
        grant = await world.ledger.acquire(key, Event.BEGIN, "prefill-0", LOOK_MS)
        await world.ledger.apply(key, Event.REQUEUE, epoch=grant.epoch)

    queue = Spied(world)
    queue.meanwhile = to_and_fro()
    await reaper(world, queue).round()
    assert (await world.read(key)).state is State.QUEUED


async def test_queues_that_are_too_long_to_be_read_are_waited_out() -> None:
    world = World()
    key = await world.queued()
    queue = Spied(world)
    queue.too_long = True
    for _ in range(2):
        world.now_ms += LOOK_MS
        await reaper(world, queue).round()
        assert (await world.read(key)).state is State.QUEUED
        assert not await due(world)
    queue.too_long = False
    world.now_ms += LOOK_MS
    await reaper(world, queue).round()
    assert (await world.read(key)).state is State.FAILED


async def test_a_look_that_a_broker_cut_short_is_repeated() -> None:
    world = World()
    key = await world.queued()
    queue = Spied(world)
    queue.down = True
    world.now_ms += LOOK_MS
    with pytest.raises(Unavailable):
        await reaper(world, queue).round()
    queue.down = False
    world.now_ms += LOOK_MS
    await reaper(world, queue).round()
    assert (await world.read(key)).state is State.FAILED


async def test_the_queues_are_read_once_however_many_have_lost_their_requester() -> None:
    world = World()
    for _ in range(600):
        await world.queued()
        world.now_ms += 1
    world.now_ms += LOOK_MS
    queue = Spied(world)
    await reaper(world, queue).round()
    assert queue.read == len(Queue)
    assert (await world.ledger.load(MODEL)).ended.requests == 600


async def test_a_producers_job_that_was_taken_before_is_found_under_the_id_it_got() -> None:
    world = World()
    bare = PrefillJob(model=MODEL, reply_to=REPLY_TO, prompt_token_ids=(1, 2, 3))
    await world.queue.publish(Queue.PREFILL, MODEL, encode(bare))
    [delivery] = await world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=1)
    _, key = await Accept(world.parts).job(delivery, Queue.PREFILL)
    world.now_ms += LOOK_MS
    await reaper(world).round()
    assert (await world.read(key)).state is State.QUEUED


async def test_a_queued_request_that_is_late_expires_and_is_not_called_lost() -> None:
    world = World()
    key = await world.queued()
    world.now_ms += 60_000
    await reaper(world).round()
    assert (await world.read(key)).state is State.EXPIRED
