"""What the broker's adapters cost: ``python -m tests.perf.nats`` starts a NATS server of its own and prints a table.

Jobs are published, pulled and acknowledged by one process; frames go from one connection to another in it. CPU is that of
this process, so the figures hold for one core of a client; the server runs beside it.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from pdq.adapters import nats
from pdq.adapters.processes import nats_server
from pdq.core.messages import TokenEntry, TokenFrame
from pdq.core.settings import NatsSettings, QueueSettings
from pdq.ports import Queue

MODEL = "perf/model"


async def jobs(queue: nats.NatsQueue, count: int, size: int, publishers: int, limit: int) -> None:
    """Publish, pull and acknowledge ``count`` jobs, with ``publishers`` waiting for their acknowledgement at a time."""
    data = b"x" * size
    left = iter(range(count))

    async def publish() -> None:
        for number in left:
            await queue.publish(Queue.PREFILL, MODEL, data, message_id=f"{time.monotonic_ns()}-{number}", ttl_s=600)

    async def consume() -> None:
        done = 0
        while done < count:
            for job in await queue.pull(Queue.PREFILL, MODEL, limit=limit, wait_s=10):
                await job.ack()
                done += 1

    await asyncio.gather(consume(), *(publish() for _ in range(publishers)))


async def round_trips(queue: nats.NatsQueue, count: int) -> list[float]:
    """Seconds from publishing a job until an idle, waiting pull has it."""
    taken: list[float] = []
    for _ in range(count):
        pull = asyncio.create_task(queue.pull(Queue.PREFILL, MODEL, limit=8, wait_s=10))
        await asyncio.sleep(0.005)
        start = time.perf_counter()
        await queue.publish(Queue.PREFILL, MODEL, b"x")
        (job,) = await pull
        taken.append(time.perf_counter() - start)
        await job.ack()
    return taken


async def frames(sender: nats.NatsBus, receiver: nats.NatsBus, count: int, entries: int) -> None:
    """``count`` frames with one token for each of ``entries`` requests; done when the last has arrived."""
    arrived = 0
    complete = asyncio.Event()

    def on_frame(_: TokenFrame) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            complete.set()

    subscription = await receiver.receive("pdq.tokens.perf", on_frame)
    frame = TokenFrame("w", tuple(TokenEntry(f"request-{n:032}", 100, (n,), (" word",)) for n in range(entries)))
    for number in range(count):
        await sender.send("pdq.tokens.perf", frame)
        if number % 64 == 63:
            await asyncio.sleep(0)  # as between two steps of an engine
    await complete.wait()
    await subscription.close()


async def measure(what: str, unit: str, count: int, repeats: int, run: Callable[[], Awaitable[None]]) -> None:
    rates: list[float] = []
    costs: list[float] = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        await run()
        rates.append(count / (time.perf_counter() - wall))
        costs.append((time.process_time() - cpu) / count * 1e6)
    print(
        f"{what:<42} {statistics.median(rates):>9,.0f} {unit}/s ({min(rates):,.0f} to {max(rates):,.0f})"
        f"  {statistics.median(costs):>7.1f} us CPU per {unit}"
    )


async def main(count: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = await nats_server(Path(directory)).start()
        settings = NatsSettings(url=server.url)
        first, second = await nats.connect(settings, "perf-1"), await nats.connect(settings, "perf-2")
        queue = nats.NatsQueue(first, QueueSettings())
        await queue.ensure_streams()
        for size, publishers, limit in ((500, 64, 32), (500, 256, 128), (16_384, 64, 32), (500, 1, 1)):
            total = count if publishers > 1 else count // 5
            await measure(
                f"jobs of {size} B, {publishers} publishers, pull {limit}",
                "job",
                total,
                repeats,
                lambda total=total, size=size, publishers=publishers, limit=limit: jobs(  # type: ignore[misc]
                    queue, total, size, publishers, limit
                ),
            )
        taken = sorted(await round_trips(queue, 200))
        print(f"publish to a waiting pull: median {taken[100] * 1e6:.0f} us, p99 {taken[198] * 1e6:.0f} us")
        sender, receiver = nats.NatsBus(first), nats.NatsBus(second)
        for entries in (1, 16, 64):
            await measure(
                f"frames with {entries} tokens, sent and received",
                "frame",
                count,
                repeats,
                lambda entries=entries: frames(sender, receiver, count, entries),  # type: ignore[misc]
            )
        for connection in (first, second):
            await connection.close()
        await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    uvloop.run(main(options.count, options.repeats))
