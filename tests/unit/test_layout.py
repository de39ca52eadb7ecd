"""The arithmetic of KV chunks: both sides compute it on their own and must agree to the byte."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdq.core.errors import IncompatibleLayout
from pdq.core.layout import (
    DTYPE_BYTES,
    Direct,
    Fingerprint,
    KvLayout,
    Regroup,
    chunk_hash,
    manifest_digest,
    map_layout,
)

layouts = st.builds(
    lambda per_chunk, block_size, **rest: KvLayout(block_size=block_size, chunk_tokens=per_chunk * block_size, **rest),
    per_chunk=st.integers(1, 8),
    block_size=st.integers(1, 64),
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
prompts = st.integers(1, 5_000)
SMALL = KvLayout(layers=2, kv_heads=3, head_dim=4, dtype="float16", block_size=8, chunk_tokens=16)


@given(layouts, prompts)
def test_chunks_cover_every_block_exactly_once_and_in_order(layout: KvLayout, tokens: int) -> None:
    covered = [block for i in range(layout.chunks_for(tokens)) for block in layout.chunk_blocks(i, tokens)]
    assert covered == list(range(layout.blocks_for(tokens)))


@given(layouts, prompts)
def test_lengths_add_up_and_no_chunk_is_empty(layout: KvLayout, tokens: int) -> None:
    lengths = layout.chunk_lengths(tokens)
    assert sum(lengths) == layout.kv_bytes(tokens)
    assert all(lengths)
    full = layout.blocks_per_chunk * layout.block_bytes
    assert lengths[:-1] == [full] * (len(lengths) - 1)
    assert lengths[-1] <= full


@given(layouts, prompts)
def test_blocks_hold_the_prompt_and_not_one_block_more(layout: KvLayout, tokens: int) -> None:
    blocks = layout.blocks_for(tokens)
    assert (blocks - 1) * layout.block_size < tokens <= blocks * layout.block_size


@given(layouts)
def test_a_block_is_k_and_v_of_all_layers(layout: KvLayout) -> None:
    values = 2 * layout.layers * layout.kv_heads * layout.head_dim * layout.block_size
    assert layout.block_bytes == values * DTYPE_BYTES[layout.dtype]


@given(layouts)
def test_every_layout_maps_onto_itself_directly(layout: KvLayout) -> None:
    assert map_layout(layout, layout) == Direct()


def test_another_block_size_is_regrouped() -> None:
    assert map_layout(SMALL, replace(SMALL, block_size=4)) == Regroup(8, 4)
    assert map_layout(SMALL, replace(SMALL, chunk_tokens=64)) == Direct()


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 3), ("kv_heads", 1), ("head_dim", 8), ("dtype", "bfloat16"), ("tp_size", 2), ("tp_rank", 1)],
)
def test_what_can_never_map_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(IncompatibleLayout, match=rf"{field}: source .*, sink {value}"):
        map_layout(SMALL, replace(SMALL, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int3"), ("layers", 0), ("block_size", 0), ("head_dim", -1), ("chunk_tokens", 12), ("tp_size", 0)],
)
def test_a_layout_that_makes_no_sense_cannot_be_made(field: str, value: Any) -> None:
    with pytest.raises(IncompatibleLayout, match=field):
        replace(SMALL, **{field: value})


@given(st.lists(st.binary(max_size=64)))
def test_a_chunks_hash_does_not_depend_on_how_it_is_cut(parts: list[bytes]) -> None:
    assert chunk_hash(*parts) == chunk_hash(b"".join(parts)) == chunk_hash(memoryview(b"".join(parts)))


@given(st.lists(st.integers(1, 2**40), min_size=1), st.integers(0), st.data())
def test_the_manifest_notices_any_other_length_hash_or_order(
    lengths: list[int], salt: int, data: st.DataObject
) -> None:
    hashes = [chunk_hash(f"{salt} {i}".encode()) for i in range(len(lengths))]
    at = data.draw(st.integers(0, len(lengths) - 1))
    digest = manifest_digest(lengths, hashes)
    assert manifest_digest(list(lengths), list(hashes)) == digest
    assert manifest_digest([*lengths[:at], lengths[at] + 1, *lengths[at + 1 :]], hashes) != digest
    assert manifest_digest(lengths, [*hashes[:at], chunk_hash(b"other"), *hashes[at + 1 :]]) != digest
    if len(lengths) > 1:
        assert manifest_digest(lengths, hashes[::-1]) != digest
        assert manifest_digest(lengths[:-1], hashes[:-1]) != digest


def test_fingerprints_differ_in_every_field() -> None:
    one = Fingerprint(model="m", weights="w", tokenizer="t", dtype="d")
    others = [replace(one, **{name: "x"}) for name in Fingerprint.__struct_fields__]
    assert len({fingerprint.digest for fingerprint in [one, *others]}) == 5
    assert len(one.digest) == 12
