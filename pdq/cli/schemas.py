"""``pdq schemas``: the published contract, generated from the wire types so that it cannot drift from them.

One JSON Schema 2020-12 file per public type and one AsyncAPI 3.0 document (``pdq.cli.asyncapi``) that says where each
of them travels. The files are committed, the checks compare them with the types.
"""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec
import typer

from pdq import ports
from pdq.cli.docstrings import field_docs, prose
from pdq.core import messages

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

PUBLIC: Final[dict[str, Any]] = {
    "PrefillJob": messages.PrefillJob,
    "DecodeJob": messages.DecodeJob,
    "TokenFrame": messages.TokenFrame,
    "Control": messages.Control,
    "OutputQuestion": messages.OutputQuestion,
    "OutputAnswer": messages.OutputAnswer,
    "StatusQuestion": messages.StatusQuestion,
    "StatusAnswer": messages.StatusAnswer,
    "AccountQuestion": messages.AccountQuestion,
    "AccountAnswer": messages.AccountAnswer,
    "Record": ports.Record,
    "WorkerInfo": ports.WorkerInfo,
}
"""Every type that has a schema file, by the file's name."""

_CONTROL_DOC: Final = "A control message; `type` says which."


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of one public type, self-contained."""
    root = msgspec.json.schema(PUBLIC[name])
    defs: dict[str, Any] = root.pop("$defs")
    classes = {cls.__name__: cls for cls in _classes(PUBLIC[name])}
    for component, body in defs.items():
        _annotate(body, classes.get(component))
    if "$ref" in root:
        root = defs.pop(root["$ref"].rpartition("/")[2])
    else:
        root = {"title": name, "description": _CONTROL_DOC, **root}
    return {"$schema": DIALECT, "$id": f"urn:pdq:v{messages.VERSION}:{name}", **root} | (
        {"$defs": defs} if defs else {}
    )


def _annotate(body: dict[str, Any], cls: type | None) -> None:
    """Add what msgspec does not know: documentation of fields, and rules that a type enforces in code."""
    if "description" in body:
        body["description"] = prose(body["description"])
    for field, text in field_docs(cls).items() if cls else ():
        if field in body.get("properties", {}):
            body["properties"][field]["description"] = text
    if cls is messages.PrefillJob:
        body["oneOf"] = [
            {"required": [field], "properties": {field: {"not": {"type": "null"}}}} for field in messages.PROMPT_FIELDS
        ]


def _classes(kind: Any) -> Iterable[type]:
    """Every Struct class that ``kind`` is made of."""
    seen: set[type] = set()
    waiting = [kind]
    while waiting:
        kind = waiting.pop()
        waiting.extend(get_args(kind))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen.add(kind)
            waiting.extend(field.type for field in msgspec.structs.fields(kind))
    return seen


def documents() -> dict[str, str]:
    """Every generated file: its name in ``schemas/`` and its exact text."""
    from pdq.cli.asyncapi import text

    files = {f"{name}.json": json.dumps(schema(name), indent=2, ensure_ascii=False) + "\n" for name in PUBLIC}
    return {**files, "asyncapi.yaml": text()}


def drift(directory: Path) -> str:
    """What differs between ``directory`` and the types, as a unified diff; empty if nothing does."""
    lines: list[str] = []
    for name, expected in documents().items():
        path = directory / name
        found = path.read_text() if path.exists() else ""
        lines += difflib.unified_diff(
            found.splitlines(True), expected.splitlines(True), f"{path} (committed)", f"{path} (from the types)"
        )
    return "".join(lines)


def schemas(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files are.")] = Path("schemas"),
    write: Annotated[bool, typer.Option("--write", help="Write the files instead of comparing them.")] = False,
) -> None:
    """Compare the committed JSON Schemas and the AsyncAPI document with the wire types, or write them.

    Exit status 1 if a file differs from what the types say.
    """
    if write:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in documents().items():
            (directory / name).write_text(text)
            typer.echo(directory / name)
    elif difference := drift(directory):
        typer.echo(difference, nl=False)
        typer.echo("schemas differ from the types: run `pdq schemas --write`", err=True)
        raise typer.Exit(1)
