"""What the queue and bus suites share: one place to open adapters at, in memory or on a real NATS server."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from pdq.adapters import nats
from pdq.adapters.memory.bus import MemoryBus
from pdq.adapters.memory.queue import MemoryQueue
from pdq.core import names
from pdq.core.settings import NatsSettings, QueueSettings
from pdq.ports import JobQueue, TokenBus

ACK_WAIT_S = 1.0


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    """Return as soon as ``condition`` holds; fail if it does not within the bound."""
    give_up = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < give_up, "it did not come true in time"
        await asyncio.sleep(0.02)


class Dead(msgspec.Struct, frozen=True):
    code: str
    detail: str
    data: bytes


class OpenQueue(JobQueue, Protocol):
    async def ensure_streams(self) -> None: ...


class Place(Protocol):
    """A broker. Each ``queue()`` and ``bus()`` stands for a process of its own."""

    async def queue(self) -> OpenQueue: ...
    async def bus(self) -> TokenBus: ...
    async def send_raw(self, subject: str, data: bytes) -> None: ...
    async def dead(self, queue: str, model: str) -> list[Dead]: ...
    async def close(self) -> None: ...


class MemoryPlace:
    def __init__(self, settings: QueueSettings) -> None:
        self._queue = MemoryQueue(settings)
        self._bus = MemoryBus(max_payload=SMALL_PAYLOAD)

    async def queue(self) -> MemoryQueue:
        return self._queue

    async def bus(self) -> MemoryBus:
        return self._bus

    async def send_raw(self, subject: str, data: bytes) -> None:
        self._bus.publish(subject, data)

    async def dead(self, queue: str, model: str) -> list[Dead]:
        return [Dead(d.code, d.detail, d.data) for d in self._queue.letters if (d.queue, d.model) == (queue, model)]

    async def close(self) -> None:
        pass


class NatsPlace:
    def __init__(self, url: str, settings: QueueSettings) -> None:
        self._url = url
        self._settings = settings
        self._connections: list[nats.Connection] = []

    async def connection(self) -> nats.Connection:
        connection = await nats.connect(NatsSettings(url=self._url), name="conformance")
        self._connections.append(connection)
        return connection

    async def queue(self) -> nats.NatsQueue:
        queue = nats.NatsQueue(await self.connection(), self._settings)
        await queue.ensure_streams()
        return queue

    async def bus(self) -> nats.NatsBus:
        return nats.NatsBus(await self.connection())

    async def send_raw(self, subject: str, data: bytes) -> None:
        await (await self.connection()).publish(subject, data)

    async def dead(self, queue: str, model: str) -> list[Dead]:
        connection = await self.connection()
        subject = names.dead_subject(queue, model)
        found: list[Dead] = []
        sequence = 1
        while True:
            request = msgspec.json.encode({"seq": sequence, "next_by_subj": subject})
            # Not the direct API, which streams answer only if told to.
            reply = await connection.request(f"$JS.API.STREAM.MSG.GET.{names.DEAD_STREAM}", request, timeout_s=5)
            message = msgspec.json.decode(reply.data).get("message")
            if message is None:
                return found
            stored = msgspec.convert(message, _Stored)
            lines = dict(line.split(": ", 1) for line in stored.hdrs.decode().split("\r\n")[1:] if line)
            found.append(Dead(lines[names.HEADER_DEAD_REASON], lines[names.HEADER_DEAD_DETAIL], stored.data))
            sequence = stored.seq + 1

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


class _Stored(msgspec.Struct):
    seq: int
    hdrs: bytes
    data: bytes = b""


SMALL_PAYLOAD = 1024 * 1024
