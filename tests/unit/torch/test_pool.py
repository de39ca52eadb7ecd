"""The block pool: who owns which block, and what its memory looks like from outside."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pdq.core.errors import CapacityExhausted, EngineFailed
from pdq.core.layout import KvLayout
from workers.torch.pool import BlockAllocator, KvPool, contiguous_runs

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype="bfloat16", block_size=4, chunk_tokens=8)
TOTAL = 24


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocations, releases and quarantines."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(TOTAL)
        self.used: set[int] = set()
        self.lost: set[int] = set()

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count: int) -> list[int]:
        free = TOTAL - len(self.used) - len(self.lost)
        if count > free:
            with pytest.raises(CapacityExhausted):
                self.allocator.allocate(count)
            return []
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert not (self.used | self.lost).intersection(blocks)
        self.used.update(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def release(self, blocks: list[int]) -> None:
        self.allocator.release(blocks)
        self.used.difference_update(blocks)
        if blocks:
            with pytest.raises(EngineFailed, match="returned twice"):
                self.allocator.release(blocks)

    @rule(blocks=consumes(held))
    def quarantine(self, blocks: list[int]) -> None:
        self.allocator.quarantine(blocks[:2])
        self.allocator.release(blocks[2:])
        self.used.difference_update(blocks)
        self.lost.update(blocks[:2])

    @invariant()
    def occupancy_is_exact(self) -> None:
        assert self.allocator.free == TOTAL - len(self.used) - len(self.lost)
        assert self.allocator.quarantined == len(self.lost)

    @invariant()
    def free_space_is_found_whole(self) -> None:
        free = sorted(set(range(TOTAL)) - self.used - self.lost)
        longest = max((length for _, length in contiguous_runs(free)), default=0)
        blocks = self.allocator.allocate(longest)
        assert len(list(contiguous_runs(blocks))) == min(longest, 1)
        self.allocator.release(blocks)


TestAllocator = AllocatorMachine.TestCase


@given(st.lists(st.integers(0, 50), unique=True))
def test_contiguous_runs_rebuild_the_list(blocks: list[int]) -> None:
    assert [b for start, length in contiguous_runs(blocks) for b in range(start, start + length)] == blocks


def test_a_block_is_one_slab_in_wire_order() -> None:
    pool = KvPool(LAYOUT, 6, torch.device("cpu"))
    pool.data.copy_(torch.arange(pool.data.numel()).reshape(pool.data.shape) % 251)
    views = pool.views([4, 5, 1])
    assert [len(view) for view in views] == [2 * LAYOUT.block_bytes, LAYOUT.block_bytes]
    raw = np.frombuffer(views[1], dtype=np.uint16).astype(np.uint32) << 16  # bfloat16: the upper half of a float32
    expected = pool.data[1].float().numpy().ravel()  # [layers, 2, block_size, kv_heads, head_dim]
    assert np.array_equal(raw.view(np.float32), expected)


def test_views_are_the_memory_itself() -> None:
    pool = KvPool(LAYOUT, 3, torch.device("cpu"))
    (view,) = pool.views([1])
    view[:] = bytes(LAYOUT.block_bytes - 2) + b"\x80\x3f"  # 1.0 in bfloat16, little-endian
    assert pool.data[1].flatten()[-1] == 1
    assert pool.data.float().sum() == 1
    pool.zero_tail(1, LAYOUT.block_size - 1)
    assert not any(view)
