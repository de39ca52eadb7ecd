"""The AsyncAPI document is valid by the official schema, complete, and true to ``pdq.core.names``."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from pdq.cli import schemas
from pdq.core import names

SCHEMAS = Path(__file__).parents[2] / "schemas"
OFFICIAL = Path(__file__).parent / "asyncapi" / "3.0.0.json.gz"
DOCUMENT: dict[str, Any] = yaml.safe_load((SCHEMAS / "asyncapi.yaml").read_text())


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def test_the_document_is_valid_asyncapi_3() -> None:
    jsonschema.Draft7Validator(json.loads(gzip.decompress(OFFICIAL.read_bytes()))).validate(DOCUMENT)


def test_every_reference_resolves() -> None:
    for reference in set(_references(DOCUMENT)):
        file, _, pointer = reference.partition("#")
        node = json.loads((SCHEMAS / file).read_text()) if file else DOCUMENT
        for part in filter(None, pointer.split("/")):
            node = node[part]


def test_every_message_type_is_on_a_channel() -> None:
    on_channels = {message for channel in DOCUMENT["channels"].values() for message in channel["messages"]}
    assert on_channels - {"DeadJob"} == set(schemas.PUBLIC) - {"Record", "WorkerInfo"}


def test_addresses_become_the_subjects_that_pdq_uses() -> None:
    for channel, subject in {
        "prefillJobs": names.prefill_subject("m", "batch"),
        "decodeJobs": names.decode_subject("m", "batch"),
        "localJobs": names.local_subject("m", "batch"),
        "deadLetters": names.dead_subject("prefill", "m"),
        "worker": names.worker_subject("w"),
        "account": names.account_subject("w"),
        "cancel": names.CANCEL_SUBJECT,
    }.items():
        address = DOCUMENT["channels"][channel]["address"]
        assert address.format(model="m", priority="batch", queue="prefill", worker="w") == subject


def test_streams_and_consumers_are_named() -> None:
    for operation in DOCUMENT["operations"].values():
        if "bindings" in operation:
            binding = operation["bindings"]["nats"]["x-jetstream"]
            assert binding["stream"] in {names.PREFILL_STREAM, names.DECODE_STREAM, names.LOCAL_STREAM}
            assert binding["consumer"].format(model="m", priority="batch") == names.consumer("m", "batch")


def test_the_written_rule_for_model_names_is_the_one_that_is_used() -> None:
    rule = DOCUMENT["components"]["parameters"]["model"]["description"]
    for model in ("org/model.v1", "SmolLM2-135M-Instruct"):
        assert f"`{names.token(model)}`" in rule or names.token(model) == model
    awkward = "a b/c.d*e>f~g_h-i:ä=%"
    by_hand = re.sub(rb"[^A-Za-z0-9_-]", lambda byte: b"=%02X" % byte[0][0], awkward.encode()).decode()
    assert names.token(awkward) == by_hand
