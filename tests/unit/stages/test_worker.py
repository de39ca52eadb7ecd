"""Whole workers over ports in memory: how much they take, and how they leave and stay."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdq.adapters.memory.bus import MemoryBus
from pdq.adapters.memory.ledger import MemoryLedger
from pdq.adapters.memory.queue import MemoryQueue
from pdq.adapters.memory.registry import MemoryRegistry
from pdq.adapters.memory.transport import MemoryTransport, TransportWorld
from pdq.adapters.tokenizer import load_tokenizer
from pdq.core import names
from pdq.core.handoff import State
from pdq.core.messages import Control, Drain, PrefillJob, Sampling, Undrain, encode
from pdq.core.settings import AdmissionSettings, EngineSettings, Settings, SimSettings, TransportSettings
from pdq.ports import ChunkPlan, Fetched, HandoffRef, Locator, Occupancy, Pool, Queue
from pdq.runtime import Lifecycle
from pdq.stages.worker import Worker
from workers.sim.engine import SimEngine

MODEL = "sim"
REPLY_TO = "pdq.tokens.test"
PREFILL, DECODE = "prefill-0", "decode-0"


class Gated(MemoryTransport):
    """Fetches wait until they are let through."""

    def __init__(self, world: TransportWorld) -> None:
        super().__init__(world)
        self.open = asyncio.Event()

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        await self.open.wait()
        return await super().fetch(locator, ref, plan, into, timeout_s)


@dataclass
class Pools:
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)

    def __post_init__(self) -> None:
        self.settings = Settings(
            transport=TransportSettings(order=("memory",)),
            admission=self.admission,
            engine=EngineSettings(kv_tokens=65_536),
            sim=SimSettings(prefill_ms_per_token=0.01),
        )
        self.queue = MemoryQueue(self.settings.queue)
        self.bus = MemoryBus()
        self.ledger = MemoryLedger(self.settings.lease)
        self.registry = MemoryRegistry()
        self.world = TransportWorld()
        self.gate = Gated(self.world)

    @asynccontextmanager
    async def worker(self, pool: Pool, name: str) -> AsyncIterator[asyncio.Task[None]]:
        """It runs until the block ends, or until it leaves by itself."""
        tokenizer = load_tokenizer(None)
        worker = Worker(
            worker=name,
            pool=pool,
            model=MODEL,
            engine=SimEngine(MODEL, self.settings.engine, self.settings.sim, tokenizer),
            tokenizer=tokenizer,
            settings=self.settings,
            jobs=self.queue,
            bus=self.bus,
            ledger=self.ledger,
            registry=self.registry,
            transports={"memory": self.gate if pool is Pool.DECODE else MemoryTransport(self.world)},
        )
        lifecycle = Lifecycle()
        running = asyncio.create_task(worker.run(lifecycle))
        try:
            await self.eventually(lambda: self.state(name), "ready")
            yield running
        finally:
            lifecycle.stop()
            await running

    async def ask(self, count: int) -> None:
        """So many requests."""
        for number in range(count):
            job = PrefillJob(
                model=MODEL, prompt=f"request {number}", reply_to=REPLY_TO, sampling=Sampling(max_tokens=4)
            )
            await self.queue.publish(Queue.PREFILL, MODEL, encode(job))

    async def tell(self, worker: str, message: Control) -> None:
        await self.bus.control(names.worker_subject(worker), message)

    async def state(self, worker: str) -> str | None:
        return next((it.state for it in await self.registry.workers() if it.worker == worker), None)

    async def occupancy(self, worker: str) -> Occupancy:
        """As of its last announcement: a drain or its end make it announce itself."""
        return next(it.occupancy for it in await self.registry.workers() if it.worker == worker)

    async def at(self, state: State) -> int:
        return (await self.ledger.load(MODEL)).requests.get(state, 0)

    async def ended(self) -> int:
        return (await self.ledger.load(MODEL)).ended.requests

    async def waiting(self) -> int:
        return (await self.queue.depth(Queue.PREFILL, MODEL))[0]

    async def eventually(self, figure: Callable[[], Awaitable[object]], expected: object) -> None:
        async with asyncio.timeout(30):
            while await figure() != expected:
                await asyncio.sleep(0.005)


async def test_a_prefill_worker_holds_no_more_than_it_may_and_goes_on_when_they_are_fetched() -> None:
    pools = Pools(AdmissionSettings(handoffs_per_prefill_worker=2))
    async with pools.worker(Pool.PREFILL, PREFILL):
        await pools.ask(5)
        await pools.eventually(lambda: pools.at(State.READY), 2)
        assert await pools.waiting() == 3
        pools.gate.open.set()
        async with pools.worker(Pool.DECODE, DECODE):
            await pools.eventually(pools.ended, 5)


async def test_a_decode_worker_receives_no_more_at_a_time_than_it_may() -> None:
    pools = Pools(AdmissionSettings(transfers_per_worker=2))
    async with pools.worker(Pool.PREFILL, PREFILL), pools.worker(Pool.DECODE, DECODE):
        await pools.ask(5)
        await pools.eventually(lambda: pools.at(State.READY), 5)

        async def taken() -> tuple[int, int]:
            return await pools.queue.depth(Queue.DECODE, MODEL)

        await pools.eventually(taken, (3, 2))
        await pools.tell(DECODE, Drain())
        await pools.eventually(lambda: pools.state(DECODE), "draining")
        assert (await pools.occupancy(DECODE)).transfers == 2
        await pools.tell(DECODE, Undrain())
        await pools.eventually(lambda: pools.state(DECODE), "ready")
        pools.gate.open.set()
        await pools.eventually(pools.ended, 5)


async def test_a_drained_source_stays_until_its_last_kv_is_fetched_and_computes_nothing_new() -> None:
    pools = Pools()
    async with pools.worker(Pool.PREFILL, PREFILL) as source:
        await pools.ask(1)
        await pools.eventually(lambda: pools.at(State.READY), 1)
        await pools.tell(PREFILL, Drain())
        await pools.eventually(lambda: pools.state(PREFILL), "draining")
        now = await pools.occupancy(PREFILL)
        assert (now.held, now.running) == (1, 0)
        assert now.busy_s > 0
        await pools.ask(1)
        pools.gate.open.set()
        async with pools.worker(Pool.DECODE, DECODE):
            await source
            assert await pools.ended() == 1
            assert await pools.state(PREFILL) is None
            assert await pools.waiting() == 1


async def test_a_worker_that_is_told_to_stay_pulls_again() -> None:
    pools = Pools()
    pools.gate.open.set()
    async with pools.worker(Pool.PREFILL, PREFILL) as source:
        await pools.ask(1)
        await pools.eventually(lambda: pools.at(State.READY), 1)
        for _ in range(3):
            await pools.tell(PREFILL, Drain())
            await pools.eventually(lambda: pools.state(PREFILL), "draining")
            await pools.tell(PREFILL, Undrain())
            await pools.eventually(lambda: pools.state(PREFILL), "ready")
        await pools.ask(1)
        async with pools.worker(Pool.DECODE, DECODE):
            await pools.eventually(pools.ended, 2)
        assert not source.done()


async def test_at_the_deadline_a_source_leaves_what_nobody_has_fetched() -> None:
    pools = Pools()
    async with pools.worker(Pool.PREFILL, PREFILL) as source:
        await pools.ask(1)
        await pools.eventually(lambda: pools.at(State.READY), 1)
        await pools.tell(PREFILL, Drain())
        await pools.tell(PREFILL, Drain(deadline_ms=10))
        await source
    assert not pools.world.handoffs
