"""One worker process: which stages it runs, what it hears, what it says of itself, and how it leaves."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

import msgspec

from pdq.core import admission, errors, names
from pdq.core.messages import AccountAnswer, Cancel, Control, Drain, Release, Resend, Undrain
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
from pdq.stages.census import Census
from pdq.stages.conduct import Conductor
from pdq.stages.consume import Consumer, Handle
from pdq.stages.decode import DecodeStage
from pdq.stages.fetch import Fetcher
from pdq.stages.gate import Gate
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
            gate=Gate(ledger, Census(registry), settings),
            tokenizer=tokenizer,
            transports=transports,
            max_context=engine.contract.max_context,
        )
        self._pool = pool
        self._engine = engine
        self._registry = registry
        self._started_ms = time.time_ns() // 1_000_000
        self._state: Literal["ready", "draining"] = "ready"
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
            state=self._state,
            started_ms=self._started_ms,
            aggregated=self._pool is Pool.DECODE and self._parts.settings.handoff.mode == "aggregated",
            spill=self._parts.settings.transport.spill if self._pool is Pool.PREFILL else (),
        )

    def _occupancy(self) -> Occupancy:
        return msgspec.structs.replace(
            self._engine.occupancy(),
            running=len(self._conductor),
            held=len(self._offers) if self._offers is not None else 0,
            served=self._conductor.taken,
            busy_s=self._parts.busy.seconds,
            transfers=self._parts.account.doing("fetching"),
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
                name: tuple(self._offers.offered(transport)) if self._offers is not None else ()
                for name, transport in self._parts.transports.items()
            },
            jobs=tuple(job for consumer in self._consumers for job in consumer.in_hand()),
        )

    def _free(self) -> int:
        """Requests that may be pulled now."""
        if not self._engine.occupancy().free_blocks:
            return 0
        settings, in_hand = self._parts.settings, sum(map(len, self._consumers))
        held = len(self._offers) if self._offers is not None else 0
        free = max(0, settings.engine.max_running - in_hand - held)
        if self._pool is Pool.PREFILL:
            free = min(free, admission.prefill_room(held, in_hand, self._parts.busy.mean_s, settings.admission))
        return free

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
        """Until it has drained. Cancelling hands back what runs."""
        forever = [*always, *(asyncio.ensure_future(consumer.run(lifecycle)) for consumer in consumers)]
        drained = asyncio.ensure_future(self._until_drained(lifecycle))
        try:
            await asyncio.wait({drained, *forever}, return_when=asyncio.FIRST_COMPLETED)
            for task in forever:
                if task.done():  # it runs forever, so this is a defect, and the worker must not live on without it
                    task.result()
            await drained
        finally:
            own = [drained, *forever[len(always) :]]
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)

    async def _until_drained(self, lifecycle: Lifecycle) -> None:
        """Until it drains and has nothing left; a drain that is called off does not count."""
        while not (lifecycle.draining.is_set() and self._has_nothing()):
            await lifecycle.draining.wait()
            await self._become("draining")
            await lifecycle.until(lifecycle.serving, self._room.until(self._has_nothing))
            if lifecycle.serving.is_set():
                await self._become("ready")

    async def _become(self, state: Literal["ready", "draining"]) -> None:
        self._state = state
        await _quietly(self._keepalive.announce())

    def _has_nothing(self) -> bool:
        """No job in hand, and no KV that somebody still has to fetch."""
        return all(consumer.idle for consumer in self._consumers) and not self._offers

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

        def free() -> int:
            """What is fetched already takes no part of the way any more."""
            return min(self._room.free(), admission.decode_room(len(handoffs) - decode.landed, limits))

        limits = self._parts.settings.admission
        handoffs = self._consumer(Queue.DECODE, decode.handle, free)
        consumers = [handoffs, self._local(Queue.LOCAL)]
        if self._parts.settings.handoff.mode == "aggregated":
            consumers.append(self._local(Queue.PREFILL))
        return consumers

    def _local(self, queue: Queue) -> Consumer:
        stage = LocalStage(self._parts, self._engine, self._conductor, self._batch, self._room, queue, self._keepalive)

        def free() -> int:
            """What decodes already is in nobody's way any more."""
            waiting = len(consumer) - stage.computed
            return min(self._room.free(), admission.prompts_room(waiting, self._parts.busy.mean_s))

        consumer = self._consumer(queue, stage.handle, free)
        return consumer

    def _consumer(self, queue: Queue, handle: Handle, free: Callable[[], int] | None = None) -> Consumer:
        return Consumer(self._parts, queue, self._room, free or self._room.free, handle, self._keepalive)

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
                self._spawn(self._conductor.endings.resend(self._parts.model, message))
            case Drain(deadline_ms, spill) if lifecycle is not None:
                self._hurry(spill)
                lifecycle.drain(deadline_ms / 1000)
            case Undrain() if lifecycle is not None:
                if lifecycle.undrain():
                    self._hurry(False)

    def _hurry(self, spill: bool) -> None:
        if self._spill is not None:
            self._spill.leaving = spill

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except errors.PdqError as error:
        log.warning("%s: %s", error.code, error)
