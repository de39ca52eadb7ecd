"""A worker that does what a test tells it, on real servers; what it says of itself is as true as it can be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

from pdq.connect import Connected, connect
from pdq.core import names
from pdq.core.environment import load
from pdq.core.layout import Fingerprint, KvLayout
from pdq.core.lease import RecordKey
from pdq.core.messages import End, PrefillJob, TokenEntry, TokenFrame, decode
from pdq.ports import BackendContract, NewRecord, Occupancy, Pool, Queue, Record, WorkerInfo
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox
from pdq.stages.status import Status

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_size=16, chunk_tokens=64)
WORKER = "prefill-5c819ed0"


class ScriptedWorker:
    def __init__(self, system: Connected, model: str) -> None:
        self.system = system
        self.model = model
        self._job = ""

    async def announce(self, state: Literal["ready", "draining"] = "ready", spill: tuple[str, ...] = ()) -> None:
        contract = BackendContract(
            name="scripted",
            version="1",
            first_token="prefill",
            order=("on_complete",),
            direction="pull",
            chunked=True,
            reentry=True,
            resume=True,
            layout=LAYOUT,
            fingerprint=Fingerprint(self.model, "w", "t", "float32"),
            max_context=128,
        )
        info = WorkerInfo(
            worker=WORKER,
            pool=Pool.PREFILL,
            model=self.model,
            contract=contract,
            occupancy=Occupancy(total_blocks=8, free_blocks=5, running=1, held=2),
            host="here",
            pid=1,
            state=state,
            started_ms=1,
            spill=spill,
        )
        await self.system.registry.announce(info, ttl_ms=60_000)

    async def take(self) -> PrefillJob:
        """The next job, off the queue."""
        async with asyncio.timeout(60):
            while not (taken := await self.system.queue.pull(Queue.PREFILL, self.model, limit=1, wait_s=5)):
                pass
        self._job = names.place(Queue.PREFILL.stream, taken[0].sequence)
        await taken[0].ack()
        return decode(taken[0].data, PrefillJob)

    async def accept(self, request_id: str, reply_to: str) -> Record:
        """Write the record of a request, as a worker does for a producer's job: the one that was taken last."""
        key = RecordKey(self.model, request_id)
        new = NewRecord(
            key, reply_to, prompt_tokens=20, max_new_tokens=8, timeout_ms=60_000, secret="open sesame", job=self._job
        )
        record, _ = await self.system.ledger.enqueue(new)
        return record

    async def say(self, reply_to: str, request_id: str, seq: int, *pieces: str, end: End | None = None) -> None:
        """Send a frame; the tokens are their own positions."""
        entry = TokenEntry(request_id, seq, tuple(range(seq, seq + len(pieces))), pieces, end=end)
        await self.system.bus.send(reply_to, TokenFrame(WORKER, (entry,)))


@asynccontextmanager
async def scripted_worker(nats_url: str, redis_url: str, model: str) -> AsyncIterator[ScriptedWorker]:
    """With a reaper beside it, as far as producers ask one."""
    async with connect(load({"PDQ_NATS_URL": nats_url, "PDQ_REDIS_URL": redis_url}), "scripted") as system:
        endings = Endings(system.ledger, system.bus, Outbox(system.bus, "reaper"), "reaper")
        status = Status(system.ledger, system.queue, system.bus, system.registry, endings)
        await system.bus.answer_status(status.answer)
        yield ScriptedWorker(system, model)


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 30) -> None:
    """Poll until ``condition`` holds."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.02)
