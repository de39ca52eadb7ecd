"""Attention over paged KV, for the model classes of transformers.

Several sequences travel through a model packed along one axis, ``[1, tokens]``. Every linear layer works on all of
them at once; only attention has to know where one ends. ``PagedBatch`` is that knowledge, passed through the model as
the keyword argument ``paged``: the attention function writes the new tokens' K and V into the pool, and lets each
sequence attend over its own blocks, gathered into a scratch buffer that stays in the CPU's cache.

Each sequence attends by itself, never padded to the length of a neighbour, so its result does not depend on who else
is in the batch, and a slot that holds no token is never read.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from workers.torch.pool import KvPool

NAME: Final = "pdq_paged"


@dataclass(slots=True)
class Span:
    """One sequence's part of a packed batch: ``count`` new tokens that start at position ``begin``."""

    begin: int
    count: int
    rows: torch.Tensor
    """``block_rows(blocks)`` of the sequence, long enough for ``begin + count`` tokens."""


def block_rows(pool: KvPool, blocks: list[int]) -> torch.Tensor:
    """Where the blocks' K of layer 0 lie in ``pool.block_rows``."""
    return torch.tensor(blocks, dtype=torch.int64, device=pool.device) * (2 * pool.layout.layers)


class PagedBatch:
    """What attention needs to know of one forward pass; built once, used by every layer."""

    def __init__(self, pool: KvPool, spans: list[Span], scratch: "Scratch") -> None:
        self.pool, self.spans, self.scratch = pool, spans, scratch
        size = pool.layout.block_size
        positions = [torch.arange(span.begin, span.begin + span.count, device=pool.device) for span in spans]
        self.positions = torch.cat(positions)
        heads = torch.cat([span.rows[at // size] for span, at in zip(spans, positions, strict=True)])
        key_rows = heads * size + self.positions % size
        self._write_rows = torch.cat([key_rows, key_rows + size])

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens' K and V, each ``[tokens, kv_heads, head_dim]``."""
        rows = self._write_rows + layer * 2 * self.pool.layout.block_size
        self.pool.token_rows.index_copy_(0, rows, torch.cat([key, value]).flatten(1))

    def read(self, layer: int, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequence's K and V from position ``first`` on, each ``[kv_heads, positions, head_dim]``."""
        layout, end = self.pool.layout, span.begin + span.count
        skipped = first // layout.block_size
        key_rows = span.rows[skipped : layout.blocks_for(end)] + 2 * layer
        count = len(key_rows)
        gathered = self.scratch.take(2 * count)
        torch.index_select(self.pool.block_rows, 0, torch.cat([key_rows, key_rows + 1]), out=gathered)
        both = gathered.view(2, count * layout.block_size, layout.kv_heads, layout.head_dim)
        offset = skipped * layout.block_size
        both = both[:, first - offset : end - offset].transpose(1, 2)
        return both[0], both[1]


class Scratch:
    """Memory for gathered blocks, reused by all layers and steps."""

    def __init__(self, pool: KvPool) -> None:
        self._rows = pool.block_rows.new_empty((0, pool.block_rows.shape[1]))

    def take(self, rows: int) -> torch.Tensor:
        if rows > len(self._rows):
            self._rows = self._rows.new_empty((2 * rows, self._rows.shape[1]))
        return self._rows[:rows]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedBatch,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: ``[1, heads, tokens, head_dim]`` in, ``[1, tokens, heads, head_dim]`` out."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, _, head_dim = query.shape[1:]
    kv_heads = paged.pool.layout.kv_heads
    paged.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    outputs = []
    at = 0
    for span in paged.spans:
        first = max(0, span.begin - sliding_window + 1) if sliding_window else 0
        keys, values = paged.read(layer, span, first)
        asked = query[0, :, at : at + span.count].view(kv_heads, heads // kv_heads, span.count, head_dim)
        outputs.append(_attend(asked, keys, values, span, first, scaling, sliding_window))
        at += span.count
    return torch.cat(outputs)[None], None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    first: int,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """``query`` is ``[kv_heads, group, count, head_dim]``; the result is ``[count, heads, head_dim]``."""
    kv_heads, group, count, head_dim = query.shape
    if count == 1:
        # The heads that share a KV head become the queries of one attention; all keys are visible to them.
        asked = query.view(1, kv_heads, group, head_dim)
        found = scaled_dot_product_attention(asked, keys[None], values[None], scale=scaling)
        return found.view(1, kv_heads * group, head_dim)
    shape = (kv_heads, group, keys.shape[1], head_dim)
    mask = _mask(span, first, keys.shape[1], sliding_window, query.device)
    found = scaled_dot_product_attention(
        query, keys[:, None].expand(shape), values[:, None].expand(shape), attn_mask=mask, scale=scaling
    )
    return found.reshape(kv_heads * group, count, head_dim).transpose(0, 1)


def _mask(span: Span, first: int, keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    asking = torch.arange(span.begin, span.begin + span.count, device=device)[:, None]
    asked = torch.arange(first, first + keys, device=device)[None, :]
    visible = asked <= asking
    return visible & (asked > asking - sliding_window) if sliding_window else visible


AttentionInterface.register(NAME, paged_attention)
