"""Shared-memory segments as seen from outside: which are there, and whether a process still has them.

A source keeps an ``flock`` on each of its segments, and the kernel drops it however the source dies. So a lock that can be
had says that nobody will ever write, serve or unlink that segment again.

A segment that is a tier's copy outlives its source on purpose: its name says until when (``NAME.UNIX_SECONDS``).
"""

import asyncio
import fcntl
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pdq.core.audit import KvObject
from pdq.core.names import SHM_PREFIX


class ShmSegments:
    """``KvStore`` on the segments below ``root``, on this host."""

    name = "shm"

    def __init__(self, root: Path) -> None:
        self._root = root

    async def objects(self) -> Sequence[KvObject]:
        return await asyncio.to_thread(lambda: [seen for path in segments(self._root) if (seen := _seen(path))])

    async def discard(self, found: Sequence[KvObject]) -> int:
        paths = [self._root / item.name for item in found]
        return await asyncio.to_thread(lambda: sum(map(unlink_if_dead, paths)))


def segments(root: Path) -> Sequence[Path]:
    return list(root.glob(SHM_PREFIX + "*"))


def fresh_path(root: Path, outlives_s: float | None = None) -> Path:
    """A name that nobody can guess; with ``outlives_s``, one that is spared for so long when its source has died."""
    until = "" if outlives_s is None else f".{int(time.time() + outlives_s)}"
    return root / f"{SHM_PREFIX}{secrets.token_hex(16)}{until}"


def outlives(path: Path) -> bool:
    """It is a tier's copy, and its time is not over."""
    return path.suffix[1:].isdigit() and int(path.suffix[1:]) > time.time()


def unlink_if_dead(path: Path, *, early: bool = False) -> bool:
    """Unlink the segment of a process that died; False if it is alive, spared (unless ``early``), somebody else's, or
    gone already."""
    if outlives(path) and not early:
        return False
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
        finally:
            os.close(fd)
    return False


def _seen(path: Path) -> KvObject | None:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Shared, as a waiting sink would: it keeps nobody from anything.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alive = outlives(path)
        except BlockingIOError:
            alive = True
        finally:
            size = os.fstat(fd).st_size
            os.close(fd)
        return KvObject("shm", path.name, size, alive=alive)
    return None
