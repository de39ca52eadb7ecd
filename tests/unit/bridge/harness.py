"""A bridge on a loopback port over the in-memory adapters, and a worker that does what a test tells it."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from msgspec.structs import replace
from openai import AsyncOpenAI

from pdq.adapters.memory.bus import MemoryBus
from pdq.adapters.memory.ledger import MemoryLedger
from pdq.adapters.memory.queue import MemoryQueue
from pdq.adapters.memory.registry import MemoryRegistry
from pdq.adapters.tokenizer import ByteTokenizer
from pdq.bridge.app import Parts
from pdq.bridge.server import listen, serve
from pdq.core import names
from pdq.core.handoff import Event
from pdq.core.layout import Fingerprint, KvLayout
from pdq.core.lease import RecordKey
from pdq.core.messages import (
    Cancel,
    Control,
    End,
    Logprob,
    PrefillJob,
    Resend,
    TokenEntry,
    TokenFrame,
    TokenLogprobs,
    Usage,
    decode,
)
from pdq.core.output import Output
from pdq.core.settings import AdmissionSettings, BridgeSettings, HandoffSettings, Settings
from pdq.ports import BackendContract, Changes, Occupancy, Pool, Queue, Record, WorkerInfo
from pdq.runtime import Lifecycle

MODEL = "org/bytes.v1"
MAX_CONTEXT = 1000
BLOCKS = 1000
ANSWER = "Żółć, a quick brown fox. And more of it."
WORKER = "decode-test"


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.002)


def settings(**groups: dict[str, Any]) -> Settings:
    chosen = {"bridge": {"silence_s": 30.0}, **groups}
    return Settings(
        bridge=BridgeSettings(port=0, **chosen["bridge"]),
        handoff=HandoffSettings(**chosen.get("handoff", {})),
        admission=AdmissionSettings(**chosen.get("admission", {})),
    )


SHORT_SILENCE = settings(bridge={"silence_s": 0.05})


def events(text: str) -> list[dict[str, object] | str]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def worker_info(pool: Pool, *, aggregated: bool = False, max_context: int = MAX_CONTEXT) -> WorkerInfo:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="uint8", block_size=16, chunk_tokens=16)
    contract = BackendContract(
        name="test",
        version="1",
        first_token="prefill",
        order=("on_complete",),
        direction="pull",
        chunked=True,
        reentry=True,
        resume=True,
        layout=layout,
        fingerprint=Fingerprint(model=MODEL, weights="w", tokenizer="t", dtype="uint8"),
        max_context=max_context,
    )
    return WorkerInfo(
        worker=f"{pool}-test",
        pool=pool,
        model=MODEL,
        contract=contract,
        occupancy=Occupancy(total_blocks=BLOCKS, free_blocks=BLOCKS, running=0, held=0),
        host="test",
        pid=1,
        state="ready",
        started_ms=0,
        aggregated=aggregated,
    )


@dataclass
class Rig:
    """The world around one bridge."""

    settings: Settings
    queue: MemoryQueue
    ledger: MemoryLedger
    bus: MemoryBus
    registry: MemoryRegistry
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    base_url: str = ""
    controls: list[Control] = field(default_factory=list)
    jobs: list[PrefillJob] = field(default_factory=list)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    serving: "asyncio.Task[None] | None" = None

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="-", max_retries=0, timeout=20)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.base_url, timeout=20)

    async def record(self, request_id: str) -> Record:
        record = await self.ledger.read(RecordKey(MODEL, request_id))
        assert record is not None
        return record

    def cancelled(self) -> list[str]:
        return [id_ for message in self.controls if isinstance(message, Cancel) for id_ in message.request_ids]

    def resends(self) -> list[Resend]:
        return [message for message in self.controls if isinstance(message, Resend)]


Script = Callable[["Rig", PrefillJob, "Sender"], Awaitable[None]]


class Sender:
    """Makes and sends one request's frames."""

    def __init__(self, rig: Rig, job: PrefillJob) -> None:
        assert job.request_id is not None
        assert job.prompt_token_ids is not None
        self.rig = rig
        self.job = job
        self.key = RecordKey(MODEL, job.request_id)
        self.epoch = 0

    async def begin(self) -> None:
        grant = await self.rig.ledger.acquire(self.key, Event.BEGIN, WORKER, 60_000)
        self.epoch = grant.epoch
        await self.rig.ledger.apply(self.key, Event.ADOPT, epoch=self.epoch, worker=WORKER)

    async def finish(self, code: str, emitted: int) -> None:
        changes = Changes(ended_code=code, emitted=emitted)
        await self.rig.ledger.apply(self.key, Event.FINISH, epoch=self.epoch, worker=WORKER, changes=changes)

    async def fail(self, code: str, message: str) -> None:
        await self.rig.ledger.apply(
            self.key, Event.FAIL, worker=WORKER, changes=Changes(ended_code=code, ended_message=message)
        )

    async def send(self, *entries: TokenEntry) -> None:
        await self.rig.bus.send(self.job.reply_to, TokenFrame(worker=WORKER, entries=entries))

    def entry(self, seq: int, text: str = "", end: End | None = None) -> TokenEntry:
        tokens = tuple(text.encode())
        pieces = tuple(chr(token) for token in tokens)
        return TokenEntry(self.key.request_id, seq, tokens, pieces, end=end)

    def done(self, tokens: int, **more: Any) -> End:
        assert self.job.prompt_token_ids is not None
        usage = Usage(len(self.job.prompt_token_ids), tokens)
        return End("done", finish_reason=more.pop("finish_reason", "stop"), usage=usage, **more)

    def entries(self, text: str) -> list[TokenEntry]:
        """``text`` as a model would give it under this job's sampling: one token per entry, then EOS."""
        sampling = self.job.sampling
        assert sampling.max_tokens is not None
        output = Output(self.rig.tokenizer, sampling, sampling.max_tokens)
        made: list[TokenEntry] = []
        for token in [*text.encode(), ByteTokenizer.EOS]:
            piece, finish = output.push(token)
            logprobs = None
            if sampling.logprobs is not None:
                name = self.rig.tokenizer.piece(token)
                top = tuple(Logprob(token + at, name, -0.5 - at) for at in range(sampling.logprobs))
                logprobs = (TokenLogprobs(token, name, -0.5, top),)
            entry = TokenEntry(self.key.request_id, len(made), (token,), (piece,), logprobs)
            if finish is not None:
                end = self.done(
                    len(output.tokens), finish_reason=finish.reason, stop_reason=finish.stop_reason, tail=finish.tail
                )
                return [*made, replace(entry, end=end)]
            made.append(entry)
        raise AssertionError("EOS ends every text")


async def speak(_: Rig, __: PrefillJob, sender: Sender) -> None:
    """The well-behaved worker."""
    await sender.begin()
    entries = sender.entries(ANSWER)
    for entry in entries[:-1]:
        await sender.send(entry)
    await sender.finish("stop", len(entries))
    await sender.send(entries[-1])


@contextlib.asynccontextmanager
async def rig(
    script: Script = speak,
    *,
    workers: tuple[Pool, ...] = (Pool.PREFILL, Pool.DECODE),
    aggregated: bool = False,
    config: Settings | None = None,
    send_buffer: int | None = None,
    **parts: Any,
) -> AsyncIterator[Rig]:
    config = config or settings()
    world = Rig(
        config,
        parts.get("queue") or MemoryQueue(config.queue),
        parts.get("ledger") or MemoryLedger(config.lease),
        MemoryBus(),
        MemoryRegistry(),
    )
    for pool in workers:
        await world.registry.announce(worker_info(pool, aggregated=aggregated), 600_000)
    await world.bus.on_control(names.CANCEL_SUBJECT, world.controls.append)
    await world.bus.on_control(names.worker_subject(WORKER), world.controls.append)
    listener = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    world.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    bridge_parts = Parts(
        queue=world.queue,
        ledger=world.ledger,
        bus=world.bus,
        registry=world.registry,
        tokenizers={MODEL: world.tokenizer},
        settings=config,
        owner="bridge-test",
    )
    listening = asyncio.Event()
    world.serving = asyncio.create_task(
        serve(bridge_parts, world.lifecycle, listener=listener, on_listening=lambda *_: listening.set())
    )
    pulling = [asyncio.create_task(_work(world, queue, script)) for queue in (Queue.PREFILL, Queue.LOCAL)]
    try:
        await listening.wait()
        yield world
    finally:
        world.lifecycle.stop()
        await world.serving
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)


async def _work(world: Rig, queue: Queue, script: Script) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            for delivery in await world.queue.pull(queue, MODEL, limit=16, wait_s=5):
                job = decode(delivery.data, PrefillJob)
                world.jobs.append(job)
                await delivery.ack()
                group.create_task(script(world, job, Sender(world, job)))  # type: ignore[arg-type]


MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": MESSAGES}
