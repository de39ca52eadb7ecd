"""KV bytes per second between two processes, beside memcpy, a raw TCP socket and plain Redis SET/GET, in one run.

    python -m tests.perf.transport [--rounds 5] [--only shm,ucx,redis]

All contenders take turns within each round, so that a busy machine slows them alike; medians are reported, and ratios to
the yardstick that the contender is held to. ``fetch`` is what a sink waits for; ``both`` adds the source's ``offer``. CPU
is of both processes for pdq's transports, of this one alone for the yardsticks. ``stall`` is the longest time that the
event loop of either was late, beside that of an idle loop.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio

from pdq.adapters.processes import valkey_server
from pdq.ports import ChunkPlan, KvTransport, Locator
from tests.kv import ROOT, make, ref

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
CHUNK = 16 * MIB
YARDSTICK = {"shm": ("memcpy", 0.8), "ucx": ("raw TCP", 1.0), "redis": ("SET + GET", 3.0)}


def plan_of(size: int) -> ChunkPlan:
    return ChunkPlan((min(size, CHUNK),) * -(-size // CHUNK))


def touched(size: int) -> bytearray:
    return bytearray(os.urandom(MIB) * -(-size // MIB))[:size]


class Stall:
    """How late this loop runs at most. ``sleep`` alone is late by a timer's slack, which an idle loop shows too."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.perf_counter() - before - 0.001)

    def take_ms(self) -> float:
        worst, self.worst_s = self.worst_s, 0.0
        return worst * 1000


# --- Source -----------------------------------------------------------------------------------------------------------


async def source(kind: str, url: str) -> None:
    transport = make(kind, url)
    await transport.start()
    stall: Stall | None = None  # its timer costs, so it runs only where it is asked for
    memory = memoryview(touched(max(SIZES)))
    loop = asyncio.get_running_loop()
    print(json.dumps({}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if command["do"] == "offer":
            plan = plan_of(command["size"])
            started = time.perf_counter()
            for index in range(len(plan.lengths)):
                part = memory[index * CHUNK :][: plan.lengths[index]]
                locator = await transport.offer(ref(command["id"]), plan, index, [part])
            answer = {"seconds": time.perf_counter() - started, "address": dict(locator.address)}
        elif command["do"] == "release":
            await transport.release(ref(command["id"]))
        elif command["do"] == "stall":
            stall = stall or Stall()
            answer = {"ms": stall.take_ms()}
        answer["cpu"] = time.process_time()
        print(json.dumps(answer), flush=True)
    await transport.close()


class Peer:
    """A source process and, here, the sink that fetches from it."""

    def __init__(self, transport: KvTransport, process: asyncio.subprocess.Process) -> None:
        self.transport = transport
        self._process = process

    async def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return answer


@asynccontextmanager
async def peer(kind: str, url: str) -> AsyncIterator[Peer]:
    pipe = asyncio.subprocess.PIPE
    argv = [sys.executable, "-m", "tests.perf.transport", "--source", kind, "--url", url]
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdin is not None
    await process.stdout.readline()
    transport = make(kind, url)
    await transport.start()
    yield Peer(transport, process)
    await transport.close()
    process.stdin.close()
    await process.wait()


# --- Contenders -------------------------------------------------------------------------------------------------------

Measure = Callable[[int], Awaitable[dict[str, float]]]
"""One exchange of so many bytes: seconds for ``fetch`` and ``both``, CPU seconds."""


def transport_measure(end: Peer, into: memoryview) -> Measure:
    number = iter(range(1 << 30))

    async def measure(size: int) -> dict[str, float]:
        name, plan = f"p{next(number)}", plan_of(size)
        before = (await end.ask(do="cpu"))["cpu"] + time.process_time()
        offered = await end.ask(do="offer", id=name, size=size)
        locator = Locator(end.transport.name, offered["address"])
        targets = [[into[i * CHUNK :][:length]] for i, length in enumerate(plan.lengths)]
        started = time.perf_counter()
        await end.transport.fetch(locator, ref(name), plan, targets, 60)
        fetch = time.perf_counter() - started
        after = (await end.ask(do="release", id=name))["cpu"] + time.process_time()
        return {"fetch": fetch, "both": fetch + offered["seconds"], "cpu": after - before}

    return measure


def memcpy_measure(into: memoryview) -> Measure:
    there = np.frombuffer(touched(len(into)), np.uint8)
    here = np.frombuffer(into, np.uint8)

    async def measure(size: int) -> dict[str, float]:
        cpu, started = time.process_time(), time.perf_counter()
        np.copyto(here[:size], there[:size])
        seconds = time.perf_counter() - started
        return {"fetch": seconds, "both": seconds, "cpu": time.process_time() - cpu}

    return measure


def tcp_measure(into: memoryview) -> Measure:
    """``sendall`` in another process, ``recv_into`` here, each blocking; the request is one small message."""
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        outbound = socket.create_connection(listener.getsockname())
        data = memoryview(touched(len(into)))
        while request := outbound.recv(8):
            outbound.sendall(data[: int.from_bytes(request, "little")])
        os._exit(0)
    inbound, _ = listener.accept()

    async def measure(size: int) -> dict[str, float]:
        cpu, started, done = time.process_time(), time.perf_counter(), 0
        inbound.sendall(size.to_bytes(8, "little"))
        while done < size:
            done += inbound.recv_into(into[done:size])
        seconds = time.perf_counter() - started
        return {"fetch": seconds, "both": seconds, "cpu": time.process_time() - cpu}

    return measure


def redis_measure(client: redis.asyncio.Redis, into: memoryview) -> Measure:
    data = bytes(touched(len(into)))

    async def measure(size: int) -> dict[str, float]:
        value = data[:size]
        cpu, started = time.process_time(), time.perf_counter()
        await client.set("plain", value)
        stored = time.perf_counter()
        into[:size] = await client.get("plain")
        ended = time.perf_counter()
        await client.unlink("plain")
        return {"fetch": ended - stored, "both": ended - started, "cpu": time.process_time() - cpu}

    return measure


# --- Run --------------------------------------------------------------------------------------------------------------


async def run(rounds: int, kinds: list[str], tcp: Measure, into: memoryview) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = valkey_server(Path(directory))
        await server.start()
        client = redis.asyncio.Redis.from_url(server.url)
        try:
            async with peers(kinds, server.url) as ends:
                contenders = {
                    "memcpy": memcpy_measure(into),
                    "raw TCP": tcp,
                    "SET + GET": redis_measure(client, into),
                    **{kind: transport_measure(end, into) for kind, end in ends.items()},
                }
                report_rates(await rates(rounds, contenders), kinds)
                for kind, end in ends.items():
                    await report_stall_and_latency(kind, end, into)
        finally:
            await client.aclose()
            await server.stop()


@asynccontextmanager
async def peers(kinds: list[str], url: str) -> AsyncIterator[dict[str, Peer]]:
    if not kinds:
        yield {}
        return
    async with peer(kinds[0], url) as first, peers(kinds[1:], url) as rest:
        yield {kinds[0]: first, **rest}


Figures = dict[tuple[str, int], list[dict[str, float]]]


async def rates(rounds: int, contenders: dict[str, Measure]) -> Figures:
    figures: Figures = defaultdict(list)
    for size in SIZES:
        repeats = max(1, min(20, 16 * MIB // size))
        for round_ in range(rounds + 1):
            for name, measure in contenders.items():
                if name == "SET + GET" and size > 64 * MIB:
                    continue
                for _ in range(repeats):
                    figure = await measure(size)
                    if round_:  # the first round touches memory and opens connections
                        figures[name, size].append(figure)
    return figures


def report_rates(figures: Figures, kinds: list[str]) -> None:
    names = list(dict.fromkeys(name for name, _ in figures))

    def median(name: str, size: int, what: str) -> float:
        values = [f[what] for f in figures.get((name, size), [])]
        return statistics.median(values) if values else float("nan")

    for what in ("fetch", "both"):
        print(f"\nGB/s, {what}:" + "".join(f"{size // KIB:>12} KiB" for size in SIZES))
        for name in names:
            print(f"{name:<12}" + "".join(f"{size / median(name, size, what) / 1e9:16.2f}" for size in SIZES))
    print("\nCPU s per GB" + "".join(f"{size // KIB:>12} KiB" for size in SIZES))
    for name in names:
        print(f"{name:<12}" + "".join(f"{median(name, size, 'cpu') / size * 1e9:16.2f}" for size in SIZES))
    print("\nRatios (median of the same run; the bar counts from 16 MiB on):")
    for kind in kinds:
        yardstick, bar = YARDSTICK[kind]
        for what in ("fetch", "both"):
            ratios = [median(yardstick, size, what) / median(kind, size, what) for size in SIZES]
            print(f"{kind:<6} {what:<6} / {yardstick:<10} (bar {bar})" + "".join(f"{ratio:10.2f}" for ratio in ratios))


async def report_stall_and_latency(kind: str, end: Peer, into: memoryview) -> None:
    measure = transport_measure(end, into)
    stall = Stall()
    await end.ask(do="stall")
    await asyncio.sleep(1.0)
    idle = max(stall.take_ms(), (await end.ask(do="stall"))["ms"])
    for _ in range(4):
        await measure(64 * MIB)
    worst = max(stall.take_ms(), (await end.ask(do="stall"))["ms"])
    small = sorted([(await measure(KIB))["fetch"] for _ in range(200)])
    print(
        f"{kind:<6} stall {worst:.1f} ms (idle {idle:.1f} ms); fetch of 1 KiB: median {small[100] * 1e6:.0f} us, "
        f"p99 {small[197] * 1e6:.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="shm,ucx,redis")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        asyncio.run(source(options.source, options.url))
        return
    into = memoryview(touched(max(SIZES)))
    tcp = tcp_measure(into)  # forks: before any thread is started
    assert threading.active_count() == 1
    asyncio.run(run(options.rounds, options.only.split(","), tcp, into))


if __name__ == "__main__":
    main()
