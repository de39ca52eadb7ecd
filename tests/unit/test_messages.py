"""The wire types: every value survives the wire, junk is only ever ``InvalidMessage``, and names are safe."""

import json
import re
import string
import uuid
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect as mi
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdq.core import names
from pdq.core.errors import InvalidMessage
from pdq.core.ids import derive_request_id, mint_request_id, mint_secret, mint_worker_id
from pdq.core.messages import (
    MAX_MESSAGE_BYTES,
    PROMPT_FIELDS,
    Cancel,
    Control,
    DecodeJob,
    Drain,
    OutputAnswer,
    OutputQuestion,
    PrefillJob,
    Release,
    Resend,
    StatusAnswer,
    StatusQuestion,
    TokenFrame,
    decode,
    encode,
)

MESSAGES: list[Any] = [
    PrefillJob,
    DecodeJob,
    TokenFrame,
    Cancel,
    Release,
    Resend,
    Drain,
    OutputQuestion,
    OutputAnswer,
    StatusQuestion,
    StatusAnswer,
]
CONTROL: Any = Control

# Each runs once per kind of message, and a whole job is a large thing to draw.
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Text that JSON can carry: anything but lone surrogates.
TEXT = st.characters(exclude_categories=("Cs",))
SUBJECT = st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), exclude_characters="*>")


def values(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Any value that the type allows, built from its own description."""
    match kind:
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType(ge=low, le=high):
            return st.integers(low if low is not None else -(2**63), high if high is not None else 2**63 - 1)
        case mi.FloatType():
            low, high = kind.ge if kind.ge is not None else kind.gt, kind.le
            return st.floats(low, high, allow_nan=False, allow_infinity=False, exclude_min=kind.gt is not None)
        case mi.StrType(pattern=str()):  # the one pattern there is: a subject
            return st.text(SUBJECT, min_size=1, max_size=30)
        case mi.StrType():
            return st.text(TEXT, min_size=kind.min_length or 0, max_size=min(kind.max_length or 30, 30))
        case mi.LiteralType(values=choices):
            return st.sampled_from(choices)
        case mi.UnionType(types=types):
            return st.one_of(*(values(one) for one in types))
        case mi.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case mi.StructType(cls=cls, fields=fields):
            given_as = PROMPT_FIELDS if cls is PrefillJob else ()
            others = {field.name: values(field.type) for field in fields if field.name not in given_as}
            prompts = {field.name: values(field.type).filter(_given) for field in fields if field.name in given_as}
            if prompts:
                return st.one_of(*(st.builds(cls, **others, **{name: prompt}) for name, prompt in prompts.items()))
            return st.builds(cls, **others)
    raise TypeError(f"no strategy for {kind}")


def _given(value: Any) -> bool:
    return value is not None


@cache
def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return values(mi.type_info(kind))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(TEXT, max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TEXT, max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("kind", MESSAGES)
@few
@given(data=st.data())
def test_every_value_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    assert decode(encode(message), kind) == message


@given(st.one_of(*map(any_of, (Cancel, Release, Resend, Drain))))
def test_control_messages_come_back_as_their_own_kind(message: Control) -> None:
    assert decode(encode(message), CONTROL) == message


@pytest.mark.parametrize("kind", [*MESSAGES, CONTROL])
@few
@given(junk=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
@example(junk=b"")
@example(junk=b"\xff\xfe\x00")
@example(junk=b'{"model": "\xed\xa0\x80"}')
@example(junk=b"[" * 1_000_000)
@example(junk=b'{"a":' * 200_000)
@example(junk=b'{"model":{"model":' * 100_000)
@example(junk=b"NaN")
@example(junk=b"1" * 100_000)
@example(junk=b"-1e999999")
@example(junk=b'{"worker": "w", "entries": ' + b"[" * 500_000)
@example(junk=b"\xef\xbb\xbf{}")
@example(junk=b"{}" * 2)
def test_junk_is_an_invalid_message_and_nothing_else(kind: Any, junk: bytes) -> None:
    try:
        message = decode(junk, kind)
    except InvalidMessage:
        return
    assert decode(encode(message), kind) == message  # it happened to be valid


@pytest.mark.parametrize("kind", MESSAGES)
@few
@given(data=st.data())
def test_a_valid_message_cut_off_or_with_a_field_of_the_wrong_type_is_never_anything_else(
    kind: type[Any], data: st.DataObject
) -> None:
    wire = encode(data.draw(any_of(kind)))
    with pytest.raises(InvalidMessage):
        decode(wire[: data.draw(st.integers(0, len(wire) - 1))], kind)
    fields = json.loads(wire)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    with suppress(InvalidMessage):
        decode(json.dumps(fields).encode(), kind)


@pytest.mark.parametrize("kind", MESSAGES)
@few
@given(data=st.data())
def test_fields_that_nobody_knows_yet_are_ignored(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    fields = json.loads(encode(message))
    extra = data.draw(
        st.dictionaries(st.text(string.ascii_uppercase, min_size=1, max_size=5), JSON.filter(_finite), max_size=3)
    )
    assert decode(json.dumps({**extra, **fields}).encode(), kind) == message


def _finite(value: Any) -> bool:
    """Python writes NaN and infinities, which are not JSON."""
    return not re.search(r"NaN|Infinity", json.dumps(value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", "x" * 257),
        ("model", 1),
        ("reply_to", "pdq.tokens.*"),
        ("reply_to", "a b"),
        ("reply_to", "a\r\nPUB x 0"),
        ("timeout_ms", 0),
        ("timeout_ms", 10**30),
        ("timeout_ms", 1.5),
        ("priority", "urgent"),
        ("prompt_token_ids", [-1]),
        ("prompt_token_ids", [2**31]),
        ("prompt_token_ids", ["1"]),
        ("sampling", {"temperature": -0.1}),
        ("sampling", {"top_p": 0}),
        ("sampling", {"max_tokens": 0}),
        ("sampling", {"seed": 2**63}),
        ("messages", [{"role": "", "content": "x"}]),
        ("policy", {"on_stream_failure": "hope"}),
    ],
)
def test_a_job_with_a_bad_field_is_refused_and_the_field_is_named(field: str, value: Any) -> None:
    job = {"model": "m", "reply_to": "pdq.tokens.a", "prompt": "hi", field: value}
    with pytest.raises(InvalidMessage, match=rf"\$\.{field}"):
        decode(json.dumps(job).encode(), PrefillJob)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    job = f'{{"model": "m", "reply_to": "a", "prompt": "hi", "sampling": {{"temperature": {number}}}}}'
    with pytest.raises(InvalidMessage):
        decode(job.encode(), PrefillJob)


def test_a_message_over_the_size_limit_is_refused_unread() -> None:
    with pytest.raises(InvalidMessage, match=str(MAX_MESSAGE_BYTES)):
        decode(b" " * MAX_MESSAGE_BYTES + b"{}", PrefillJob)


def test_a_message_says_no_more_than_what_differs_from_the_defaults() -> None:
    job = PrefillJob(model="m", reply_to="a", prompt="hi")
    assert msgspec.json.decode(encode(job)) == {"model": "m", "reply_to": "a", "prompt": "hi"}


# --- Names ------------------------------------------------------------------------------------------------------------

MODELS = st.text(TEXT, min_size=1, max_size=60)


@given(MODELS)
@example("org/model.v1")
@example("a.b*c>d e=f%g~h\r\n\t\x00")
@example("=2F")
def test_a_model_token_is_one_safe_subject_token(model: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", names.token(model))


@given(MODELS, MODELS)
@example("a/b", "a=2Fb")
@example("a.b", "a%2Eb")
@example("~", "=7E")
@example("~", "%7E")
def test_different_models_have_different_tokens_and_consumers(first: str, second: str) -> None:
    assert (names.token(first) == names.token(second)) == (first == second)
    everyone = {names.consumer(model, priority) for model in (first, second) for priority in names.PRIORITIES}
    assert len(everyone) == len({first, second}) * len(names.PRIORITIES)


@given(MODELS, st.sampled_from(names.PRIORITIES))
def test_the_model_can_be_read_back_from_the_subject_of_its_job(model: str, priority: str) -> None:
    for subject in (names.prefill_subject, names.decode_subject, names.local_subject):
        assert names.model_of(subject(model, priority)) == model


# --- Identifiers ------------------------------------------------------------------------------------------------------

NAME = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=20)
INSTANTS = st.integers(0, 2**48 - 1)


@given(INSTANTS)
def test_a_request_id_is_a_uuid_of_version_7_that_carries_its_time(unix_ms: int) -> None:
    for request_id in (mint_request_id(unix_ms), derive_request_id(unix_ms, "salt", "prefill", "model", 1)):
        parsed = uuid.UUID(request_id)
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert parsed.int >> 80 == unix_ms
        assert str(parsed) == request_id


@given(INSTANTS, INSTANTS)
def test_request_ids_sort_by_time(first: int, second: int) -> None:
    if first < second:
        assert mint_request_id(first) < mint_request_id(second)


@given(INSTANTS)
def test_minted_ids_differ_within_a_millisecond(unix_ms: int) -> None:
    assert len({mint_request_id(unix_ms) for _ in range(100)}) == 100


@given(INSTANTS, st.lists(st.tuples(NAME, NAME, NAME, st.integers(1)), unique=True, min_size=2, max_size=5))
def test_a_derived_id_is_the_same_for_every_delivery_and_differs_between_messages(
    unix_ms: int, places: list[tuple[str, str, str, int]]
) -> None:
    ids = [derive_request_id(unix_ms, *place) for place in places]
    assert ids == [derive_request_id(unix_ms, *place) for place in places]
    assert len(set(ids)) == len(places)


def test_secrets_and_worker_ids_are_fresh_and_safe_in_subjects() -> None:
    assert len({mint_secret() for _ in range(100)}) == 100
    assert len(mint_secret()) == 32
    assert re.fullmatch(r"decode-[0-9a-f]{8}", mint_worker_id("decode"))
