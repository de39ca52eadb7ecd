"""What the transport tests and their source program share: payloads, references, transports by name, a source process."""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdq.adapters.memory.transport import MemoryTransport, TransportWorld
from pdq.adapters.redis_tier import RedisTier
from pdq.adapters.shm import ShmTransport
from pdq.adapters.ucx import UcxTransport
from pdq.core.lease import RecordKey
from pdq.core.settings import RedisSettings, TransportSettings
from pdq.ports import Buffer, ChunkPlan, HandoffRef, KvTransport, Locator

ROOT = Path(__file__).parents[1]


def make(kind: str, url: str, world: TransportWorld | None = None) -> KvTransport:
    settings = TransportSettings()
    match kind:
        case "ucx":
            return UcxTransport(settings)
        case "shm":
            return ShmTransport(settings)
        case "redis":
            return RedisTier(RedisSettings(url=url), settings)
        case _:
            return MemoryTransport(world or TransportWorld())


MODEL = "org/model.v1"


def ref(request_id: str, *, epoch: int = 1, secret: str = "open sesame") -> HandoffRef:
    return HandoffRef(RecordKey(MODEL, request_id), epoch, secret)


def payload(seed: int, chunk: int, length: int) -> bytearray:
    """Bytes that differ at every place, cheap for large lengths."""
    block = random.Random(seed * 1000 + chunk).randbytes(min(length, 65_537))
    return bytearray((block * (-(-length // max(len(block), 1))))[:length])


def cuts(data: Buffer, parts: int | Sequence[int]) -> list[memoryview]:
    """``data`` in that many parts of unequal lengths, or at the given borders."""
    view = memoryview(data)
    if isinstance(parts, int):
        rng = random.Random(parts)
        borders = sorted(rng.randint(0, len(view)) for _ in range(parts - 1))
    else:
        borders = sorted(min(border, len(view)) for border in parts)
    return [view[a:b] for a, b in zip([0, *borders], [*borders, len(view)], strict=True)]


def targets(plan: ChunkPlan, parts: int | Sequence[int] = 1) -> tuple[list[bytearray], list[list[memoryview]]]:
    buffers = [bytearray(length) for length in plan.lengths]
    return buffers, [cuts(buffer, parts) for buffer in buffers]


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Poll until ``condition`` holds; fail the test when it does not in time."""
    give_up = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < give_up, "the condition did not come true in time"
        await asyncio.sleep(0.005)


class SourceProcess:
    """``tests/kv_source.py``, running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, kind: str, url: str) -> "SourceProcess":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.kv_source",
            kind,
            url,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        source = cls(process)
        assert await source._answer() == {"ready": True}
        return source

    async def tell(self, do: str, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
        return await self._answer()

    async def offer(
        self, request_id: str, plan: ChunkPlan, *, chunks: Sequence[int] | None = None, parts: int = 1, seed: int = 1
    ) -> Locator:
        answer = await self.tell(
            "offer",
            id=request_id,
            lengths=plan.lengths,
            seed=seed,
            chunks=list(range(len(plan.lengths)) if chunks is None else chunks),
            parts=parts,
        )
        return Locator(answer["transport"], answer["address"])

    async def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 30))
        return answer

    async def end(self) -> int:
        """Close its transport and wait; its exit status."""
        if self.process.returncode is None:
            await self.tell("close")
        return await asyncio.wait_for(self.process.wait(), 15)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
