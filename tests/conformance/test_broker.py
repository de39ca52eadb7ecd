"""What only a broker of one's own can show: limits, restarts, lost state, and streams that others made."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdq.adapters import nats as nats_adapter
from pdq.adapters.processes import Server, nats_server
from pdq.core import names
from pdq.core.errors import InvalidSettings, Overloaded, Unavailable
from pdq.core.messages import StatusAnswer, StatusQuestion, encode
from pdq.core.settings import NatsSettings, QueueSettings
from pdq.ports import JobQueue, Queue
from tests.conformance.brokers import NatsPlace, eventually
from tests.conformance.test_queue import SETTINGS, drain, nothing, one, place_at

PREFILL, DECODE = Queue.PREFILL, Queue.DECODE


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[Server]:
    server = await nats_server(tmp_path / "nats").start()
    yield server
    await server.stop()


@pytest.mark.parametrize("kind", ["memory", "nats"])
async def test_a_full_queue_refuses_and_takes_again_when_there_is_room(
    kind: str, own_server: Server, model: str
) -> None:
    settings = QueueSettings(max_messages=3)
    place = place_at(own_server if kind == "nats" else None, settings)
    queue = await place.queue()
    for _ in range(3):
        await queue.publish(PREFILL, model, b"x")
    with pytest.raises(Overloaded, match="maximum messages"):
        await queue.publish(PREFILL, model, b"x")
    await queue.publish(DECODE, model, b"another queue has room")
    await drain(queue, model, 1, limit=1)

    async def takes_again() -> bool:
        try:
            await queue.publish(PREFILL, model, b"x")
        except Overloaded:
            return False
        return True

    await eventually(takes_again)
    await place.close()


async def test_jobs_survive_a_restart_of_the_broker_and_everything_works_again(own_server: Server, model: str) -> None:
    place = NatsPlace(own_server.url, QueueSettings(ack_wait_s=60))
    queue = await place.queue()
    for data in (b"in hand", b"waiting"):
        await queue.publish(PREFILL, model, data)
    in_hand = await one(queue, model)
    waiting_pull = asyncio.create_task(queue.pull(DECODE, model, limit=4, wait_s=30))
    assert await nothing(queue, model + "2")

    await own_server.stop()

    async def noticed() -> bool:
        return not queue.connection.connected

    await eventually(noticed)
    with pytest.raises(Unavailable):
        await queue.publish(PREFILL, model, b"nobody there")
    with pytest.raises(Unavailable):
        await queue.pull(PREFILL, model, limit=1, wait_s=0)
    await in_hand.ack()  # goes out when the broker is back
    pull = asyncio.create_task(drain(queue, model, 1))
    await own_server.start()

    assert await pull == [b"waiting"]
    await queue.publish(DECODE, model, b"to a pull from before")
    assert [job.data for job in await waiting_pull] == [b"to a pull from before"]

    async def all_acknowledged() -> bool:
        return await queue.depth(PREFILL, model) == (0, 0)

    await eventually(all_acknowledged)
    await queue.publish(PREFILL, model, b"after")
    assert await drain(queue, model, 1) == [b"after"]
    await place.close()


async def test_a_broker_that_lost_everything_is_set_up_again(tmp_path: Path, model: str) -> None:
    server = await nats_server(tmp_path / "first").start()
    place = NatsPlace(server.url, SETTINGS)
    queue = await place.queue()
    assert await nothing(queue, model)
    await server.stop()
    empty = await nats_server(tmp_path / "second", port=server.port).start()

    async def published() -> bool:
        try:
            await queue.publish(PREFILL, model, b"x", message_id="x")
        except Unavailable:
            return False
        return True

    await eventually(published)
    assert await drain(queue, model, 1) == [b"x"]
    await place.close()
    await empty.stop()


async def test_streams_that_were_made_anew_say_so(own_server: Server, model: str) -> None:
    """Sequences count from one again: a place from before is another job's now."""
    place = NatsPlace(own_server.url, SETTINGS)
    queue, connection = await place.queue(), await place.connection()
    await queue.publish(PREFILL, model, b"x")
    before = await queue.created_ms(PREFILL)
    job = await queue.find(PREFILL, 1)
    assert job is not None
    assert before <= job.published_ms
    await connection.request("$JS.API.STREAM.DELETE.PDQ_PREFILL", b"", timeout_s=5)
    assert await queue.publish(PREFILL, model, b"y") == 1
    assert await queue.created_ms(PREFILL) > job.published_ms
    await place.close()


async def test_an_answer_goes_nowhere_but_to_whoever_asked(own_server: Server, model: str) -> None:
    """Who asks names the subject of the answer; who answers may publish where the asker may not."""
    place = NatsPlace(own_server.url, SETTINGS)
    queue, bus, connection = await place.queue(), await place.bus(), await place.connection()

    async def answer(question: StatusQuestion) -> StatusAnswer:
        return StatusAnswer("unknown")

    await bus.answer_status(answer)
    question = StatusQuestion(model, "PDQ_PREFILL", 1, "pdq.tokens.a")
    wrong = [names.dead_subject("prefill", model), names.prefill_subject(model), names.STATUS_SUBJECT, ""]
    wrong += [names.worker_subject("w"), "$JS.API.STREAM.PURGE.PDQ_PREFILL"]
    await queue.publish(PREFILL, model, b"x")
    for reply in wrong:
        await connection.publish(names.STATUS_SUBJECT, encode(question), reply)
    assert await bus.ask_status(question, 5) == StatusAnswer("unknown")
    assert bus.junk == len(wrong)
    assert await queue.dead(model) == 0
    assert await drain(queue, model, 1) == [b"x"]
    assert await nothing(queue, model)
    await place.close()


async def test_closing_while_the_broker_is_away_is_quiet(own_server: Server, model: str) -> None:
    connection = await nats_adapter.connect(NatsSettings(url=own_server.url), "test")
    own_server.child.signal(signal.SIGKILL)
    await connection.publish("pdq.tokens.a", b"x" * 1000)
    await connection.close()
    assert connection.closed


async def test_a_consumer_that_vanished_is_made_again(own_server: Server, model: str) -> None:
    place = NatsPlace(own_server.url, SETTINGS)
    queue = await place.queue()
    connection = await place.connection()
    waiting = asyncio.create_task(queue.pull(PREFILL, model, limit=1, wait_s=20))
    assert await nothing(queue, model)
    for priority in names.PRIORITIES:
        consumer = names.consumer(model, priority)
        await connection.request(f"$JS.API.CONSUMER.DELETE.{names.PREFILL_STREAM}.{consumer}", b"", timeout_s=5)
    await queue.publish(PREFILL, model, b"x")
    (job,) = await waiting
    assert job.data == b"x"
    await place.close()


async def test_streams_follow_the_settings_whoever_comes_first(own_server: Server, model: str) -> None:
    place = NatsPlace(own_server.url, QueueSettings(max_messages=1))
    first = await place.queue()
    connection = await place.connection()
    wider = [nats_adapter.NatsQueue(connection, QueueSettings(max_messages=1000)) for _ in range(4)]
    await asyncio.gather(*(queue.ensure_streams() for queue in wider))
    for _ in range(3):
        await first.publish(PREFILL, model, b"x")
    await place.close()


async def test_many_processes_may_set_up_an_empty_broker_at_once(own_server: Server) -> None:
    place = NatsPlace(own_server.url, SETTINGS)
    await asyncio.gather(*(place.queue() for _ in range(8)))
    await place.close()


async def test_a_stream_that_cannot_be_changed_is_reported(own_server: Server) -> None:
    place = NatsPlace(own_server.url, SETTINGS)
    connection = await place.connection()
    foreign = b'{"name":"PDQ_PREFILL","subjects":["something.else"],"retention":"limits","storage":"memory"}'
    await connection.request("$JS.API.STREAM.CREATE.PDQ_PREFILL", foreign, timeout_s=5)
    with pytest.raises(InvalidSettings, match="PDQ_PREFILL"):
        await place.queue()
    with pytest.raises(InvalidSettings, match="replicas"):
        await nats_adapter.NatsQueue(connection, QueueSettings(replicas=3)).ensure_streams()
    await place.close()


async def test_a_job_for_a_priority_that_nobody_serves_is_refused(own_server: Server, model: str) -> None:
    place = NatsPlace(own_server.url, SETTINGS)
    await place.queue()
    reply = await (await place.connection()).request(names.prefill_subject(model, "urgent"), b"x", timeout_s=5)
    assert reply.headers is not None
    assert reply.headers["Status"] == "503"
    await place.close()


async def test_nobody_at_the_address_is_unavailable_and_says_where(tmp_path: Path) -> None:
    absent = nats_server(tmp_path)
    settings = NatsSettings(url=absent.url.replace("nats://", "nats://user:hunter2@"), connect_timeout_s=0.3)
    with pytest.raises(Unavailable, match=f"127.0.0.1:{absent.port}") as caught:
        await nats_adapter.connect(settings, name="test")
    assert "hunter2" not in str(caught.value)


async def test_no_job_is_lost_when_the_broker_is_killed_and_restarted_under_load(
    own_server: Server, model: str
) -> None:
    place = NatsPlace(own_server.url, SETTINGS)
    producer, *workers = [await place.queue() for _ in range(3)]
    expected = {b"%d" % n for n in range(600)}
    done: set[bytes] = set()
    complete = asyncio.Event()

    async def publish(data: bytes) -> None:
        while True:
            try:
                return await producer.publish(PREFILL, model, data, message_id=f"{model} {data.decode()}")
            except Unavailable:
                await asyncio.sleep(0.05)

    async def work(queue: JobQueue) -> None:
        while not complete.is_set():
            try:
                for job in await queue.pull(PREFILL, model, limit=8, wait_s=0.5):
                    await job.ack()
                    done.add(job.data)
            except Unavailable:
                await asyncio.sleep(0.05)
            if done == expected:
                complete.set()

    async def interrupt() -> None:
        for how in (signal.SIGKILL, signal.SIGTERM):
            reached = len(done) + 100

            async def far_enough(reached: int = reached) -> bool:
                return len(done) >= reached

            await eventually(far_enough, within_s=30)
            own_server.child.signal(how)
            await own_server.child.wait()
            await own_server.start()

    async def publish_all() -> None:
        for data in sorted(expected):
            await publish(data)

    working = [asyncio.create_task(work(queue)) for queue in workers]
    await asyncio.gather(publish_all(), interrupt())
    await asyncio.wait_for(complete.wait(), 30)
    await asyncio.gather(*working)
    await place.close()
