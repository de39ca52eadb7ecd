"""What a producer is told of its job, and what is sent to it again."""

import pytest
from msgspec.structs import replace

from pdq.core import names
from pdq.core.handoff import Event
from pdq.core.ids import derive_request_id
from pdq.core.lease import RecordKey
from pdq.core.messages import (
    Control,
    End,
    PrefillJob,
    Resend,
    StatusAnswer,
    StatusQuestion,
    TokenEntry,
    TokenFrame,
    Usage,
    encode,
)
from pdq.ports import Changes, NewRecord, Pool, Queue, Record
from pdq.stages.accept import Accept
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox
from pdq.stages.status import Status
from tests.kv import until
from tests.unit.bridge.harness import worker_info
from tests.unit.stages.parts import MODEL, REPLY_TO, TTL_MS, World

STREAM = Queue.PREFILL.stream
REQUEST = "0197c0de-0000-7000-8000-000000000001"


class Desk:
    """A world in which a producer's job is the first of the prefill queue, and somebody who answers for it."""

    def __init__(self) -> None:
        self.world = World()
        endings = Endings(self.world.ledger, self.world.bus, Outbox(self.world.bus, "reaper"), "reaper")
        self._status = Status(self.world.ledger, self.world.queue, self.world.bus, self.world.registry, endings)

    async def ask(self, next_seq: int = 0, sequence: int = 1, reply_to: str = REPLY_TO) -> StatusAnswer:
        return await self._status.answer(StatusQuestion(MODEL, STREAM, sequence, reply_to, next_seq))

    async def accepted(self) -> Record:
        key = RecordKey(MODEL, REQUEST)
        new = NewRecord(key, REPLY_TO, 10, 20, 60_000, "secret", job=names.place(STREAM, 1))
        record, _ = await self.world.ledger.enqueue(new)
        return record

    async def running(self) -> Record:
        """With a decode worker that has sent some of it."""
        record = await self.accepted()
        begun = await self.world.ledger.acquire(record.key, Event.BEGIN, "prefill-0", TTL_MS)
        await self.world.ledger.apply(record.key, Event.READY, epoch=begun.epoch)
        claimed = await self.world.ledger.acquire(record.key, Event.CLAIM, "decode-1", TTL_MS)
        return await self.world.ledger.apply(record.key, Event.FETCHED, epoch=claimed.epoch)

    async def done(self, *, emitted: int = 5) -> Record:
        record = await self.running()
        changes = Changes(ended_code="stop", emitted=emitted)
        return await self.world.ledger.apply(record.key, Event.FINISH, epoch=record.epoch, changes=changes)

    async def hear(self, worker: str) -> list[Control]:
        heard: list[Control] = []
        await self.world.bus.on_control(names.worker_subject(worker), heard.append)
        return heard


async def the_end(desk: Desk) -> tuple[int, End]:
    """The only thing that the requester hears."""
    await until(lambda: bool(desk.world.got))
    [entry] = desk.world.got
    assert entry.end is not None
    return entry.seq, entry.end


@pytest.fixture
async def desk() -> Desk:
    desk = Desk()
    await desk.world.listen()
    return desk


async def test_a_job_in_the_queue_waits(desk: Desk) -> None:
    await desk.world.queue.publish(Queue.PREFILL, MODEL, b"job")
    assert await desk.ask() == StatusAnswer("waiting")


async def test_a_job_in_a_workers_hands_waits_until_it_has_a_record(desk: Desk) -> None:
    await desk.world.queue.publish(Queue.PREFILL, MODEL, b"job")
    await desk.world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=0)
    assert await desk.ask() == StatusAnswer("waiting")
    await desk.accepted()
    assert await desk.ask() == StatusAnswer("queued", REQUEST)


async def test_a_job_that_a_worker_was_done_with_just_now_is_not_unknown(desk: Desk) -> None:
    """Between the two questions, to the ledger and to the queue, it got its record and left the queue."""
    find = desk.world.queue.find

    async def find_late(queue: Queue, sequence: int) -> object:
        await desk.accepted()
        return await find(queue, sequence)

    desk.world.queue.find = find_late  # type: ignore[method-assign, assignment]
    assert await desk.ask() == StatusAnswer("queued", REQUEST)


@pytest.mark.parametrize("stream", ["PDQ_PREFILL", "PDQ_LOCAL", "ORDERS"])
async def test_a_job_that_never_was_is_unknown(stream: str) -> None:
    status = Desk()._status
    assert await status.answer(StatusQuestion(MODEL, stream, 7, REPLY_TO)) == StatusAnswer("unknown")


async def test_nobody_learns_of_a_job_with_another_reply_subject(desk: Desk) -> None:
    await desk.done()
    assert await desk.ask(reply_to="pdq.tokens.another") == StatusAnswer("unknown")


async def test_a_request_is_found_by_the_job_that_a_worker_accepted_for_a_producer(desk: Desk) -> None:
    job = PrefillJob(MODEL, REPLY_TO, prompt="hello")
    sequence = await desk.world.queue.publish(Queue.PREFILL, MODEL, encode(job))
    [delivery] = await desk.world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=0)
    await Accept(desk.world.parts).job(delivery, Queue.PREFILL)
    await delivery.ack()
    salt = await desk.world.ledger.salt()
    derived = derive_request_id(delivery.published_ms, salt, "prefill", MODEL, sequence)
    assert await desk.ask(sequence=sequence) == StatusAnswer("queued", derived)


async def test_the_worker_that_streams_is_told_to_send_what_is_missing(desk: Desk) -> None:
    await desk.running()
    heard = await desk.hear("decode-1")
    assert await desk.ask(next_seq=3) == StatusAnswer("fetched", REQUEST)
    await until(lambda: heard == [Resend(REQUEST, 3, REPLY_TO)])


async def test_the_worker_that_ended_it_well_is_told_to_send_what_is_missing_while_it_lives(desk: Desk) -> None:
    await desk.done()
    decoder = replace(worker_info(Pool.DECODE), worker="decode-1", model=MODEL)
    await desk.world.registry.announce(decoder, ttl_ms=60_000)
    heard = await desk.hear("decode-1")
    assert await desk.ask(next_seq=3) == StatusAnswer("done", REQUEST)
    await until(lambda: heard == [Resend(REQUEST, 3, REPLY_TO)])


async def test_when_that_worker_is_gone_and_only_the_end_is_missing_the_record_has_it(desk: Desk) -> None:
    await desk.done(emitted=5)
    assert await desk.ask(next_seq=5) == StatusAnswer("done", REQUEST)
    assert await the_end(desk) == (5, End("done", "stop", usage=Usage(10, 5)))


async def test_when_that_worker_is_gone_with_tokens_the_stream_fails(desk: Desk) -> None:
    await desk.done(emitted=5)
    await desk.ask(next_seq=3)
    seq, end = await the_end(desk)
    assert end.error is not None
    assert (seq, end.state, end.error.code) == (3, "failed", "stream_lost")


@pytest.mark.parametrize("event", [Event.FAIL, Event.CANCEL])
async def test_a_bad_end_is_told_again_at_the_place_where_the_producer_is(desk: Desk, event: Event) -> None:
    record = await desk.running()
    changes = Changes(ended_code="why", ended_message="because", emitted=5)
    ended = await desk.world.ledger.apply(record.key, event, worker="reaper", changes=changes)
    assert await desk.ask(next_seq=2) == StatusAnswer(ended.state.value, REQUEST)  # type: ignore[arg-type]
    seq, end = await the_end(desk)
    assert end.error is not None
    assert (seq, end.state, end.error.message) == (2, ended.state.value, "because")


async def worker_is_asked(desk: Desk, worker: str, seq: int) -> list[TokenEntry]:
    """What the requester gets when ``worker`` is told to send again."""
    world = desk.world
    endings = Endings(world.ledger, world.bus, Outbox(world.bus, worker), worker)
    await endings.resend(MODEL, Resend(REQUEST, seq, REPLY_TO))
    after = TokenEntry("after", 0, (1,), ("a",))
    await world.bus.send(REPLY_TO, TokenFrame(worker, (after,)))
    await until(lambda: after in world.got)
    return [entry for entry in world.got if entry != after]


async def test_a_worker_that_has_forgotten_a_request_which_it_ended_says_what_the_record_says(desk: Desk) -> None:
    await desk.done(emitted=5)
    [entry] = await worker_is_asked(desk, "decode-1", 5)
    assert (entry.seq, entry.end) == (5, End("done", "stop", usage=Usage(10, 5)))


async def test_a_worker_says_nothing_of_a_request_that_another_one_ended(desk: Desk) -> None:
    await desk.done(emitted=5)
    assert await worker_is_asked(desk, "decode-2", 3) == []


async def test_a_worker_says_nothing_of_a_request_that_goes_on(desk: Desk) -> None:
    await desk.running()
    assert await worker_is_asked(desk, "decode-1", 3) == []
