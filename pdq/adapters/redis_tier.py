"""KV bytes kept in Redis or Valkey: a tier that outlives its source and works from anywhere.

A chunk is cut into pieces, each a string with a TTL; a hash (``head``) names the chunks that are complete, with their
digests, so that a reader never sees half a chunk. The pieces of a chunk and its entry in the head go out in one pipeline.

The bytes take their own way: redis-py opens and authenticates the connection, then a thread writes the commands to its
socket and receives replies straight into the sink's buffers. Through the client each byte is copied four more times, mostly
on the event loop's thread.
"""

import asyncio
import hashlib
import hmac
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec
from redis import Connection, ConnectionPool
from redis.asyncio import Redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from pdq import failpoints
from pdq.adapters.buffers import copy, cut, fitting, fitting_all, off_loop
from pdq.adapters.redis.link import options_of
from pdq.core.errors import DigestMismatch, HandoffUnknown, PeerLost, TransferFailed
from pdq.core.layout import chunk_hash
from pdq.core.lease import RecordKey
from pdq.core.names import tier_key
from pdq.core.settings import RedisSettings, TransportSettings
from pdq.ports import Buffer, ChunkPlan, Fetched, HandoffRef, Locator

PIECE: Final = 256 * 1024
LINE_BYTES: Final = 4096
TIMEOUT_S: Final = 5.0
"""For one answer of the server."""
POLL_S: Final = (0.002, 0.1)


def _pass(ref: HandoffRef) -> bytes:
    return hashlib.sha256(f"{ref.epoch}\x00{ref.secret}".encode()).hexdigest().encode()


def _head(ref: HandoffRef) -> str:
    return tier_key(ref.key.model, ref.key.request_id, ref.epoch, "head")


def _pieces(ref: HandoffRef, index: int, length: int) -> Iterator[tuple[str, int, int]]:
    """Key, offset and length of each piece of a chunk."""
    for offset in range(0, length, PIECE):
        key = tier_key(ref.key.model, ref.key.request_id, ref.epoch, f"{index}.{offset // PIECE}")
        yield key, offset, min(PIECE, length - offset)


@dataclass
class _Held:
    ref: HandoffRef
    plan: ChunkPlan
    chunks: set[int] = field(default_factory=set)
    writes: asyncio.Lock = field(default_factory=asyncio.Lock)
    released: bool = False


class RedisTier:
    """``KvTransport`` through one Redis server."""

    def __init__(self, redis: RedisSettings, settings: TransportSettings) -> None:
        options = options_of(redis) | {"protocol": 2, "socket_connect_timeout": TIMEOUT_S}
        # With a timeout of its own the client uses asyncio.wait_for, which loses cancellations in Python 3.11.
        self._client: Redis = Redis.from_url(
            redis.url, socket_timeout=None, retry=AsyncRetry(NoBackoff(), 0), **options
        )
        self._pool = ConnectionPool.from_url(
            redis.url, socket_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0), **options
        )
        self._ttl_ms = int(settings.tier_ttl_s * 1000)
        self._held: dict[tuple[RecordKey, int], _Held] = {}

    @property
    def name(self) -> str:
        return "redis"

    async def start(self) -> None:
        """Nothing: connections are opened by the first that needs one."""

    async def close(self) -> None:
        """What was offered stays, until its TTL: that is what a tier is for."""
        for held in self._held.values():
            async with held.writes:
                held.released = True
        self._held.clear()
        await self._client.aclose()
        self._pool.disconnect()

    # --- Source -------------------------------------------------------------------------------------------------------

    async def offer(self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> Locator:
        views = fitting(plan, index, parts)
        held = self._held.setdefault((ref.key, ref.epoch), _Held(ref, plan))
        async with held.writes:
            if index not in held.chunks and not held.released:
                stream = _Stream(self._pool, f"store chunk {index} of {ref.key.request_id}", writes=True)
                await off_loop(self._store, stream, ref, plan, index, views, hurry=stream.abort)
                held.chunks.add(index)
        if held.released:
            raise HandoffUnknown(f"{ref.key.request_id} was released while its chunk {index} was offered")
        return Locator(self.name, {})

    def _store(self, stream: "_Stream", ref: HandoffRef, plan: ChunkPlan, index: int, views: list[memoryview]) -> None:
        digest = chunk_hash(*views)
        head = _head(ref)
        lengths = msgspec.json.encode(plan.lengths)
        with stream:
            for key, offset, length in _pieces(ref, index, plan.lengths[index]):
                stream.send("SET", key, list(cut(views, offset, length)), "PX", str(self._ttl_ms))
            stream.send("HSET", head, "pass", _pass(ref), "lengths", lengths, str(index), digest)
            stream.send("PEXPIRE", head, str(self._ttl_ms))
            stream.finish()

    async def release(self, ref: HandoffRef) -> None:
        """Deletes the objects, whoever stored them: a sink that has fetched may let go for a source that died."""
        held = self._held.pop((ref.key, ref.epoch), None)
        if held is not None:
            held.released = True
            async with held.writes:  # nothing reads the parts from here on
                plan = held.plan
        try:
            if held is None:
                head = await self._read_head(ref)
                if not hmac.compare_digest(head.get(b"pass", b""), _pass(ref)):
                    return
                plan = ChunkPlan(msgspec.json.decode(head[b"lengths"], type=tuple[int, ...]))
            keys = [key for index, length in enumerate(plan.lengths) for key, _, _ in _pieces(ref, index, length)]
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.unlink(_head(ref), *keys)
        except (RedisError, OSError):
            return  # the TTL will do it

    def holding(self) -> Sequence[HandoffRef]:
        return [held.ref for held in self._held.values()]

    def sweep(self) -> int:
        return 0  # keys go by their TTL

    # --- Sink ---------------------------------------------------------------------------------------------------------

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        targets = fitting_all(plan, into)
        announced: dict[int, str] = {}
        for index, target in enumerate(targets):
            if index not in announced:
                announced = await self._announced(ref, plan, index, timeout_s)
            stream = _Stream(self._pool, f"fetch chunk {index} of {ref.key.request_id}")
            landed = await off_loop(self._load, stream, ref, index, target, hurry=stream.abort)
            if failpoints.armed and await failpoints.hit("transport.chunk", ref.key.request_id):
                landed = failpoints.WRONG_DIGEST
            if landed != announced[index]:
                raise DigestMismatch(
                    f"chunk {index} of {ref.key.request_id} landed as {landed}, announced as {announced[index]}"
                )
        return Fetched(self.name, plan.total, tuple(announced[index] for index in range(len(targets))))

    async def _announced(self, ref: HandoffRef, plan: ChunkPlan, index: int, timeout_s: float) -> dict[int, str]:
        """The digests of all chunks that are stored, once ``index`` is among them."""
        give_up = time.monotonic() + timeout_s
        pause, longest = POLL_S
        while True:
            try:
                head = await self._read_head(ref)
            except (RedisError, OSError) as error:
                raise PeerLost(f"the tier does not answer for {ref.key.request_id}: {error}") from error
            if not hmac.compare_digest(head.pop(b"pass", b""), _pass(ref)):
                raise HandoffUnknown(f"the tier does not hold {ref.key.request_id} epoch {ref.epoch}")
            if head.pop(b"lengths", b"") != msgspec.json.encode(plan.lengths):
                raise HandoffUnknown(f"the tier holds {ref.key.request_id} epoch {ref.epoch} with another plan")
            digests = {int(name): digest.decode(errors="replace") for name, digest in head.items() if name.isdigit()}
            if index in digests:
                return digests
            if time.monotonic() >= give_up:
                raise PeerLost(f"chunk {index} of {ref.key.request_id} was not stored within {timeout_s} s")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)

    async def _read_head(self, ref: HandoffRef) -> dict[bytes, bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            return cast(dict[bytes, bytes], await self._client.hgetall(_head(ref)))

    @staticmethod
    def _load(stream: "_Stream", ref: HandoffRef, index: int, target: list[memoryview]) -> str:
        length = sum(map(len, target))
        with stream:
            for key, _, _ in _pieces(ref, index, length):
                stream.send("GET", key)
            stream.flush()
            for key, offset, size in _pieces(ref, index, length):
                if not stream.receive(list(cut(target, offset, size)), size):
                    raise HandoffUnknown(f"the tier no longer holds {key}")
        return chunk_hash(*target)


class _Stream:
    """One connection of the pool, for one pipeline, on one thread. A connection that was left in the middle is closed."""

    def __init__(self, pool: ConnectionPool, purpose: str, *, writes: bool = False) -> None:
        self._pool = pool
        self._purpose = purpose
        self._writes = writes
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None
        self._aborted = False
        self._unsent = bytearray()
        self._expected = 0
        self._spare = bytearray()

    def __enter__(self) -> "_Stream":
        try:
            self._connection = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise PeerLost(f"cannot {self._purpose}: {error}") from error
        self._socket = self._connection._sock
        assert self._socket is not None
        if self._aborted:
            self.abort()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._connection is not None
        if error is not None:
            if self._writes:
                self._settle()
            self._connection.disconnect()  # type: ignore[no-untyped-call]
        self._pool.release(self._connection)
        if isinstance(error, (OSError, RedisError)):
            raise PeerLost(f"cannot {self._purpose}: {error}") from error

    def abort(self) -> None:
        """From another thread: whatever this stream is doing, it fails now."""
        self._aborted = True
        if self._socket is not None:
            with suppress(OSError):
                # Not the method: an SSL socket's own would let the other thread go on without encryption.
                socket.socket.shutdown(self._socket, socket.SHUT_WR if self._writes else socket.SHUT_RDWR)

    def _settle(self) -> None:
        """Returns when the server has closed this connection, and so has done all that it was sent: a write that it still
        had before it would come after, and survive, the deletion of the very keys."""
        assert self._socket is not None
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while socket.socket.recv(self._socket, LINE_BYTES):
                pass

    def send(self, *arguments: str | bytes | list[memoryview]) -> None:
        """One command; large arguments leave at once, the rest with them or with ``flush``."""
        self._expected += 1
        self._unsent += b"*%d\r\n" % len(arguments)
        for argument in arguments:
            if isinstance(argument, list):
                self._unsent += b"$%d\r\n" % sum(map(len, argument))
                self.flush()
                assert self._socket is not None
                self._socket.sendall(argument[0] if len(argument) == 1 else b"".join(argument))
                self._unsent += b"\r\n"
            else:
                value = argument.encode() if isinstance(argument, str) else argument
                self._unsent += b"$%d\r\n%b\r\n" % (len(value), value)

    def flush(self) -> None:
        assert self._socket is not None
        self._socket.sendall(self._unsent)
        self._unsent.clear()

    def finish(self) -> None:
        """Read the short answers of all commands sent."""
        self.flush()
        for _ in range(self._expected):
            if (line := self._line()).startswith(b"-"):
                raise TransferFailed(f"cannot {self._purpose}: the server says {line[1:].decode(errors='replace')}")

    def receive(self, views: list[memoryview], length: int) -> bool:
        """One bulk answer of ``length`` bytes, into ``views``; False when there is no such key."""
        line = self._line()
        if line == b"$-1":
            return False
        if line != b"$%d" % length:
            raise TransferFailed(f"cannot {self._purpose}: {length} bytes expected, the server says {line[:80]!r}")
        if len(views) == 1:
            self._fill(views[0])
        else:
            staged = memoryview(bytearray(length))
            self._fill(staged)
            copy([staged], views)
        self._fill(memoryview(bytearray(2)))
        return True

    def _line(self) -> bytes:
        """Up to the next line end; what was read beyond it stays for the next read."""
        assert self._socket is not None
        while (end := self._spare.find(b"\r\n")) < 0:
            if len(self._spare) > LINE_BYTES or not (more := self._socket.recv(LINE_BYTES)):
                raise ConnectionResetError("the server closed the connection")
            self._spare += more
        line = bytes(self._spare[:end])
        del self._spare[: end + 2]
        return line

    def _fill(self, view: memoryview) -> None:
        assert self._socket is not None
        done = min(len(view), len(self._spare))
        view[:done] = self._spare[:done]
        del self._spare[:done]
        while done < len(view):
            if not (got := self._socket.recv_into(view[done:])):
                raise ConnectionResetError("the server closed the connection")
            done += got
