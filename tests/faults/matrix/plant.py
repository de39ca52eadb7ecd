"""A whole pdq whose parts can be hurt one by one: real processes, real servers, a network of its own for each program."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil
from redis.asyncio import Redis

from pdq.adapters.processes import Child, Server, free_port, nats_server, valkey_server
from pdq.connect import Connected, connect
from pdq.core import names
from pdq.core.environment import load
from pdq.core.load import Count
from pdq.core.messages import Failpoints
from pdq.core.settings import Settings
from pdq.ports import Queue
from tests.e2e.stack import SHORT_LEASES
from tests.faults.matrix.proxy import Network

MODEL: Final = "sim"
PREFILL: Final = ("prefill-0", "prefill-1")
DECODE: Final = ("decode-0", "decode-1")
WORKERS: Final = (*PREFILL, *DECODE)
PROGRAMS: Final = ("reaper", *WORKERS, "bridge")
PATIENCE_S: Final = 60.0
LEASE_S: Final = int(SHORT_LEASES["PDQ_LEASE_TTL_MS"]) / 1000
REAPER_S: Final = int(SHORT_LEASES["PDQ_LEASE_REAPER_PERIOD_MS"]) / 1000

ENVIRONMENT: Final = {
    **SHORT_LEASES,
    "OMP_NUM_THREADS": "1",
    "PDQ_FAILPOINTS": "on",
    "PDQ_LOG_LEVEL": "info",
    "PDQ_SIM_STEP_MS": "4",
    "PDQ_SIM_PREFILL_MS_PER_TOKEN": "0.1",
    "PDQ_ENGINE_CHUNK_TOKENS": "64",
    "PDQ_TRANSPORT_FETCH_TIMEOUT_S": "2",
    "PDQ_REDIS_TIMEOUT_S": "2",
    "PDQ_BRIDGE_SILENCE_S": "1",
}


async def until(
    condition: Callable[[], Awaitable[bool]], what: Callable[[], str], timeout_s: float = PATIENCE_S
) -> None:
    """Returns when ``condition`` holds; fails with ``what`` after ``timeout_s``."""
    give_up = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < give_up, f"still not: {what()}"
        await asyncio.sleep(0.02)


@dataclass
class Program:
    """One of pdq's programs, its log, and the networks between it and the servers."""

    name: str
    directory: Path
    environ: Mapping[str, str]
    nats: Network
    redis: Network
    child: Child = field(init=False)
    generation: int = 0

    def start(self) -> None:
        """A worker that comes again has a new name, as a new pod has."""
        self.generation += 1
        self.child = Child(self.name, self._command(), self.directory / f"{self.name}.log", self.environ).start()

    @property
    def identity(self) -> str:
        return f"{self.name}-{self.generation}"

    def _command(self) -> list[str]:
        pool = self.name.split("-")[0]
        match pool:
            case "reaper":
                return [sys.executable, "-m", "pdq.cli", "reaper"]
            case "bridge":
                return [sys.executable, "-m", "pdq.bridge", "--model", MODEL]
            case _:
                return [sys.executable, "-m", "workers.sim", pool, "--model", MODEL, "--id", self.identity]

    @property
    def stopped(self) -> bool:
        return psutil.Process(self.child.pid).status() == psutil.STATUS_STOPPED

    def log_size(self) -> int:
        return self.child.log.stat().st_size

    def log_since(self, size: int) -> str:
        with self.child.log.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")

    def control_subject(self) -> str:
        """Where this process takes failpoints; empty until it listens."""
        start = f"failpoints of process {self.child.pid} can be set at "
        line = next((it for it in self.child.log.read_text().splitlines() if start in it), "")
        return line.rpartition(" ")[2]

    def cut(self) -> None:
        self.nats.cut()
        self.redis.cut()

    def slow(self, lag_s: float) -> None:
        self.nats.slow(lag_s)
        self.redis.slow(lag_s)

    def mend(self) -> None:
        self.nats.mend()
        self.redis.mend()


class Plant:
    def __init__(self, directory: Path, extra: Mapping[str, str]) -> None:
        self._directory = directory
        self._extra = extra
        self._stack = AsyncExitStack()
        self.servers: dict[str, Server] = {}
        self.programs: dict[str, Program] = {}
        self.system: Connected
        self.settings: Settings
        self.url = ""
        self._supervisor: asyncio.Task[None] | None = None

    # --- Start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> "Plant":
        self.servers = {
            "nats": nats_server(self._directory / "nats"),
            "valkey": valkey_server(self._directory / "valkey"),
        }
        for server in self.servers.values():
            await server.start()
            self._stack.push_async_callback(server.stop)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
        shm = tempfile.mkdtemp(prefix="pdq-test-", dir="/dev/shm")
        self._stack.callback(shutil.rmtree, shm)
        segments = {"PDQ_TRANSPORT_SHM_DIR": shm}
        environ = {**inherited, **ENVIRONMENT, **self._extra, **segments, "PDQ_BRIDGE_PORT": str(port)}
        for name in PROGRAMS:
            nats = await Network(self.servers["nats"].port).start()
            redis = await Network(self.servers["valkey"].port).start()
            self._stack.push_async_callback(nats.close)
            self._stack.push_async_callback(redis.close)
            places = {
                "PDQ_NATS_URL": f"nats://127.0.0.1:{nats.port}",
                "PDQ_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
            }
            program = self.programs[name] = Program(name, self._directory, {**environ, **places}, nats, redis)
            program.start()
            self._stack.push_async_callback(self._stop, program)
        ours = {"PDQ_NATS_URL": self.servers["nats"].url, "PDQ_REDIS_URL": self.servers["valkey"].url}
        self.settings = load({**ENVIRONMENT, **self._extra, **segments, **ours})
        self.system = await self._stack.enter_async_context(connect(self.settings, "test"))
        self._supervisor = asyncio.create_task(self._supervise())
        await self.whole()
        return self

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
        await self._stack.aclose()

    @staticmethod
    async def _stop(program: Program) -> None:
        program.mend()
        await program.child.stop(20)

    async def _supervise(self) -> None:
        """Whatever ends is started again."""
        while True:
            for program in self.programs.values():
                if program.child.returncode is not None:
                    program.start()
            await asyncio.sleep(0.05)

    # --- Faults -------------------------------------------------------------------------------------------------------

    async def arm(self, name: str, setting: str) -> None:
        """Failpoints of one program; returns when they are armed."""
        program = self.programs[name]
        size = program.log_size()
        said = f"failpoints of process {program.child.pid}: {setting or 'none'}"

        async def armed() -> bool:
            return said in program.log_since(size)

        await self.system.bus.control(program.control_subject(), Failpoints(setting))
        await until(armed, lambda: f"{name} has armed {setting!r}")

    # --- What is there ------------------------------------------------------------------------------------------------

    async def whole(self) -> None:
        """Every program is up and listens, and the bridge is ready."""

        async def ready() -> bool:
            programs = self.programs.values()
            if not all(it.child.returncode is None and it.control_subject() for it in programs):
                return False
            known = {worker.worker for worker in await self.system.registry.workers()}
            if not {self.programs[name].identity for name in WORKERS} <= known:
                return False
            async with httpx.AsyncClient(timeout=5) as client:
                try:
                    return (await client.get(f"{self.url}/health/ready")).status_code == 200
                except httpx.HTTPError:
                    return False

        await until(ready, lambda: f"all programs are up\n{self.logs()}")

    async def held(self, since_ms: int) -> list[str]:
        """What anyone still holds; a worker's word counts only if it was given after ``since_ms`` (ledger's clock)."""
        system = self.system
        found = [
            f"record {record.key.request_id} is {record.state}, {record.source=}, {record.sink=}"
            for record in await system.ledger.live(MODEL)
        ]
        here = msgspec.structs.replace(await system.ledger.load(MODEL), accepted=Count(), ended=Count())  # totals stay
        if counted := [count for count in _numbers(msgspec.to_builtins(here)) if count]:
            found.append(f"load counters: {counted}")
        depths = {queue.value: await system.queue.depth(queue, MODEL) for queue in Queue}
        found += [f"queue {queue} has {depth} (waiting, taken)" for queue, depth in depths.items() if any(depth)]
        spoken = {worker.worker: worker for worker in await system.registry.workers()}
        async with Redis.from_url(self.servers["valkey"].url) as client:
            for name in WORKERS:
                identity = self.programs[name].identity
                left_ms = int(await client.pttl(names.worker_key(identity)))
                announced_ms = await system.ledger.now_ms() + left_ms - int(LEASE_S * 1000)
                if identity not in spoken or announced_ms <= since_ms:
                    found.append(f"{identity} has not spoken since")
                    continue
                now = spoken[identity].occupancy
                if now.free_blocks != now.total_blocks or now.held or now.running:
                    found.append(f"{identity} holds {now}")
            found += [f"tier key {key}" async for key in client.scan_iter(f"pdq:{{{MODEL}}}:kv:*")]
        return found

    def signal(self, name: str, number: int) -> None:
        child = self.servers[name].child if name in self.servers else self.programs[name].child
        child.signal(number)

    async def restart_server(self, name: str) -> None:
        server = self.servers[name]
        server.child.signal(signal.SIGKILL)
        await server.child.wait()
        await server.start()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{it.child.log_tail(25)}" for name, it in self.programs.items())


def _numbers(tree: object) -> Iterator[int]:
    """Every number in a tree of mappings."""
    if isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _numbers(branch)
    elif isinstance(tree, int):
        yield tree
