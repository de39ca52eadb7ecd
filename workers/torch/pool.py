"""KV memory: one preallocated tensor of blocks, and who owns which block.

The pool is block-major, ``[blocks, layers, 2, block_size, kv_heads, head_dim]``: a block is one contiguous slab whose
bytes are exactly what ``pdq.core.layout`` puts on the wire. On a CPU, transports therefore read and write pool memory
in place; on a device, a finished chunk is copied to pinned host memory and back (``export``, ``Staged``). Blocks are
handed out in contiguous runs where there are any, so that a chunk is usually one part.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import torch

from pdq.core.errors import CapacityExhausted, EngineFailed
from pdq.core.layout import KvLayout

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BlockAllocator:
    """Which blocks are free, in use, or quarantined. Free space is kept as maximal runs, ordered by position."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._runs: list[tuple[int, int]] = [(0, total)] if total else []
        self._free = total
        self._used: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def free(self) -> int:
        return self._free

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks: the smallest run that holds them all, else the longest runs first.

        Raises:
            CapacityExhausted: fewer are free; nothing was taken.
        """
        if count > self._free:
            raise CapacityExhausted(f"{count} KV blocks needed, {self._free} of {self.total} free; try again later")
        fitting = [run for run in self._runs if run[1] >= count]
        chosen = [min(fitting, key=lambda run: run[1])] if fitting else sorted(self._runs, key=lambda run: -run[1])
        blocks: list[int] = []
        for start, length in chosen:
            take = min(length, count - len(blocks))
            if not take:
                break
            blocks += range(start, start + take)
            self._runs.remove((start, length))
            if take < length:
                insort(self._runs, (start + take, length - take))
        self._free -= count
        self._used.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Raises ``EngineFailed``, and changes nothing, if one of them is not in use."""
        self._surrender(blocks)
        for start, length in contiguous_runs(sorted(blocks)):
            self._insert(start, length)
        self._free += len(blocks)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Out of use, and never handed out again: a late write may still land in them."""
        self._surrender(blocks)
        self._quarantined.update(blocks)

    def _surrender(self, blocks: Sequence[int]) -> None:
        strange = [block for block in blocks if block not in self._used]
        if strange or len(set(blocks)) != len(blocks):
            raise EngineFailed(f"KV blocks {strange or list(blocks)} are not in use: they were returned twice")
        self._used.difference_update(blocks)

    def _insert(self, start: int, length: int) -> None:
        at = bisect_left(self._runs, (start, 0))
        if at < len(self._runs) and self._runs[at][0] == start + length:
            length += self._runs.pop(at)[1]
        if at and sum(self._runs[at - 1]) == start:
            start, before = self._runs.pop(at - 1)
            length += before
        insort(self._runs, (start, length))


def contiguous_runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``blocks`` as (start, length) pieces, in their order, merged where neighbours are adjacent."""
    at = 0
    while at < len(blocks):
        end = at + 1
        while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            end += 1
        yield blocks[at], end - at
        at = end


class KvPool:
    """The KV tensor of one worker, and its bytes."""

    def __init__(self, layout: KvLayout, total_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.allocator = BlockAllocator(total_blocks)
        self.data = _host_or_device_blocks(layout, layout.block_size, total_blocks, device)
        token_width = layout.kv_heads * layout.head_dim
        self.token_rows = self.data.view(-1, token_width)
        """One row per (block, layer, K or V, slot)."""
        self.block_rows = self.data.view(-1, layout.block_size * token_width)
        """One row per (block, layer, K or V)."""
        self._bytes = _memory(self.data) if device.type == "cpu" else None

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """The memory of ``blocks`` in place, adjacent blocks merged (host pools only)."""
        if self._bytes is None:
            raise EngineFailed(f"a pool on {self.device} has no host memory to look at")
        size = self.layout.block_bytes
        return [self._bytes[start * size : (start + n) * size] for start, n in contiguous_runs(blocks)]

    def export(self, blocks: Sequence[int]) -> list[memoryview]:
        """Finished ``blocks`` as host memory that stays unchanged as long as the blocks do."""
        if self._bytes is not None:
            return self.views(blocks)
        staging = _staging(self.layout, self.layout.block_size, len(blocks), self.device)
        staging.copy_(self.data[torch.tensor(blocks, device=self.device)])
        return [_memory(staging)]

    def zero_tail(self, block: int, used: int) -> None:
        """Zero the slots of ``block`` from ``used`` on."""
        self.data[block, :, :, used:] = 0


class Landing(Protocol):
    """Where a fetched prompt's bytes go, and how they get into its blocks."""

    @property
    def buffers(self) -> list[list[memoryview]]: ...

    def commit(self) -> None: ...


class InPlace:
    """The chunks land in the blocks themselves."""

    def __init__(self, pool: KvPool, blocks: Sequence[int], tokens: int, source: KvLayout) -> None:
        chunks = (source.chunk_blocks(index, tokens) for index in range(source.chunks_for(tokens)))
        self.buffers = [pool.views([blocks[i] for i in chunk]) for chunk in chunks]

    def commit(self) -> None:
        """Nothing left to do."""


class Staged:
    """The chunks land in host memory of the source's geometry, and ``commit`` copies them token by token."""

    def __init__(self, pool: KvPool, blocks: Sequence[int], tokens: int, source: KvLayout) -> None:
        self._pool, self._blocks, self._tokens, self._source = pool, blocks, tokens, source
        self._staging = _staging(source, source.block_size, source.blocks_for(tokens), pool.device)
        memory, size = _memory(self._staging), source.block_bytes
        chunks = (source.chunk_blocks(index, tokens) for index in range(source.chunks_for(tokens)))
        self.buffers = [[memory[chunk.start * size : chunk.stop * size]] for chunk in chunks]

    def commit(self) -> None:
        positions = torch.arange(self._tokens)
        arrived = self._staging.to(self._pool.device)
        from_block, from_slot = positions // self._source.block_size, positions % self._source.block_size
        block_size = self._pool.layout.block_size
        to_block, to_slot = torch.tensor(self._blocks)[positions // block_size], positions % block_size
        # [tokens, layers, 2, kv_heads, head_dim]: indexing blocks and slots together brings the token axis to the front.
        self._pool.data[to_block, :, :, to_slot] = arrived[from_block, :, :, from_slot]


def _host_or_device_blocks(layout: KvLayout, block_size: int, count: int, device: torch.device) -> torch.Tensor:
    shape = (count, layout.layers, 2, block_size, layout.kv_heads, layout.head_dim)
    # Written once here: first touches of fresh memory are several times slower than later ones.
    return torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], device=device).zero_()


def _staging(layout: KvLayout, block_size: int, count: int, device: torch.device) -> torch.Tensor:
    blocks = _host_or_device_blocks(layout, block_size, count, torch.device("cpu"))
    return blocks.pin_memory() if device.type == "cuda" else blocks


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable, without a copy (through uint8: numpy has no bfloat16)."""
    return tensor.view(-1).view(torch.uint8).numpy().data
