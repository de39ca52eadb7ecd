"""What the gate costs a request: ``python -m tests.perf.gate``.

A real Valkey, by how many tenants have something queued: one reading (round trips, and this process's CPU time), and one
request between two readings, routed and let in.
"""

import time

import msgspec
import uvloop

from pdq.adapters import redis
from pdq.core.admission import Request
from pdq.core.lease import RecordKey
from pdq.core.settings import AdmissionSettings, LeaseSettings, RedisSettings, Settings
from pdq.ports import NewRecord, Pool
from pdq.stages.census import Census
from pdq.stages.gate import FRESH_S, Gate
from tests.perf.ledger import server_url
from tests.unit.bridge.harness import BLOCKS, worker_info

READINGS = 300
REQUESTS = 3_000


async def measure(url: str, tenants: int) -> None:
    client = await redis.connect(RedisSettings(url=url))
    ledger, registry = redis.RedisLedger(client, LeaseSettings()), redis.RedisRegistry(client)
    model = f"gate-{tenants}"
    for pool in Pool:
        info = worker_info(pool)
        roomy = msgspec.structs.replace(info.occupancy, total_blocks=1000 * BLOCKS)
        await registry.announce(msgspec.structs.replace(info, model=model, occupancy=roomy), 600_000)
    for number in range(tenants):
        new = NewRecord(RecordKey(model, f"r{number}"), "pdq.tokens.x", 50, 50, 600_000, "s", tenant=f"tenant-{number}")
        await ledger.enqueue(new)
    now_s = 0.0
    roomy_queue = AdmissionSettings(interactive_queued_requests=1_000_000)
    gate = Gate(ledger, Census(registry, lambda: now_s), Settings(admission=roomy_queue), lambda: now_s)

    async def request() -> None:
        await gate.route(model, 50, "interactive")
        async with gate.entering(model, Request(50, 50, tenant="tenant-0", deadline_s=60.0)):
            pass

    await request()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(READINGS):
        now_s += FRESH_S
        await request()
    reading_s, reading_cpu = time.perf_counter() - began, time.process_time() - cpu
    cpu = time.process_time()
    for number in range(REQUESTS):
        now_s += FRESH_S if number % 100 == 0 else 0.0
        await request()
    shared = time.process_time() - cpu - REQUESTS / 100 * reading_cpu / READINGS
    print(
        f"{tenants:5} tenants: a reading {reading_cpu / READINGS * 1e6:6.0f} us CPU, {reading_s / READINGS * 1e6:6.0f} us"
        f" in all; a request between two {shared / REQUESTS * 1e6:6.1f} us CPU and no round trip"
    )
    await ledger.close()
    await registry.close()
    await client.aclose()


async def main() -> None:
    async with server_url() as url:
        for tenants in (1, 100, 1_000):
            await measure(url, tenants)


if __name__ == "__main__":
    uvloop.run(main())
