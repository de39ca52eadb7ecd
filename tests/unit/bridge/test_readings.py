"""What the bridge reports of queues, records and workers."""

from collections.abc import Sequence

from pdq.adapters.memory.ledger import MemoryLedger
from pdq.adapters.memory.queue import MemoryQueue
from pdq.adapters.memory.registry import MemoryRegistry
from pdq.bridge.metrics import Metrics
from pdq.bridge.readings import FRESH_S, Readings
from pdq.core.errors import Unavailable
from pdq.core.handoff import Event
from pdq.core.lease import RecordKey
from pdq.core.settings import LeaseSettings, QueueSettings
from pdq.ports import NewRecord, Pool, Queue, WorkerInfo
from tests.unit.bridge.harness import BLOCKS, MODEL, rig, worker_info


class Registry(MemoryRegistry):
    readings = 0
    down = False

    async def workers(self, model: str | None = None) -> Sequence[WorkerInfo]:
        self.readings += 1
        if self.down:
            raise Unavailable("the registry is down", retry_after_s=1)
        return await super().workers(model)


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.registry = Registry()
        self.queue = MemoryQueue(QueueSettings())
        self.ledger_ms = 1_700_000_000_000
        self.ledger = MemoryLedger(LeaseSettings(), clock=lambda: self.ledger_ms)
        self.readings = Readings([MODEL], self.queue, self.ledger, self.registry, lambda: self.now)
        self.metrics = Metrics([])
        self.metrics.registry.register(self.readings)

    async def scrape(self) -> list[str]:
        await self.readings.refresh()
        return self.metrics.render().decode().splitlines()


async def test_waiting_and_taken_jobs_are_told_apart() -> None:
    world = World()
    for _ in range(3):
        await world.queue.publish(Queue.PREFILL, MODEL, b"job")
    await world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=1)
    text = await world.scrape()
    assert f'pdq_queue_waiting{{model="{MODEL}",queue="prefill"}} 2.0' in text
    assert f'pdq_queue_taken{{model="{MODEL}",queue="prefill"}} 1.0' in text
    assert f'pdq_queue_waiting{{model="{MODEL}",queue="decode"}} 0.0' in text


async def test_dead_letters_are_counted() -> None:
    world = World()
    await world.queue.publish(Queue.DECODE, MODEL, b"junk")
    [delivery] = await world.queue.pull(Queue.DECODE, MODEL, limit=1, wait_s=1)
    await delivery.reject("invalid_message", "not a job")
    assert f'pdq_dead_letters{{model="{MODEL}"}} 1.0' in await world.scrape()


async def test_what_waits_for_prefill_is_told_by_class_over_all_tenants() -> None:
    world = World()
    for number, (tenant, priority) in enumerate((("a", "batch"), ("b", "batch"), ("", "interactive"))):
        new = NewRecord(RecordKey(MODEL, f"r{number}"), "r", 10, 5, 60_000, "s", tenant=tenant, priority=priority)  # type: ignore[arg-type]
        await world.ledger.enqueue(new)
    await world.ledger.acquire(RecordKey(MODEL, "r2"), Event.BEGIN, "prefill-1", 10_000)
    text = await world.scrape()
    assert f'pdq_queued_requests{{class="batch",model="{MODEL}"}} 2.0' in text
    assert f'pdq_queued_prompt_tokens{{class="batch",model="{MODEL}"}} 20.0' in text
    assert f'pdq_queued_requests{{class="interactive",model="{MODEL}"}} 0.0' in text


async def test_a_request_that_only_waits_is_not_overdue() -> None:
    world = World()
    for number, timeout_ms in enumerate((3_600_000, 1)):
        await world.ledger.enqueue(NewRecord(RecordKey(MODEL, f"r{number}"), "r", 10, 5, timeout_ms, "s"))
    world.ledger_ms += LeaseSettings().ttl_ms
    assert len(await world.ledger.due(MODEL, 10)) == 2
    assert f'pdq_requests_overdue{{model="{MODEL}"}} 1.0' in await world.scrape()


async def test_a_pool_without_workers_is_reported_as_zero_not_left_out() -> None:
    world = World()
    await world.registry.announce(worker_info(Pool.PREFILL), 60_000)
    text = await world.scrape()
    assert f'pdq_workers{{model="{MODEL}",pool="prefill",state="ready"}} 1.0' in text
    assert f'pdq_workers{{model="{MODEL}",pool="decode",state="ready"}} 0.0' in text
    assert f'pdq_kv_blocks_free{{model="{MODEL}",pool="prefill"}} {BLOCKS}.0' in text


async def test_what_cannot_be_read_is_missing_and_said_to_be() -> None:
    world = World()
    assert "pdq_readings_ok 1.0" in await world.scrape()
    world.registry.down = True
    world.now += FRESH_S
    text = await world.scrape()
    assert "pdq_readings_ok 0.0" in text
    assert not [line for line in text if line.startswith(("pdq_workers", "pdq_queue", "pdq_requests"))]


async def test_the_system_is_read_once_a_second_however_many_scrape() -> None:
    world = World()
    for _ in range(5):
        await world.scrape()
    assert world.registry.readings == 1
    world.now += FRESH_S
    await world.scrape()
    assert world.registry.readings == 2


async def test_the_bridge_shows_them_under_metrics() -> None:
    async with rig() as world, world.http() as client:
        text = (await client.get("/metrics")).text
        assert f'pdq_workers{{model="{MODEL}",pool="decode",state="ready"}} 1.0' in text
        assert f'pdq_requests{{model="{MODEL}",state="ready"}} 0.0' in text
        assert f'pdq_requests_overdue{{model="{MODEL}"}} 0.0' in text
