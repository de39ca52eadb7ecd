"""The published schemas say what the types say, and both judge the same documents in the same way."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdq.cli import schemas
from pdq.core import messages
from pdq.core.errors import InvalidMessage
from tests.contract.instances import instances, plain

SCHEMAS = Path(__file__).parents[2] / "schemas"
VALID = sorted((SCHEMAS / "examples" / "valid").glob("*.json"))
INVALID = sorted((SCHEMAS / "examples" / "invalid").glob("*.json"))


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def _kind(example: Path) -> str:
    return example.stem.partition("-")[0]


def test_committed_schemas_are_what_the_types_say() -> None:
    difference = schemas.drift(SCHEMAS)
    assert not difference, f"{difference}\nrun `pdq schemas --write`"


def test_no_schema_file_is_left_over_from_a_type_that_is_gone() -> None:
    assert {path.name for path in SCHEMAS.iterdir() if path.is_file()} == set(schemas.documents())


@pytest.mark.parametrize("name", schemas.PUBLIC)
def test_a_schema_is_valid_2020_12_with_a_name_and_a_description(name: str) -> None:
    document = schemas.schema(name)
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["$id"] == f"urn:pdq:v1:{name}"
    assert document["title"] == name
    assert document["description"]


@pytest.mark.parametrize("name", schemas.PUBLIC)
def test_every_type_has_a_valid_and_an_invalid_example(name: str) -> None:
    assert name in {_kind(path) for path in VALID}
    assert name in {_kind(path) for path in INVALID}


@pytest.mark.parametrize("example", VALID, ids=lambda path: path.stem)
def test_a_valid_example_is_accepted_by_schema_and_type(example: Path) -> None:
    _validator(_kind(example)).validate(json.loads(example.read_text()))
    messages.decode(example.read_bytes(), schemas.PUBLIC[_kind(example)])


@pytest.mark.parametrize("example", INVALID, ids=lambda path: path.stem)
def test_an_invalid_example_is_refused_by_schema_and_type(example: Path) -> None:
    assert not _validator(_kind(example)).is_valid(json.loads(example.read_text()))
    with pytest.raises(InvalidMessage):
        messages.decode(example.read_bytes(), schemas.PUBLIC[_kind(example)])


@pytest.mark.parametrize("name", schemas.PUBLIC)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_the_types_can_say_validates_and_reads_back_the_same(name: str, data: st.DataObject) -> None:
    message: Any = data.draw(instances(schemas.PUBLIC[name]))
    _validator(name).validate(plain(message))
    assert messages.decode(messages.encode(message), schemas.PUBLIC[name]) == message


def test_two_prompts_are_refused_with_the_names_of_the_fields() -> None:
    with pytest.raises(
        InvalidMessage, match=r"exactly one of prompt, messages, prompt_token_ids .* got prompt, messages"
    ):
        messages.decode(b'{"model": "m", "reply_to": "r", "prompt": "a", "messages": []}', messages.PrefillJob)
