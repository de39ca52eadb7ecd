"""KV bytes through POSIX shared memory, for two processes on one host.

One segment (a file in ``/dev/shm``, mode 0600) per handoff: a header, one entry per chunk (ready flag, hash), the bytes.
Both sides map it and copy in user space, which measures three times as fast as ``preadv`` on the same pages. The source
allocates every page first, so that a full file system is an error and not a SIGBUS.

* Alive: the source keeps an ``flock`` on its segment. The kernel drops it however the source dies, so a sink that waits
  and gets the lock knows that nobody will ever write again, and ``sweep`` knows which segments nobody will ever unlink.
* A tier (``write_through``, ``spill``): the segment outlives its source, for a time that its name tells to those who sweep.
* Released: the name is gone and the header is wiped. A sink looks at the header once more after it has copied, so it never
  takes bytes of the segment's next user for its own.
* Reused: first touch of memory is several times slower than a copy, so released segments go to a small bounded pool, and a
  sink keeps a few mappings: a pooled segment comes back under another name but with the same inode.
"""

import asyncio
import fcntl
import hashlib
import os
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import MAP_POPULATE, MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from pathlib import Path
from typing import Final

import xxhash

from pdq import failpoints
from pdq.adapters.buffers import INLINE_BYTES, copy, cut, fitting, fitting_all, off_loop
from pdq.adapters.hosts import boot_id
from pdq.adapters.shm_segments import fresh_path, segments, unlink_if_dead
from pdq.core.errors import DigestMismatch, HandoffUnknown, PeerLost, TransferFailed
from pdq.core.lease import RecordKey
from pdq.core.names import SHM_PREFIX
from pdq.core.settings import TransportSettings
from pdq.ports import Buffer, ChunkPlan, Fetched, HandoffRef, Locator

PAGE: Final = 4096
SLICE: Final = 512 * 1024
"""Copied and then hashed at a time, so that the hash finds its bytes in the cache."""
POOL_BYTES: Final = 512 * 1024 * 1024
"""How much a source keeps in released segments, and how much a sink keeps mapped."""
POLL_S: Final = (0.0002, 0.005)

MAGIC: Final = b"pdq-kv\x00\x01"
HEAD: Final = struct.Struct("=8s32sI")
"""Magic with the version, who may read (see ``_pass``), number of chunks."""
ENTRY: Final = struct.Struct("=16sI12x")
"""A chunk's hash, and 1 once its bytes are there."""
READY: Final = struct.Struct("=I")
READY_AT: Final = 16


def _pass(ref: HandoffRef) -> bytes:
    """What a reader must prove to know: handoff, epoch and secret in one hash, so that no secret lies in the file."""
    text = "\x00".join((ref.key.model, ref.key.request_id, str(ref.epoch), ref.secret))
    return hashlib.sha256(text.encode()).digest()


class _Shape:
    """Where things lie in the segment of one handoff; both sides compute it from what they know of the handoff."""

    def __init__(self, ref: HandoffRef, plan: ChunkPlan) -> None:
        self.head = HEAD.pack(MAGIC, _pass(ref), len(plan.lengths))
        table = HEAD.size + ENTRY.size * len(plan.lengths)
        self.starts = [-(-table // PAGE) * PAGE]
        for length in plan.lengths:
            self.starts.append(self.starts[-1] + length)
        self.lengths = plan.lengths

    @property
    def size(self) -> int:
        return self.starts[-1]

    def entry_at(self, index: int) -> int:
        return HEAD.size + ENTRY.size * index

    def of(self, memory: mmap, index: int) -> memoryview:
        """The bytes of chunk ``index``."""
        return memoryview(memory)[self.starts[index] : self.starts[index] + self.lengths[index]]


@dataclass
class _Segment:
    """A file that this process created and holds the lock of."""

    path: Path
    fd: int
    memory: mmap

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


@dataclass
class _Held:
    ref: HandoffRef
    shape: _Shape
    segment: _Segment | None = None
    chunks: set[int] = field(default_factory=set)
    writes: asyncio.Lock = field(default_factory=asyncio.Lock)
    released: bool = False


class ShmTransport:
    """``KvTransport`` over segments in ``shm_dir``."""

    def __init__(self, settings: TransportSettings, *, pool_bytes: int = POOL_BYTES) -> None:
        self._root = Path(settings.shm_dir)
        self._pool_bytes = pool_bytes
        self._outlives_s = settings.tier_ttl_s if "shm" in (*settings.write_through, *settings.spill) else None
        self._pool: list[_Segment] = []
        self._held: dict[tuple[RecordKey, int], _Held] = {}
        self._mapped = _Mapped(self._root, pool_bytes)

    @property
    def name(self) -> str:
        return "shm"

    async def start(self) -> None:
        await off_loop(self.sweep)

    async def close(self) -> None:
        """As a tier, what was offered stays until its time is over."""
        for held in list(self._held.values()):
            if self._outlives_s is None:
                await self.release(held.ref)
            else:
                await self._leave(held)
        while self._pool:
            self._pool.pop().close()
        self._mapped.close()

    def sweep(self) -> int:
        """Unlink the segments of processes that died; how many there were."""
        return sum(map(unlink_if_dead, segments(self._root)))

    # --- Source -------------------------------------------------------------------------------------------------------

    async def offer(self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> Locator:
        views = fitting(plan, index, parts)
        held = self._held.setdefault((ref.key, ref.epoch), _Held(ref, _Shape(ref, plan)))
        async with held.writes:
            try:
                if held.segment is None and not held.released:
                    held.segment = await self._take(held.shape)
                if held.segment is not None and index not in held.chunks and not held.released:
                    await self._write(held.segment.memory, held.shape, index, views)
                    held.chunks.add(index)
            except OSError as error:
                raise TransferFailed(f"no room for {plan.total} bytes of KV below {self._root}: {error}") from error
            if held.segment is None or held.released:
                raise HandoffUnknown(f"{ref.key.request_id} was released while its chunk {index} was offered")
            return Locator(self.name, {"boot_id": boot_id(), "segment": held.segment.path.name})

    @staticmethod
    async def _write(memory: mmap, shape: _Shape, index: int, views: list[memoryview]) -> None:
        """Bytes, then hash, then flag: a reader that sees the flag sees the rest."""
        digest = await _copy_and_hash(views, shape.of(memory, index), of_target=False)
        ENTRY.pack_into(memory, shape.entry_at(index), bytes.fromhex(digest), 0)
        READY.pack_into(memory, shape.entry_at(index) + READY_AT, 1)

    async def _take(self, shape: _Shape) -> _Segment:
        """From the pool the smallest that is large enough, else the largest there is (to grow), else a new one."""
        self._pool.sort(key=lambda s: len(s.memory))
        fit = next((s for s in self._pool if len(s.memory) >= shape.size), self._pool[-1] if self._pool else None)
        if fit is not None:
            self._pool.remove(fit)
        ready = fit is not None and len(fit.memory) >= shape.size
        return self._prepare(fit, shape) if ready else await off_loop(self._prepare, fit, shape)

    def _prepare(self, segment: _Segment | None, shape: _Shape) -> _Segment:
        path = fresh_path(self._root, self._outlives_s)
        fd = segment.fd if segment is not None else _create(path)
        try:
            if segment is None or len(segment.memory) < shape.size:
                os.posix_fallocate(fd, 0, shape.size)
                memory = mmap(fd, shape.size, flags=MAP_SHARED | MAP_POPULATE, prot=PROT_READ | PROT_WRITE)
            else:
                memory = segment.memory
            memory[: shape.starts[0]] = shape.head.ljust(shape.starts[0], b"\x00")
            if segment is not None:
                segment.path.rename(path)
            return _Segment(path, fd, memory)
        except OSError:
            (path if segment is None else segment.path).unlink(missing_ok=True)
            os.close(fd)
            raise

    async def release(self, ref: HandoffRef) -> None:
        held = self._held.pop((ref.key, ref.epoch), None)
        if held is None:
            return
        held.released = True
        async with held.writes:  # from here on nothing reads the parts
            if (segment := held.segment) is None:
                return
            held.segment = None
            segment.memory[: HEAD.size] = bytes(HEAD.size)
            if len(segment.memory) + sum(len(s.memory) for s in self._pool) > self._pool_bytes:
                segment.close()
                return
            hidden = fresh_path(self._root)
            segment.path.rename(hidden)
            segment.path = hidden
            self._pool.append(segment)

    async def _leave(self, held: _Held) -> None:
        held.released = True
        async with held.writes:
            if held.segment is not None:
                os.close(held.segment.fd)

    def holding(self) -> Sequence[HandoffRef]:
        return [held.ref for held in self._held.values()]

    # --- Sink ---------------------------------------------------------------------------------------------------------

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        targets = fitting_all(plan, into)
        if locator.address.get("boot_id") != boot_id():
            raise PeerLost(f"the shared memory of {ref.key.request_id} is on another host: {dict(locator.address)}")
        shape = _Shape(ref, plan)
        name = locator.address.get("segment", "")
        try:
            if shape.size <= INLINE_BYTES or self._mapped.knows(name):
                file, memory = self._mapped.open(name, shape.size)
            else:
                file, memory = await off_loop(self._mapped.open, name, shape.size)
        except OSError as error:
            raise HandoffUnknown(f"segment {name!r} of {ref.key.request_id} cannot be opened: {error}") from error
        reader = _Reader(file, memory, shape, ref)
        hashes = [await reader.fetch(index, target, timeout_s) for index, target in enumerate(targets)]
        return Fetched(self.name, plan.total, tuple(hashes))


def _create(path: Path) -> int:
    """A new locked file. A sweep may take it between creation and lock: then once more."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


class _File:
    """An open descriptor that is closed with its last user."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _Mapped:
    """A sink's mappings by inode, least recently used first, ``limit`` bytes at most. Safe to open from threads."""

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._kept: dict[tuple[int, int], tuple[_File, mmap]] = {}
        self._lock = threading.Lock()
        """Segments are opened off the loop, several at a time."""

    def knows(self, name: str) -> bool:
        """Whether opening ``name`` needs no new mapping, so far as one can tell without opening it."""
        with suppress(OSError, ValueError):
            stat = (self._root / name).stat()
            return (stat.st_dev, stat.st_ino) in self._kept
        return False

    def open(self, name: str, size: int) -> tuple[_File, mmap]:
        """A mapping of at least ``size`` bytes.

        Raises:
            OSError: no such segment, or it is shorter than what its handoff needs.
        """
        if not name.startswith(SHM_PREFIX) or "/" in name:
            raise FileNotFoundError("not the name of a pdq segment")
        file = _File(os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        stat = os.fstat(file.fd)
        if stat.st_size < size:
            raise OSError(f"{stat.st_size} bytes long where {size} are needed")
        with self._lock:
            self._forget_unlinked()
            known = self._kept.pop((stat.st_dev, stat.st_ino), None)
            if known is None or len(known[1]) < size:
                known = file, mmap(file.fd, stat.st_size, flags=MAP_SHARED | MAP_POPULATE, prot=PROT_READ)
            self._kept[stat.st_dev, stat.st_ino] = known
        return known

    def _forget_unlinked(self) -> None:
        """Their source has let go of them: only this mapping still holds the memory."""
        for key in [key for key, (file, _) in self._kept.items() if not os.fstat(file.fd).st_nlink]:
            del self._kept[key]
        while self._kept and sum(len(memory) for _, memory in self._kept.values()) > self._limit:
            del self._kept[next(iter(self._kept))]

    def close(self) -> None:
        self._kept.clear()


class _Reader:
    """A sink's view of the segment of one handoff."""

    def __init__(self, file: _File, memory: mmap, shape: _Shape, ref: HandoffRef) -> None:
        self._file = file
        self._memory = memory
        self._shape = shape
        self._ref = ref

    async def fetch(self, index: int, target: list[memoryview], timeout_s: float) -> str:
        announced = await self._ready(index, timeout_s)
        landed = await _copy_and_hash([self._shape.of(self._memory, index)], target, of_target=True)
        if failpoints.armed and await failpoints.hit("transport.chunk", self._ref.key.request_id):
            landed = failpoints.WRONG_DIGEST
        self._check()
        if landed != announced:
            raise DigestMismatch(
                f"chunk {index} of {self._ref.key.request_id} landed as {landed}, announced as {announced}"
            )
        return landed

    def _check(self) -> None:
        if self._memory[: HEAD.size] != self._shape.head:
            raise HandoffUnknown(f"{self._ref.key.request_id} epoch {self._ref.epoch} is not on offer in this segment")

    async def _ready(self, index: int, timeout_s: float) -> str:
        """The hash of chunk ``index``, once its bytes are there."""
        give_up = time.monotonic() + timeout_s
        pause, longest = POLL_S
        dead = False
        while True:
            self._check()
            digest, ready = ENTRY.unpack_from(self._memory, self._shape.entry_at(index))
            if ready:
                return bytes(digest).hex()
            if dead:
                raise PeerLost(f"the source of {self._ref.key.request_id} died before chunk {index} was offered")
            if time.monotonic() >= give_up:
                raise PeerLost(f"chunk {index} of {self._ref.key.request_id} was not offered within {timeout_s} s")
            # A source may write the chunk and end between the two looks: after a free lock, look once more.
            dead = self._source_is_gone()
            if not dead:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, longest)

    def _source_is_gone(self) -> bool:
        try:
            fcntl.flock(self._file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file.fd, fcntl.LOCK_UN)
        return True


async def _copy_and_hash(
    source: Sequence[memoryview], target: memoryview | list[memoryview], *, of_target: bool
) -> str:
    targets = [target] if isinstance(target, memoryview) else target
    if sum(map(len, source)) <= INLINE_BYTES:
        return _copy_hashing(source, targets, of_target)
    return await off_loop(_copy_hashing, source, targets, of_target)


def _copy_hashing(source: Sequence[memoryview], target: Sequence[memoryview], of_target: bool) -> str:
    """Copy; the hash of what then lies in ``target``, or of ``source``."""
    state = xxhash.xxh3_128()
    for done in range(0, sum(map(len, source)), SLICE):
        pieces, places = list(cut(source, done, SLICE)), list(cut(target, done, SLICE))
        copy(pieces, places)
        for view in places if of_target else pieces:
            state.update(view)
    return state.hexdigest()
