"""What a producer is told of its job, and what is sent to it again."""

import pytest
from msgspec.structs import replace

from pdq.adapters.memory.queue import MemoryQueue
from pdq.core import names
from pdq.core.handoff import Event
from pdq.core.ids import minted_ms
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
from pdq.core.settings import QueueSettings
from pdq.ports import Changes, NewRecord, Pool, Queue, Record
from pdq.stages.accept import Accept
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox
from pdq.stages.status import Status
from tests.kv import until
from tests.unit.bridge.harness import worker_info
from tests.unit.stages.parts import MODEL, REPLY_TO, TTL_MS, World

STREAM = Queue.PREFILL.stream
REQUEST = "03bb2cc3-d800-7000-8000-000000000001"
"""Of the year 2100: younger than any queue of a test."""
JOB = encode(PrefillJob(MODEL, REPLY_TO, prompt="hello"))


class Desk:
    """A world in which a producer's job is the first of the prefill queue, and somebody who answers for it."""

    def __init__(self) -> None:
        self.world = World()

    async def ask(
        self, next_seq: int = 0, *, stream: str = STREAM, sequence: int = 1, reply_to: str = REPLY_TO
    ) -> StatusAnswer:
        world = self.world
        endings = Endings(world.ledger, world.bus, Outbox(world.bus, "reaper"), "reaper")
        status = Status(world.ledger, world.queue, world.bus, world.registry, endings)
        return await status.answer(StatusQuestion(MODEL, stream, sequence, reply_to, next_seq))

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


class MadeAnew(MemoryQueue):
    async def created_ms(self, queue: Queue) -> int:
        return minted_ms(REQUEST) + 1


@pytest.fixture
async def desk() -> Desk:
    desk = Desk()
    await desk.world.listen()
    return desk


async def test_a_job_in_the_queue_or_in_a_workers_hands_waits_until_it_has_a_record(desk: Desk) -> None:
    await desk.world.queue.publish(Queue.PREFILL, MODEL, JOB)
    assert await desk.ask() == StatusAnswer("waiting")
    [delivery] = await desk.world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=0)
    assert await desk.ask() == StatusAnswer("waiting")
    _, key = await Accept(desk.world.parts).job(delivery, Queue.PREFILL)
    assert await desk.ask() == StatusAnswer("queued", key.request_id)
    await delivery.ack()
    assert await desk.ask() == StatusAnswer("queued", key.request_id)


@pytest.mark.parametrize("stream", ["PDQ_PREFILL", "PDQ_LOCAL", "ORDERS"])
async def test_a_job_that_never_was_is_unknown(desk: Desk, stream: str) -> None:
    assert await desk.ask(stream=stream, sequence=7) == StatusAnswer("unknown")


@pytest.mark.parametrize("done_with", [False, True])
async def test_a_place_that_is_used_again_leads_to_no_earlier_request(desk: Desk, done_with: bool) -> None:
    """The stream was lost and made anew; a producer may keep its subject for all its requests."""
    await desk.done()
    queue = desk.world.queue = MadeAnew(QueueSettings())
    await queue.publish(Queue.PREFILL, MODEL, JOB)
    if done_with:
        [delivery] = await queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=0)
        await delivery.ack()
    assert await desk.ask() == StatusAnswer("unknown" if done_with else "waiting")
    assert not desk.world.got


@pytest.mark.parametrize(
    "job",
    [
        PrefillJob(MODEL, "pdq.tokens.another", prompt="secret"),
        PrefillJob("another", REPLY_TO, prompt="secret"),
        PrefillJob(MODEL, REPLY_TO, prompt_token_ids=(1,), request_id=REQUEST),
    ],
    ids=["another's", "of another model", "published by pdq itself"],
)
async def test_nobody_learns_of_a_job_in_the_queue_that_is_not_his(desk: Desk, job: PrefillJob) -> None:
    await desk.world.queue.publish(Queue.PREFILL, job.model, encode(job))
    assert await desk.ask() == StatusAnswer("unknown")


async def test_junk_in_the_queue_is_unknown(desk: Desk) -> None:
    await desk.world.queue.publish(Queue.PREFILL, MODEL, b"\xff[")
    assert await desk.ask() == StatusAnswer("unknown")


async def test_nobody_learns_of_a_job_with_another_reply_subject(desk: Desk) -> None:
    await desk.done()
    assert await desk.ask(reply_to="pdq.tokens.another") == StatusAnswer("unknown")


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


async def test_what_a_producer_claims_to_have_beyond_the_end_is_not_believed(desk: Desk) -> None:
    await desk.done(emitted=5)
    await desk.ask(next_seq=2**31 - 1)
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


async def test_a_worker_that_is_asked_for_more_than_there_is_forgets_nothing_of_what_it_sent(desk: Desk) -> None:
    await desk.done(emitted=2)
    world = desk.world
    outbox = Outbox(world.bus, "decode-1")
    sent = TokenEntry(REQUEST, 0, (7, 8), ("a", "b"), end=End("done", "stop", usage=Usage(10, 2)))
    await outbox.send(REPLY_TO, (sent,))
    endings = Endings(world.ledger, world.bus, outbox, "decode-1")
    for seq in (2**31 - 1, 0):
        await endings.resend(MODEL, Resend(REQUEST, seq, REPLY_TO))
    await until(lambda: len(world.got) == 3)
    beyond = TokenEntry(REQUEST, 2, end=End("done", "stop", usage=Usage(10, 2)))
    assert world.got == [sent, beyond, sent]


async def test_a_worker_says_nothing_of_a_request_that_another_one_ended(desk: Desk) -> None:
    await desk.done(emitted=5)
    assert await worker_is_asked(desk, "decode-2", 3) == []


async def test_a_worker_says_nothing_of_a_request_that_goes_on(desk: Desk) -> None:
    await desk.running()
    assert await worker_is_asked(desk, "decode-1", 3) == []
