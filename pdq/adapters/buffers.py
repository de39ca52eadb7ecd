"""Bytes in many parts: cutting, copying and hashing them without holding up the event loop.

Every transport sees a chunk as a list of parts whose borders differ between source and sink. What takes longer than a
fraction of a millisecond runs on the threads here; numpy and xxhash let go of the GIL meanwhile. ``off_loop`` returns
only when its function has ended, cancelled or not: a thread that still writes into a buffer whose owner has moved on is
the very thing that invariant 7 of the handoff contract forbids.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, TypeVarTuple

import numpy as np

from pdq.core.errors import TransferFailed
from pdq.core.layout import chunk_hash
from pdq.ports import Buffer, ChunkPlan

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

INLINE_BYTES: Final = 256 * 1024
"""Up to here a copy or a hash is cheaper than a hop to a thread (tens of microseconds either way)."""

_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="pdq-bytes")


async def off_loop(function: Callable[[*Ts], T], *args: *Ts, hurry: Callable[[], None] | None = None) -> T:
    """``function`` on a thread. A cancellation is raised only after the function has ended; ``hurry`` is called to make
    it end soon."""
    work = asyncio.get_running_loop().run_in_executor(_threads, function, *args)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
            if hurry is not None:
                hurry()
    if cancelled is not None:
        work.exception()
        raise cancelled
    return work.result()


def flat(parts: Sequence[Buffer]) -> list[memoryview]:
    """The parts as byte views, empty ones left out."""
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def fitting(plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> list[memoryview]:
    """The flat parts of chunk ``index``, which must have the planned length together."""
    if not 0 <= index < len(plan.lengths):
        raise TransferFailed(f"chunk {index} is not in a plan of {len(plan.lengths)} chunks")
    views = flat(parts)
    if (given := sum(len(v) for v in views)) != plan.lengths[index]:
        raise TransferFailed(f"chunk {index} has {given} bytes, its plan says {plan.lengths[index]}")
    return views


def fitting_all(plan: ChunkPlan, into: Sequence[Sequence[memoryview]]) -> list[list[memoryview]]:
    """The flat receive buffers of all chunks of a plan."""
    if len(into) != len(plan.lengths):
        raise TransferFailed(f"buffers for {len(into)} chunks were given, the plan has {len(plan.lengths)}")
    return [fitting(plan, index, parts) for index, parts in enumerate(into)]


def cut(parts: Sequence[memoryview], offset: int, length: int) -> Iterator[memoryview]:
    """The views that together are bytes ``offset`` to ``offset + length`` of the concatenated parts."""
    for part in parts:
        if length <= 0:
            return
        if offset >= len(part):
            offset -= len(part)
            continue
        view = part[offset : offset + length]
        yield view
        length -= len(view)
        offset = 0


def copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy between two lists of parts of the same total length; borders may differ."""
    sources, targets = iter(source), iter(target)
    have, room = memoryview(b""), memoryview(b"")
    while True:
        have = have or next(sources, have)
        room = room or next(targets, room)
        size = min(len(have), len(room))
        if not size:
            return
        np.copyto(np.frombuffer(room[:size], np.uint8), np.frombuffer(have[:size], np.uint8))
        have, room = have[size:], room[size:]


async def copied(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """``copy``, off the loop when it is large."""
    if sum(len(view) for view in source) <= INLINE_BYTES:
        copy(source, target)
    else:
        await off_loop(copy, source, target)


async def hashed(parts: Sequence[memoryview]) -> str:
    """``chunk_hash``, off the loop when it is large."""
    if sum(len(view) for view in parts) <= INLINE_BYTES:
        return chunk_hash(*parts)
    return await off_loop(chunk_hash, *parts)
