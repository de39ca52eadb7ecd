"""The ``JobQueue`` port: what every adapter does, and what only a real broker can show."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from pdq.adapters.processes import Server
from pdq.core.admission import pull_order
from pdq.core.errors import InvalidMessage
from pdq.core.settings import AdmissionSettings, QueueSettings
from pdq.ports import Delivery, JobQueue, Queue, StoredJob
from tests.conformance.brokers import ACK_WAIT_S, MemoryPlace, NatsPlace, Place, eventually

SETTINGS = QueueSettings(ack_wait_s=ACK_WAIT_S)
FEW_DELIVERIES = QueueSettings(ack_wait_s=ACK_WAIT_S, max_deliver=3)
PREFILL, DECODE = Queue.PREFILL, Queue.DECODE


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> Server | None:
    return request.getfixturevalue("nats") if request.param == "nats" else None


def place_at(server: Server | None, settings: QueueSettings) -> Place:
    return NatsPlace(server.url, settings) if server else MemoryPlace(settings)


@pytest.fixture
async def place(server: Server | None) -> AsyncIterator[Place]:
    place = place_at(server, SETTINGS)
    yield place
    await place.close()


@pytest.fixture
async def queue(place: Place) -> JobQueue:
    return await place.queue()


async def one(queue: JobQueue, model: str, wait_s: float = 5.0) -> Delivery:
    (job,) = await queue.pull(PREFILL, model, limit=1, wait_s=wait_s)
    return job


async def nothing(queue: JobQueue, model: str, wait_s: float = 0.1) -> bool:
    return not await queue.pull(PREFILL, model, limit=8, wait_s=wait_s)


async def drain(queue: JobQueue, model: str, count: int, limit: int = 16) -> list[bytes]:
    """Pull and acknowledge until ``count`` jobs have come."""
    got: list[bytes] = []
    while len(got) < count:
        jobs: Sequence[Delivery] = await queue.pull(PREFILL, model, limit=limit, wait_s=10)
        assert jobs, f"only {len(got)} of {count} came"
        assert len(jobs) <= limit
        for job in jobs:
            got.append(job.data)
            await job.ack()
    return got


async def test_a_published_job_is_delivered_once_and_is_gone_when_acknowledged(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b'{"n": 1}')
    job = await one(queue, model)
    assert job.data == b'{"n": 1}'
    assert job.deliveries == 1
    assert job.published_ms > 1_600_000_000_000
    await job.ack()
    assert await nothing(queue, model, ACK_WAIT_S * 1.5)


async def test_all_jobs_that_nobody_has_acknowledged_can_be_looked_at(queue: JobQueue, model: str) -> None:
    assert await queue.stored(PREFILL, model, 10) == []
    for data in (b"done", b"taken", b"waits"):
        await queue.publish(PREFILL, model, data)
    await queue.publish(PREFILL, model, b"batch", priority="batch")
    await (await one(queue, model)).ack()
    taken = await one(queue, model)
    found = await queue.stored(PREFILL, model, 3)
    assert found is not None
    assert [job.data for job in found] == [b"taken", b"waits", b"batch"]
    assert (found[0].sequence, found[0].published_ms) == (taken.sequence, taken.published_ms)
    assert await queue.stored(PREFILL, model, 2) is None
    assert await queue.stored(DECODE, model, 2) == []
    await taken.ack()


async def test_a_job_is_found_at_the_place_that_its_publisher_was_told_until_somebody_is_done_with_it(
    queue: JobQueue, model: str
) -> None:
    sequence = await queue.publish(PREFILL, model, b"x", message_id=f"{model}-x")
    assert await queue.publish(PREFILL, model, b"x", message_id=f"{model}-x") == sequence
    assert await queue.publish(PREFILL, model, b"y") > sequence
    waits = await queue.find(PREFILL, sequence)
    job = await one(queue, model)
    assert waits == await queue.find(PREFILL, sequence) == StoredJob(job.sequence, job.published_ms, b"x")
    await job.ack()

    async def gone() -> bool:
        return await queue.find(PREFILL, sequence) is None

    await eventually(gone)
    assert await queue.find(DECODE, sequence + 1_000_000) is None


async def test_dead_letters_are_counted_by_model(queue: JobQueue, model: str) -> None:
    assert await queue.dead(model) == 0
    for chosen in (PREFILL, DECODE):
        await queue.publish(chosen, model, b"junk")
        (job,) = await queue.pull(chosen, model, limit=1, wait_s=5)
        await job.reject("invalid_message", "not a job")
    assert await queue.dead(model) == 2
    assert await queue.dead(model + "x") == 0


async def test_jobs_come_in_the_order_of_publishing_and_never_more_than_asked_for(queue: JobQueue, model: str) -> None:
    expected = [b"%d" % n for n in range(50)]
    for data in expected:
        await queue.publish(PREFILL, model, data)
    assert await drain(queue, model, 50, limit=7) == expected


async def test_a_waiting_pull_gets_a_job_that_is_published_later(queue: JobQueue, model: str) -> None:
    pull = asyncio.create_task(one(queue, model))
    assert await nothing(queue, model)
    await queue.publish(PREFILL, model, b"later")
    assert (await pull).data == b"later"


async def test_two_pulls_of_one_process_that_wait_each_get_a_job(queue: JobQueue, model: str) -> None:
    pulls = [asyncio.create_task(one(queue, model)) for _ in range(2)]
    assert await nothing(queue, model)
    for data in (b"1", b"2"):
        await queue.publish(PREFILL, model, data)
    assert {job.data for job in await asyncio.gather(*pulls)} == {b"1", b"2"}


async def test_a_pull_for_no_jobs_gets_none(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b"x")
    assert not await queue.pull(PREFILL, model, limit=0, wait_s=1)
    assert await queue.pull(PREFILL, model, limit=1, wait_s=0)


async def test_queues_and_models_do_not_mix(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b"prefill")
    await queue.publish(DECODE, model, b"decode")
    await queue.publish(PREFILL, model + ".x", b"other")
    assert await drain(queue, model, 1) == [b"prefill"]
    assert await nothing(queue, model)
    (job,) = await queue.pull(DECODE, model, limit=8, wait_s=5)
    assert job.data == b"decode"
    assert await drain(queue, model + ".x", 1) == [b"other"]


async def test_an_interactive_job_overtakes_batch_jobs(queue: JobQueue, model: str) -> None:
    for n in range(20):
        await queue.publish(PREFILL, model, b"batch %d" % n, priority="batch")
    await queue.publish(PREFILL, model, b"now")
    assert (await one(queue, model)).data == b"now"
    assert (await one(queue, model)).data == b"batch 0"
    await queue.publish(PREFILL, model, b"now, too")
    assert b"now, too" in {(await one(queue, model)).data, (await one(queue, model)).data}


async def test_every_so_many_th_pull_takes_batch_while_both_classes_wait(queue: JobQueue, model: str) -> None:
    limits = AdmissionSettings(batch_turn=3)
    for n in range(6):
        await queue.publish(PREFILL, model, b"interactive %d" % n)
        await queue.publish(PREFILL, model, b"batch %d" % n, priority="batch")
    got: list[bytes] = []
    for pulls in range(9):
        (job,) = await queue.pull(PREFILL, model, limit=1, wait_s=5, order=pull_order(pulls, limits))
        got.append(job.data)
        await job.ack()
    assert got[2::3] == [b"batch 0", b"batch 1", b"batch 2"]
    assert got[0::3] + got[1::3] == [b"interactive %d" % n for n in (0, 2, 4, 1, 3, 5)]


async def test_a_class_whose_turn_it_is_not_is_served_when_the_other_one_is_empty(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b"now")
    (job,) = await queue.pull(PREFILL, model, limit=1, wait_s=5, order=("batch", "interactive"))
    assert job.data == b"now"
    pull = asyncio.create_task(queue.pull(PREFILL, model, limit=1, wait_s=5, order=("batch", "interactive")))
    assert await nothing(queue, model)
    await queue.publish(PREFILL, model, b"later")
    assert [job.data for job in await pull] == [b"later"]


async def test_an_unacknowledged_job_is_delivered_again_as_the_same_one(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b"x")
    first = await one(queue, model)
    again = await one(queue, model)
    assert (again.data, again.sequence, again.published_ms) == (first.data, first.sequence, first.published_ms)
    assert again.deliveries == 2
    await again.ack()
    assert await nothing(queue, model, ACK_WAIT_S * 1.5)


async def test_a_job_in_progress_is_not_delivered_again_until_its_holder_falls_silent(
    queue: JobQueue, model: str
) -> None:
    await queue.publish(PREFILL, model, b"x")
    job = await one(queue, model)
    for _ in range(8):
        await job.in_progress()
        assert await nothing(queue, model, ACK_WAIT_S / 5)
    assert (await one(queue, model)).deliveries == 2


async def test_a_job_to_be_retried_comes_back_at_once_or_after_its_delay(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b"x")
    await (await one(queue, model)).retry(0)
    job = await one(queue, model)
    assert job.deliveries == 2
    await job.retry(3 * ACK_WAIT_S)
    assert await nothing(queue, model, ACK_WAIT_S * 1.5)
    assert (await one(queue, model)).deliveries == 3


async def test_a_repeated_message_id_stores_nothing(queue: JobQueue, model: str) -> None:
    for data in (b"first", b"second"):
        await queue.publish(PREFILL, model, data, message_id=f"id of {model}")
    assert await drain(queue, model, 1) == [b"first"]
    assert await nothing(queue, model)


async def test_a_job_that_waits_longer_than_its_ttl_is_gone(queue: JobQueue, model: str) -> None:
    await queue.publish(PREFILL, model, b"stays")
    await queue.publish(PREFILL, model, b"goes", ttl_s=0.9)
    assert await queue.depth(PREFILL, model) == (2, 0)

    async def expired() -> bool:
        return await queue.depth(PREFILL, model) == (1, 0)

    await eventually(expired)
    assert await drain(queue, model, 1) == [b"stays"]
    assert await nothing(queue, model)


async def test_a_rejected_job_lies_in_the_dead_letters_with_its_reason(
    place: Place, queue: JobQueue, model: str
) -> None:
    body = b'\xff\x00 not JSON {"'
    await queue.publish(PREFILL, model, body)
    job = await one(queue, model)
    await job.reject("invalid_message", "not a valid PrefillJob:\nblah ü")
    (dead,) = await place.dead(PREFILL, model)
    assert dead.code == "invalid_message"
    assert dead.detail.split() == ["not", "a", "valid", "PrefillJob:", "blah", "ü"]
    assert dead.data == body
    assert await nothing(queue, model, ACK_WAIT_S * 1.5)
    assert await queue.depth(PREFILL, model) == (0, 0)


async def test_depth_tells_waiting_jobs_from_those_in_hands(queue: JobQueue, model: str) -> None:
    assert await queue.depth(PREFILL, model) == (0, 0)
    for n in range(5):
        await queue.publish(PREFILL, model, b"x", priority="batch" if n % 2 else "interactive")
    assert await queue.depth(PREFILL, model) == (5, 0)
    jobs = await queue.pull(PREFILL, model, limit=2, wait_s=5)
    assert await queue.depth(PREFILL, model) == (3, 2)
    for job in jobs:
        await job.ack()
    await drain(queue, model, 3)

    async def empty() -> bool:
        return await queue.depth(PREFILL, model) == (0, 0)

    await eventually(empty)


async def test_several_processes_share_a_queue_and_each_job_goes_to_one(place: Place, model: str) -> None:
    queues = [await place.queue() for _ in range(3)]
    taken: list[bytes] = []
    complete = asyncio.Event()

    async def work(queue: JobQueue) -> None:
        while not complete.is_set():
            for job in await queue.pull(PREFILL, model, limit=4, wait_s=0.2):
                taken.append(job.data)
                await job.ack()
            if len(taken) >= 200:
                complete.set()

    workers = [asyncio.create_task(work(queue)) for queue in queues]
    expected = {b"%d" % n for n in range(200)}
    await asyncio.gather(*(queues[0].publish(PREFILL, model, data) for data in expected))
    await asyncio.wait_for(complete.wait(), 20)
    await asyncio.gather(*workers)
    assert len(taken) == 200
    assert set(taken) == expected


async def test_a_job_for_a_cancelled_pull_is_not_held_back(place: Place, model: str) -> None:
    gone, here = await place.queue(), await place.queue()
    for number in range(3):
        pull = asyncio.create_task(gone.pull(PREFILL, model, limit=8, wait_s=30))
        assert await nothing(here, model)
        pull.cancel()
        await asyncio.wait([pull])
        await here.publish(PREFILL, model, b"%d" % number)
        assert await drain(here, model, 1) == [b"%d" % number]


async def test_pulls_cancelled_at_any_moment_lose_nothing(place: Place, model: str) -> None:
    nervous, calm = await place.queue(), await place.queue()
    expected = {b"%d" % n for n in range(60)}
    got: set[bytes] = set()
    for turns, data in enumerate(sorted(expected)):
        publish = asyncio.create_task(calm.publish(PREFILL, model, data))
        pull = asyncio.create_task(nervous.pull(PREFILL, model, limit=2, wait_s=5))
        for _ in range(turns):
            await asyncio.sleep(0)
        pull.cancel()
        await asyncio.wait([pull, publish])
        if not pull.cancelled():
            for job in pull.result():
                got.add(job.data)
                await job.ack()
    got |= set(await drain(calm, model, len(expected - got)))
    assert got == expected


async def test_a_job_that_nobody_ever_acknowledges_is_buried_and_announced(server: Server | None, model: str) -> None:
    place = place_at(server, FEW_DELIVERIES)
    queue, watcher = await place.queue(), await place.queue()
    announced: asyncio.Queue[tuple[Queue, bytes]] = asyncio.Queue()

    async def on_exhausted(which: Queue, data: bytes) -> None:
        announced.put_nowait((which, data))

    watch = await watcher.watch_exhausted(on_exhausted)
    await queue.publish(PREFILL, model, b"poison")
    for deliveries in range(1, FEW_DELIVERIES.max_deliver + 1):
        assert (await one(queue, model)).deliveries == deliveries

    async def buried() -> bool:
        assert await nothing(queue, model)
        return not announced.empty()

    await eventually(buried)
    assert announced.get_nowait() == (PREFILL, b"poison")
    (dead,) = await place.dead(PREFILL, model)
    assert (dead.code, dead.data) == ("max_deliveries", b"poison")
    assert await queue.depth(PREFILL, model) == (0, 0)
    await watch.close()
    await place.close()


async def test_a_job_over_the_size_limit_is_refused_and_does_no_harm(queue: JobQueue, model: str) -> None:
    with pytest.raises(InvalidMessage, match="limit"):
        await queue.publish(PREFILL, model, b"x" * (8 * 1024 * 1024 + 1))
    with pytest.raises(InvalidMessage, match="limit"):
        await queue.publish(PREFILL, model, b"x" * (8 * 1024 * 1024), message_id="big")
    await queue.publish(PREFILL, model, b"x" * (7 * 1024 * 1024))
    assert len((await drain(queue, model, 1))[0]) == 7 * 1024 * 1024


async def test_many_publishes_at_once_are_all_stored(queue: JobQueue, model: str) -> None:
    expected = {b"%d" % n for n in range(2000)}
    await asyncio.gather(*(queue.publish(PREFILL, model, data) for data in expected))
    assert set(await drain(queue, model, 2000, limit=256)) == expected
