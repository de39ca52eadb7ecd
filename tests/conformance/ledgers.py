"""What the ledger suites stand on: a ledger with a clock, and records brought to a state."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal

from pdq.adapters.memory import MemoryLedger
from pdq.adapters.redis import RedisLedger, connect
from pdq.core.handoff import RULES, Event, State
from pdq.core.layout import KvLayout
from pdq.core.lease import RecordKey
from pdq.core.messages import Policy, Priority
from pdq.core.settings import LeaseSettings, RedisSettings
from pdq.ports import Changes, HandoffLedger, Load, Locator, LogEntry, NewRecord, Record

LONG: Final = 60_000
SHORT: Final = 120
"""A lease that shall run out."""
SOON: Final = 400
"""A lease or deadline that shall run out, but not before the record is where the test wants it."""

LAYOUT: Final = KvLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32", block_size=4, chunk_tokens=8)
KV: Final = Changes(
    layout=LAYOUT, locators=(Locator("shm", {"host": "a", "name": "x"}, 1),), digest="d1", fingerprint="f1"
)


@dataclass
class World:
    """A ledger, its clock, and a model of its own."""

    ledger: HandoffLedger
    advance: Callable[[int], Awaitable[None]]
    model: str
    ids: "count[int]" = field(default_factory=count)

    def key(self) -> RecordKey:
        return RecordKey(self.model, f"r-{next(self.ids)}-{self.model}")

    async def enqueue(
        self,
        timeout_ms: int = LONG,
        policy: Policy | None = None,
        tenant: str = "",
        priority: Priority = "interactive",
        mode: Literal["disaggregated", "aggregated"] = "disaggregated",
    ) -> RecordKey:
        key = self.key()
        new = NewRecord(
            *(key, "pdq.tokens.me", 10, 5, timeout_ms, "secret", policy or Policy(), mode),
            tenant=tenant,
            priority=priority,
        )
        _, created = await self.ledger.enqueue(new)
        assert created
        return key

    async def snapshot(self, key: RecordKey) -> tuple[Record | None, Sequence[LogEntry], Load]:
        return await self.ledger.read(key), await self.ledger.history(key), await self.ledger.load(self.model)


@asynccontextmanager
async def memory_world(model: str, lease: LeaseSettings | None = None) -> AsyncIterator[World]:
    """The in-memory ledger under a clock that steps."""
    now = 1_700_000_000_000

    async def step(ms: int) -> None:
        nonlocal now
        now += ms

    yield World(MemoryLedger(lease or LeaseSettings(), clock=lambda: now), step, model)


@asynccontextmanager
async def redis_world(url: str, model: str, lease: LeaseSettings | None = None) -> AsyncIterator[World]:
    """A real server under its own clock: ``advance`` waits until that clock is there."""
    client = await connect(RedisSettings(url=url))
    ledger = RedisLedger(client, lease or LeaseSettings())

    async def wait(ms: int) -> None:
        until = await ledger.now_ms() + ms
        async with asyncio.timeout(10):
            while await ledger.now_ms() < until:
                await asyncio.sleep(0.005)

    yield World(ledger, wait, model)
    await ledger.close()
    await client.aclose()


@dataclass
class Story:
    """A record brought to a state, and the proofs of those who brought it there."""

    key: RecordKey
    source: int = 0
    sink: int = 0


async def bring(
    world: World, state: State, *, ttl: int = LONG, timeout_ms: int = LONG, policy: Policy | None = None
) -> Story:
    """A record in ``state``, with its source and (from ``ready`` on) its sink holding leases of ``ttl``."""
    ledger, story = world.ledger, Story(await world.enqueue(timeout_ms, policy))
    if state in (State.FAILED, State.CANCELLED):
        await ledger.apply(story.key, Event.FAIL if state is State.FAILED else Event.CANCEL)
    elif state is State.EXPIRED:
        await world.advance(timeout_ms)
        await ledger.apply(story.key, Event.EXPIRE)
    elif state is not State.QUEUED:
        story.source = (await ledger.acquire(story.key, Event.BEGIN, "p1", ttl)).epoch
        if state is not State.PREFILLING:
            await ledger.apply(story.key, Event.READY, epoch=story.source, changes=KV)
            story.sink = (await ledger.acquire(story.key, Event.CLAIM, "d1", ttl)).epoch
            if state is not State.READY:
                await ledger.apply(story.key, Event.FETCHED, epoch=story.sink)
                if state is not State.FETCHED:
                    await ledger.apply(story.key, Event.FINISH, epoch=story.sink)
    return story


async def cause(world: World, story: Story, event: Event, epoch: int | None = None) -> Record:
    if RULES[event].claims is not None:
        return (await world.ledger.acquire(story.key, event, "other", LONG)).record
    return await world.ledger.apply(story.key, event, epoch=epoch)


def proof(story: Story, event: Event, state: State) -> int | None:
    match event:
        case Event.READY | Event.ADOPT:
            return story.source
        case Event.FETCHED:
            return story.sink
        case Event.FINISH | Event.REQUEUE | Event.YIELD:
            return story.source if state is State.PREFILLING else story.sink
    return None
