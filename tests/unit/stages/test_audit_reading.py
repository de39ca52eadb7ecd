"""What the audit reads of a system agrees with what its workers write there."""

from dataclasses import dataclass

from msgspec.structs import replace

from pdq.adapters.memory.registry import MemoryRegistry
from pdq.cli.gather import reading
from pdq.core.audit import audit
from pdq.core.messages import PrefillJob, encode
from pdq.core.settings import LeaseSettings
from pdq.ports import HandoffLedger, JobQueue, Queue, TokenBus, WorkerRegistry
from pdq.stages.accept import Accept
from tests.unit.stages.parts import MODEL, REPLY_TO, World


@dataclass
class System:
    queue: JobQueue
    bus: TokenBus
    ledger: HandoffLedger
    registry: WorkerRegistry


async def test_a_producers_request_whose_worker_died_is_not_taken_for_lost() -> None:
    """Its job lies unacknowledged in the queue, and does not say by which id the record goes."""
    world = World()
    job = PrefillJob(model=MODEL, reply_to=REPLY_TO, prompt="Hello")
    await world.queue.publish(Queue.PREFILL, MODEL, encode(job))
    (delivery,) = await world.queue.pull(Queue.PREFILL, MODEL, limit=1, wait_s=1)
    _, key = await Accept(world.parts).job(delivery, Queue.PREFILL)
    view = await reading(System(world.queue, world.bus, world.ledger, MemoryRegistry()), (), LeaseSettings())
    assert [record.request_id for record in view.models[0].live] == [key.request_id]
    assert audit(replace(view, now_ms=view.now_ms + view.grace_ms + 1)) == []
