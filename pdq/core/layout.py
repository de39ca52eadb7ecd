"""What KV bytes mean: the layout of a worker's cache, the identity of the model that made them, and how chunks are cut.

A *chunk* is the unit that is offered, fetched and hashed: the KV of ``chunk_tokens`` consecutive prompt tokens (the last
chunk may be shorter). On the wire a chunk is the concatenation of its blocks; a block is
``[layers, 2 (K, V), block_size, kv_heads, head_dim]`` in C order, always sent whole: slots past the end of the prompt
are zero.
"""

from enum import StrEnum
from typing import Final

import msgspec
import xxhash

from pdq.core.errors import IncompatibleLayout

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class BlockOrder(StrEnum):
    """The axis order inside one block on the wire. One so far; an engine with another order translates."""

    LAYER_KV_SLOT_HEAD_DIM = "layer,kv,slot,head,dim"


class KvLayout(msgspec.Struct, frozen=True):
    """The geometry of one worker's KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    chunk_tokens: int
    order: BlockOrder = BlockOrder.LAYER_KV_SLOT_HEAD_DIM
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise IncompatibleLayout(f"unknown KV dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_size", "chunk_tokens", "tp_size"):
            if getattr(self, name) < 1:
                raise IncompatibleLayout(f"layout field {name} must be at least 1, got {getattr(self, name)}")
        if self.chunk_tokens % self.block_size:
            raise IncompatibleLayout(
                f"chunk_tokens {self.chunk_tokens} must be a multiple of block_size {self.block_size}"
            )

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.block_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a prompt of ``tokens`` tokens is cut into."""
        return -(-tokens // self.chunk_tokens)

    def chunk_blocks(self, index: int, tokens: int) -> range:
        """The positions (in the request's own block list) of chunk ``index`` of a prompt of ``tokens`` tokens."""
        first = index * self.blocks_per_chunk
        return range(first, min(first + self.blocks_per_chunk, self.blocks_for(tokens)))

    def chunk_lengths(self, tokens: int) -> list[int]:
        """Bytes of every chunk of a prompt of ``tokens`` tokens."""
        return [len(self.chunk_blocks(i, tokens)) * self.block_bytes for i in range(self.chunks_for(tokens))]

    def kv_bytes(self, tokens: int) -> int:
        return self.blocks_for(tokens) * self.block_bytes


class Fingerprint(msgspec.Struct, frozen=True):
    """Which model made the KV: a decode worker with another fingerprint must refuse it."""

    model: str
    weights: str
    """Hash over configuration and weights (for the sim engine, over its parameters)."""
    tokenizer: str
    """Hash over the tokenizer's files."""
    dtype: str

    @property
    def digest(self) -> str:
        """Twelve hex digits that stand for all of it in records and listings."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self, order="deterministic"))[:12]


class Direct(msgspec.Struct, frozen=True):
    """Blocks map one to one: bytes land in place."""


class Regroup(msgspec.Struct, frozen=True):
    """Same tensors, other block size: tokens land in place after a copy through a staging buffer."""

    source_block: int
    sink_block: int


Mapping = Direct | Regroup


def map_layout(source: KvLayout, sink: KvLayout) -> Mapping:
    """How KV in the ``source`` layout gets into the ``sink`` layout.

    Raises:
        IncompatibleLayout: they can never map; the message names every field that differs.
    """
    fixed = ("layers", "kv_heads", "head_dim", "dtype", "order", "tp_size", "tp_rank")
    differing = [name for name in fixed if getattr(source, name) != getattr(sink, name)]
    if differing:
        detail = ", ".join(f"{n}: source {getattr(source, n)}, sink {getattr(sink, n)}" for n in differing)
        raise IncompatibleLayout(f"KV layouts do not map ({detail}); run both pools with the same model and settings")
    if source.block_size != sink.block_size:
        return Regroup(source.block_size, sink.block_size)
    return Direct()


def chunk_hash(*parts: bytes | bytearray | memoryview) -> str:
    """XXH3-128 over the concatenated ``parts`` of one chunk, hex."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def manifest_digest(lengths: list[int], hashes: list[str]) -> str:
    """The digest that the source writes with ``ready`` and the sink recomputes from what landed."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode((lengths, hashes)))
