"""The composition root: settings in, opened adapters out. The only module that knows which adapter stands behind a port."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdq import failpoints
from pdq.adapters import nats, redis
from pdq.adapters.shm_segments import ShmSegments
from pdq.core import names
from pdq.core.errors import InvalidSettings
from pdq.core.messages import Control, Failpoints
from pdq.core.settings import Settings
from pdq.ports import Board, HandoffLedger, JobQueue, KvStore, KvTransport, TokenBus, WorkerRegistry


@dataclass(frozen=True)
class Connected:
    """A program's ports on the running servers."""

    queue: JobQueue
    bus: TokenBus
    ledger: HandoffLedger
    registry: WorkerRegistry
    board: Board


@asynccontextmanager
async def connect(settings: Settings, name: str) -> AsyncIterator[Connected]:
    """Open what every program needs: queues, bus, ledger, registry, board. Streams are created if they are not there yet.

    Raises:
        Unavailable: a server does not answer.
        InvalidSettings: a URL cannot be understood.
    """
    async with AsyncExitStack() as stack:
        connection = await nats.connect(settings.nats, name)
        stack.push_async_callback(connection.close)
        queue = nats.NatsQueue(connection, settings.queue)
        await queue.ensure_streams()
        client = await redis.connect(settings.redis)
        stack.push_async_callback(client.aclose)
        ledger = redis.RedisLedger(client, settings.lease)
        stack.push_async_callback(ledger.close)
        registry = redis.RedisRegistry(client)
        stack.push_async_callback(registry.close)
        board = redis.RedisBoard(client)
        stack.push_async_callback(board.close)
        bus = nats.NatsBus(connection)
        await _listen_for_failpoints(bus, names.worker_subject(name))
        yield Connected(queue=queue, bus=bus, ledger=ledger, registry=registry, board=board)


@asynccontextmanager
async def directory(settings: Settings) -> AsyncIterator[tuple[WorkerRegistry, Board]]:
    """Who is there and who was sent away, without asking more than Redis.

    Raises:
        Unavailable: it does not answer.
    """
    client = await redis.connect(settings.redis)
    registry, board = redis.RedisRegistry(client), redis.RedisBoard(client)
    try:
        yield registry, board
    finally:
        await registry.close()
        await board.close()
        await client.aclose()


async def _listen_for_failpoints(bus: TokenBus, subject: str) -> None:
    async def listen(heard: Callable[[str], None]) -> None:
        def hear(message: Control) -> None:
            if isinstance(message, Failpoints):
                heard(message.setting)

        await bus.on_control(subject, hear)

    await failpoints.open_to(subject, listen)


@asynccontextmanager
async def transports(settings: Settings) -> AsyncIterator[Mapping[str, KvTransport]]:
    """Started KV transports: those in ``transport.order``, and the tiers that are written through.

    Raises:
        InvalidSettings: a transport that exists only inside one process.
    """
    wanted = dict.fromkeys((*settings.transport.order, *settings.transport.write_through, *settings.transport.spill))
    async with AsyncExitStack() as stack:
        opened: dict[str, KvTransport] = {}
        for name in wanted:
            transport = _transport(name, settings)
            await transport.start()
            stack.push_async_callback(transport.close)
            opened[name] = transport
        yield opened


@asynccontextmanager
async def kv_stores(settings: Settings) -> AsyncIterator[Sequence[KvStore]]:
    """Where KV may lie without a process around it: the Redis tier, and shared memory on this host."""
    client = await redis.connect(settings.redis)
    tier = redis.RedisTierObjects(client)
    try:
        yield (tier, ShmSegments(Path(settings.transport.shm_dir)))
    finally:
        await tier.close()
        await client.aclose()


def _transport(name: str, settings: Settings) -> KvTransport:
    # Imported when wanted: ucxx takes a second to load, and not every deployment has it.
    match name:
        case "ucx":
            from pdq.adapters.ucx import UcxTransport

            return UcxTransport(settings.transport)
        case "shm":
            from pdq.adapters.shm import ShmTransport

            return ShmTransport(settings.transport)
        case "redis":
            from pdq.adapters.redis_tier import RedisTier

            return RedisTier(settings.redis, settings.transport)
        case _:
            raise InvalidSettings(f"transport {name!r} works only inside one process; use ucx, shm or redis")
