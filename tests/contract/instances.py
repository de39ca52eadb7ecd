"""Hypothesis strategies for any wire type, made from what msgspec knows of it (not from the generated schemas)."""

from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from pdq.core import layout, messages


@cache
def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Instances of a Struct type, or of a union of them."""
    return _of(mi.type_info(kind))


def _of(info: mi.Type) -> st.SearchStrategy[Any]:
    match info:
        case mi.UnionType(types=types):
            return st.one_of([_of(option) for option in types])
        case mi.StructType(cls=cls):
            return _struct(cls, info.fields)
        case mi.StrType():
            if info.pattern:
                alphabet = st.characters(codec="utf-8", exclude_categories=("Z", "C"), exclude_characters="*>")
                return st.text(alphabet, min_size=info.min_length or 0, max_size=info.max_length)
            return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 50, 50))
        case mi.IntType():
            low = -(2**53) if info.ge is None else info.ge
            return st.integers(low, 2**53 if info.le is None else info.le)
        case mi.FloatType():
            return st.floats(
                info.ge if info.ge is not None else info.gt,
                info.le if info.le is not None else info.lt,
                exclude_min=info.gt is not None,
                allow_nan=False,
                allow_infinity=False,
            )
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType(values=values):
            return st.sampled_from(values)
        case mi.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case mi.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=4).map(tuple)
        case mi.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=4)
    raise TypeError(f"no strategy for {info}")


def _struct(cls: type, fields: tuple[mi.Field, ...]) -> st.SearchStrategy[Any]:
    parts = {field.name: _of(field.type) for field in fields}
    if cls is messages.PrefillJob:
        return st.sampled_from(messages.PROMPT_FIELDS).flatmap(
            lambda given: st.builds(
                cls,
                **{
                    name: part.filter(lambda value: value is not None) if name == given else st.none()
                    for name, part in parts.items()
                    if name in messages.PROMPT_FIELDS
                },
                **{name: part for name, part in parts.items() if name not in messages.PROMPT_FIELDS},
            )
        )
    if cls is layout.KvLayout:
        sizes = {name: st.integers(1, 64) for name in ("layers", "kv_heads", "head_dim", "tp_size")}
        block = st.shared(st.integers(1, 64), key="block_size")
        chunk = st.tuples(block, st.integers(1, 16)).map(lambda pair: pair[0] * pair[1])
        dtype = st.sampled_from(list(layout.DTYPE_BYTES))
        return st.builds(cls, **{**parts, **sizes, "dtype": dtype, "block_size": block, "chunk_tokens": chunk})
    return st.builds(cls, **parts)


def plain(message: msgspec.Struct) -> Any:
    """``message`` as another program reads it off the wire."""
    return msgspec.json.decode(messages.encode(message))
