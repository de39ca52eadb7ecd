"""One worker process: which stages it runs, what it hears, what it says of itself, and how it leaves."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from pdq.core import errors, names
from pdq.core.messages import AccountAnswer, Cancel, Control, Drain, OfferedHandoff, Release, Resend
from pdq.core.settings import Settings
from pdq.ports import (
    HandoffLedger,
    JobQueue,
    KvTransport,
    Occupancy,
    Pool,
    Queue,
    TokenBus,
    Tokenizer,
    WorkerInfo,
    WorkerRegistry,
)
from pdq.runtime import Lifecycle
from pdq.stages import pairing
from pdq.stages.batch import Batch
from pdq.stages.conduct import Conductor
from pdq.stages.consume import Consumer, Handle
from pdq.stages.decode import DecodeStage
from pdq.stages.fetch import Fetcher
from pdq.stages.keepalive import Keepalive
from pdq.stages.local import LocalStage, WholeEngine
from pdq.stages.offers import Offers
from pdq.stages.outbox import Outbox
from pdq.stages.parts import Parts
from pdq.stages.prefill import PrefillStage
from pdq.stages.room import Room
from pdq.stages.spill import Spill

log = logging.getLogger(__name__)


class Worker:
    """A prefill or decode worker over one engine."""

    def __init__(
        self,
        *,
        worker: str,
        pool: Pool,
        model: str,
        engine: WholeEngine,
        tokenizer: Tokenizer,
        settings: Settings,
        jobs: JobQueue,
        bus: TokenBus,
        ledger: HandoffLedger,
        registry: WorkerRegistry,
        transports: Mapping[str, KvTransport],
    ) -> None:
        self._outbox = Outbox(bus, worker)
        self._parts = Parts(
            worker=worker,
            model=model,
            settings=settings,
            jobs=jobs,
            bus=bus,
            outbox=self._outbox,
            ledger=ledger,
            tokenizer=tokenizer,
            transports=transports,
            max_context=engine.contract.max_context,
        )
        self._pool = pool
        self._engine = engine
        self._registry = registry
        self._started_ms = time.time_ns() // 1_000_000
        self._draining = False
        self._keepalive = Keepalive(ledger, registry, settings.lease, settings.queue, self.info)
        self._conductor = Conductor(self._parts, self._keepalive)
        self._room = Room(self._free)
        self._batch = Batch(engine, self._outbox, tokenizer)
        self._offers: Offers | None = None
        self._spill: Spill | None = None
        self._consumers: list[Consumer] = []
        self._background: set[asyncio.Task[None]] = set()

    # --- what it says of itself ---------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self._parts.worker,
            pool=self._pool,
            model=self._parts.model,
            contract=self._engine.contract,
            occupancy=self._occupancy(),
            host=socket.gethostname(),
            pid=os.getpid(),
            state="draining" if self._draining else "ready",
            started_ms=self._started_ms,
            aggregated=self._pool is Pool.DECODE and self._parts.settings.handoff.mode == "aggregated",
        )

    def _occupancy(self) -> Occupancy:
        return msgspec.structs.replace(
            self._engine.occupancy(),
            running=len(self._conductor),
            held=len(self._offers) if self._offers is not None else 0,
            served=self._conductor.taken,
        )

    def account(self) -> AccountAnswer:
        """What it holds now, for whoever compares that with the ledger."""
        engine = self._engine.occupancy()
        kept = self._offers.holdings() if self._offers is not None else []
        return AccountAnswer(
            worker=self._parts.worker,
            model=self._parts.model,
            holdings=(*self._parts.account.holdings(), *kept),
            total_blocks=engine.total_blocks,
            free_blocks=engine.free_blocks,
            quarantined_blocks=engine.quarantined_blocks,
            offers={
                name: tuple(OfferedHandoff(ref.key.request_id, ref.epoch) for ref in transport.holding())
                for name, transport in self._parts.transports.items()
            },
            jobs=tuple(job for consumer in self._consumers for job in consumer.in_hand()),
        )

    def _free(self) -> int:
        """Requests that may be pulled now."""
        engine = self._engine.occupancy()
        held = len(self._offers) if self._offers is not None else 0
        taken = len(self._conductor) + held
        return max(0, self._parts.settings.engine.max_running - taken) if engine.free_blocks else 0

    # --- how it lives -------------------------------------------------------------------------------------------------

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until drained.

        Raises:
            IncompatibleContract: a live worker of the other pool cannot work with this one.
        """
        parts = self._parts
        pairing.check(self.info(), await self._registry.workers(parts.model), parts.settings.handoff)
        self._consumers = consumers = self._stages()
        subscriptions = [
            await parts.bus.on_control(names.CANCEL_SUBJECT, self._hear),
            await parts.bus.on_control(names.worker_subject(parts.worker), lambda it: self._hear(it, lifecycle)),
            await parts.bus.answer_account(parts.worker, self.account),
        ]
        always = [asyncio.ensure_future(it) for it in (self._keepalive.run(), self._batch.run(), self._sweep())]
        if self._spill is not None:
            always.append(asyncio.ensure_future(self._spill.run()))
        try:
            await self._keepalive.announce()
            log.info("%s worker %s serves %s", self._pool, parts.worker, parts.model)
            await lifecycle.until(lifecycle.stopped, self._serve(consumers, lifecycle, always))
        finally:
            if self._spill is not None:
                await self._spill.all()
            if self._offers is not None:
                await self._offers.close()
            for task in (*always, *self._background):
                task.cancel()
            await asyncio.gather(*always, *self._background, return_exceptions=True)
            for subscription in subscriptions:
                await _quietly(subscription.close())
            await _quietly(self._registry.withdraw(parts.worker))
            await self._engine.close()

    async def _serve(
        self, consumers: Sequence[Consumer], lifecycle: Lifecycle, always: Sequence[asyncio.Future[None]]
    ) -> None:
        drained = asyncio.ensure_future(self._until_drained(consumers, lifecycle))
        try:
            await asyncio.wait({drained, *always}, return_when=asyncio.FIRST_COMPLETED)
            for task in always:
                if task.done():  # it runs forever, so this is a defect, and the worker must not live on without it
                    task.result()
            await drained
        finally:
            drained.cancel()
            await asyncio.gather(drained, return_exceptions=True)

    async def _until_drained(self, consumers: Sequence[Consumer], lifecycle: Lifecycle) -> None:
        async with asyncio.TaskGroup() as group:
            for consumer in consumers:
                group.create_task(consumer.run(lifecycle.draining))
            await lifecycle.draining.wait()
            self._draining = True
            await _quietly(self._keepalive.announce())
        if self._offers is not None:
            # A source stays until its last KV is fetched or released.
            await self._offers.empty()

    async def _sweep(self) -> None:
        """What a source that was killed left on this host is gone within a lease TTL."""
        while True:
            await asyncio.sleep(self._parts.settings.lease.ttl_ms / 1000)
            for transport in self._parts.transports.values():
                await asyncio.to_thread(transport.sweep)

    def _stages(self) -> list[Consumer]:
        """The stages of its pool, each behind its queue."""
        if self._pool is Pool.PREFILL:
            transport = self._parts.settings.transport
            self._offers = Offers(
                self._parts.transports, transport, self._keepalive, self._parts.ledger, self._room.changed
            )
            self._spill = Spill(self._parts, transport, self._offers, self._room)
            stage = PrefillStage(self._parts, self._engine, self._conductor, self._offers, self._room)
            return [self._consumer(Queue.PREFILL, stage.handle)]
        fetcher = Fetcher(self._parts.transports, self._parts.settings.transport)
        decode = DecodeStage(self._parts, self._engine, self._conductor, fetcher, self._batch, self._room)
        consumers = [
            self._consumer(Queue.DECODE, decode.handle),
            self._consumer(Queue.LOCAL, self._local(Queue.LOCAL)),
        ]
        if self._parts.settings.handoff.mode == "aggregated":
            consumers.append(self._consumer(Queue.PREFILL, self._local(Queue.PREFILL)))
        return consumers

    def _local(self, queue: Queue) -> Handle:
        stage = LocalStage(self._parts, self._engine, self._conductor, self._batch, self._room, queue, self._keepalive)
        return stage.handle

    def _consumer(self, queue: Queue, handle: Handle) -> Consumer:
        return Consumer(self._parts.jobs, queue, self._parts.model, self._room, handle, self._keepalive)

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _hear(self, message: Control, lifecycle: Lifecycle | None = None) -> None:
        match message:
            case Cancel(request_ids):
                for request_id in request_ids:
                    self._conductor.interrupt(request_id, errors.RequestCancelled("the request has ended"))
                    if self._offers is not None:
                        self._offers.end(request_id)
            case Release(request_ids) if self._offers is not None:
                for request_id in request_ids:
                    self._offers.let_go(request_id)
            case Resend():
                self._spawn(self._outbox.resend(message))
            case Drain(deadline_ms) if lifecycle is not None:
                lifecycle.drain(deadline_ms / 1000)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except errors.PdqError as error:
        log.warning("%s: %s", error.code, error)
