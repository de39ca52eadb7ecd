"""What the ledger costs: ``python -m tests.perf.ledger``.

Prints microseconds and round trips per request life (enqueue, begin, ready, claim, fetched, finish) and per renewed lease
with 10, 1,000 and 10,000 live records beside it, and what the reaper pays per expiry, per look at a queued record and
when nothing is due; then the same life, and a reading of the counters, with 1,000 tenants. Starts a Valkey of its own
unless ``PDQ_REDIS_URL`` names one.
"""

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import uvloop
from redis.asyncio import Redis

from pdq.adapters.processes import valkey_server
from pdq.adapters.redis import RedisLedger, connect
from pdq.core.handoff import Event, Side
from pdq.core.ids import mint_request_id
from pdq.core.lease import Hold, RecordKey
from pdq.core.settings import LeaseSettings, RedisSettings
from pdq.ports import Changes, Locator, NewRecord

LIVE = (10, 1_000, 10_000)
LIVES = 2_000
TENANTS = 1_000
CONCURRENCY = 64
REPEATS = 3
LONG = 3_600_000
KV = Changes(locators=(Locator("ucx", {"host": "127.0.0.1", "port": "7000"}),), digest="0" * 32, fingerprint="0" * 12)


class Cost(NamedTuple):
    """Per unit of work."""

    wall_us: float
    client_us: float
    server_us: float
    round_trips: float

    def __str__(self) -> str:
        return (
            f"{self.wall_us:9.1f} us wall {self.client_us:9.1f} us client CPU {self.server_us:9.1f} us server CPU"
            f" {self.round_trips:7.3f} round trips"
        )


@asynccontextmanager
async def server_url() -> AsyncIterator[str]:
    if url := os.environ.get("PDQ_REDIS_URL"):
        yield url
        return
    with tempfile.TemporaryDirectory() as directory:
        server = await valkey_server(Path(directory)).start()
        try:
            yield server.url
        finally:
            await server.stop()


class Bench:
    def __init__(self, client: Redis, ledger: RedisLedger, model: str, tenants: int = 1) -> None:
        self.client = client
        self.ledger = ledger
        self.model = model
        self.tenants = itertools.cycle([f"tenant {n}" if n else "" for n in range(tenants)])

    async def enqueue(self, timeout_ms: int = LONG) -> RecordKey:
        key = RecordKey(self.model, mint_request_id(time.time_ns() // 1_000_000))
        await self.ledger.enqueue(
            NewRecord(key, "pdq.tokens.bench", 1_000, 200, timeout_ms, "0" * 32, tenant=next(self.tenants))
        )
        return key

    async def begun(self, ttl_ms: int = LONG) -> Hold:
        key = await self.enqueue()
        return Hold(key, Side.SOURCE, (await self.ledger.acquire(key, Event.BEGIN, "prefill-1", ttl_ms)).epoch)

    async def life(self) -> None:
        ledger, hold = self.ledger, await self.begun()
        await ledger.apply(hold.key, Event.READY, epoch=hold.epoch, changes=KV)
        sink = await ledger.acquire(hold.key, Event.CLAIM, "decode-1", LONG)
        await ledger.apply(hold.key, Event.FETCHED, epoch=sink.epoch)
        await ledger.apply(hold.key, Event.FINISH, epoch=sink.epoch, changes=Changes(ended_code="stop"))

    async def look(self) -> None:
        await self.ledger.due(self.model, 100)

    async def settle_all(self) -> None:
        """As the reaper does with queued records whose requester answers."""
        while queued := await self.ledger.due(self.model, 100):
            for record in queued:
                await self.ledger.reap(record.key, look_again=True)
                await self.ledger.reap(record.key)

    async def load(self) -> None:
        await self.ledger.load(self.model)

    async def reap_all(self) -> None:
        """As the reaper does: list what is due, put each record back in the queue."""
        while late := await self.ledger.due(self.model, 100):
            for record in late:
                await self.ledger.apply(record.key, Event.REQUEUE)

    async def measure(self, units: int, work: Callable[[], Awaitable[object]]) -> Cost:
        """The median of several runs of ``work``, which does ``units`` units."""
        return median([await self._once(units, work) for _ in range(REPEATS)])

    async def _once(self, units: int, work: Callable[[], Awaitable[object]]) -> Cost:
        before, calls = await self._server()
        wall, cpu = time.perf_counter(), time.process_time()
        await work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        after, more = await self._server()
        return Cost(wall / units * 1e6, cpu / units * 1e6, (after - before) / units * 1e6, (more - calls) / units)

    async def _server(self) -> tuple[float, int]:
        """(CPU seconds, scripts run) so far."""
        cpu = await self.client.info("cpu")
        stats = await self.client.info("commandstats")
        scripts = stats.get("cmdstat_evalsha", {}).get("calls", 0)
        return cpu["used_cpu_user"] + cpu["used_cpu_sys"], scripts


async def spread(jobs: int, job: Callable[[], Awaitable[object]]) -> list[object]:
    """``jobs`` runs of ``job``, ``CONCURRENCY`` at a time."""
    left, done = iter(range(jobs)), []

    async def lane() -> None:
        done.extend([await job() for _ in left])

    await asyncio.gather(*[lane() for _ in range(CONCURRENCY)])
    return done


async def main() -> None:
    async with server_url() as url:
        client = await connect(RedisSettings(url=url))
        ledger = RedisLedger(client, LeaseSettings(ended_ttl_s=5))
        for live in LIVE:
            bench = Bench(client, ledger, f"bench-{live}-{os.getpid()}")
            holds: Sequence[Hold] = await spread(live, bench.begun)  # type: ignore[assignment]
            print(f"{live} live records")
            print("  request life, 64 at once ", await bench.measure(LIVES, lambda b=bench: spread(LIVES, b.life)))
            print("  request life, one by one ", await bench.measure(200, lambda b=bench: one_by_one(200, b.life)))
            print("  renewal, all in one call ", await bench.measure(live, lambda h=holds: ledger.renew(h, LONG)))
            print("  reaper, nothing is due   ", await bench.measure(50, lambda b=bench: one_by_one(50, b.look)))
            costs = []
            for _ in range(REPEATS):
                await spread(500, lambda b=bench: b.begun(1))
                await asyncio.sleep(0.01)
                costs.append(await bench._once(500, bench.reap_all))
            print("  reaper, per expiry       ", median(costs))
            hasty = Bench(client, RedisLedger(client, LeaseSettings(ttl_ms=100)), f"hasty-{bench.model}")
            await spread(500, hasty.enqueue)
            await asyncio.sleep(0.2)
            print("  reaper, per look         ", await hasty._once(500, hasty.settle_all))
            await hasty.ledger.close()
        many = Bench(client, ledger, f"bench-tenants-{os.getpid()}", TENANTS)
        await spread(TENANTS, many.begun)
        print(f"{TENANTS} live records of as many tenants")
        print("  request life, 64 at once ", await many.measure(LIVES, lambda: spread(LIVES, many.life)))
        print("  reading the counters     ", await many.measure(50, lambda: one_by_one(50, many.load)))
        await ledger.close()
        await client.aclose()


async def one_by_one(jobs: int, job: Callable[[], Awaitable[object]]) -> None:
    for _ in range(jobs):
        await job()


if __name__ == "__main__":
    uvloop.run(main())
