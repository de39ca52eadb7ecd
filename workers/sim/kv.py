"""What the sim engine keeps in its KV blocks: a hash chain over the tokens, so that bytes really matter.

The slot of each token holds (repeated to its size) the hash of that token and the slot before it. Output is drawn from the
last prompt token's slot *as it lies in the decode worker's memory*: KV that was lost, mixed up or cut off on the way gives
other text, exactly as with a real model.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from pdq.core.layout import KvLayout

LINK: Final = 16
"""Bytes of one hash."""


def sim_layout(kv_bytes_per_token: int, block_size: int, chunk_tokens: int) -> KvLayout:
    """One layer, one head; K and V take half of a token's bytes each."""
    head_dim = max(LINK, kv_bytes_per_token // 2)
    return KvLayout(
        layers=1, kv_heads=1, head_dim=head_dim, dtype="uint8", block_size=block_size, chunk_tokens=chunk_tokens
    )


class KvPool:
    """Blocks as slices of one buffer, and who has them. Blocks are handed out in ascending order where possible."""

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        self.layout = layout
        self.total = blocks
        self._memory = memoryview(bytearray(layout.block_bytes * blocks))
        self._free = list(range(blocks - 1, -1, -1))
        self.quarantined = 0
        """Blocks that are never handed out again."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks, or None if there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

    def parts(self, blocks: Sequence[int]) -> list[memoryview]:
        """The memory of ``blocks`` in order, neighbours merged."""
        size = self.layout.block_bytes
        runs: list[list[int]] = []
        for block in blocks:
            if runs and runs[-1][1] == block:
                runs[-1][1] = block + 1
            else:
                runs.append([block, block + 1])
        return [self._memory[first * size : end * size] for first, end in runs]

    def write(self, blocks: Sequence[int], position: int, tokens: Sequence[int], link: bytes) -> bytes:
        """Slots of ``tokens``, of which the first stands at ``position``; the slot before that holds ``link``.
        Returns the last link."""
        layout, memory = self.layout, self._memory
        dim, plane = layout.head_dim, layout.head_dim * layout.block_size
        repeats = -(-dim // LINK)
        for index, token in enumerate(tokens, position):
            link = xxhash.xxh3_128_digest(link + token.to_bytes(4, "little"))
            slot = (link * repeats)[:dim]
            at = blocks[index // layout.block_size] * layout.block_bytes + index % layout.block_size * dim
            memory[at : at + dim] = slot
            memory[at + plane : at + plane + dim] = slot
        return link

    def clear_tail(self, block: int, used_slots: int) -> None:
        """Zero what lies past the prompt in its last block: it is sent whole."""
        layout = self.layout
        start = block * layout.block_bytes
        for plane in range(2):
            first = start + plane * layout.head_dim * layout.block_size
            used = used_slots * layout.head_dim
            self._memory[first + used : first + layout.head_dim * layout.block_size] = bytes(
                layout.head_dim * layout.block_size - used
            )

    def link_at(self, blocks: Sequence[int], position: int) -> bytes:
        """The hash in the slot at ``position``, as it lies in memory now."""
        layout = self.layout
        at = blocks[position // layout.block_size] * layout.block_bytes
        at += position % layout.block_size * layout.head_dim
        return bytes(self._memory[at : at + LINK])
