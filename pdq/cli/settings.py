"""``pdq settings``: every environment variable, with what it is and what it is when it is not set."""

import msgspec
import typer
from msgspec import Struct

from pdq.cli.docstrings import field_docs, prose
from pdq.cli.find import AsJson
from pdq.cli.human import console
from pdq.core.environment import PLACES, from_file, variables
from pdq.core.settings import Settings


class Variable(Struct, frozen=True):
    name: str
    default: str
    """As it would be written in the environment; empty if there is none."""
    meaning: str


def listing() -> list[Variable]:
    """All variables: the settings in the order of their groups, then the places."""
    groups = {group.name: group.type for group in msgspec.structs.fields(Settings)}
    known = [
        Variable(name, written(default), _meaning(name, groups[group], field))
        for name, group, field, default in variables()
    ]
    return known + [Variable(name, "", prose(meaning)) for name, meaning in PLACES.items()]


def _meaning(name: str, group: type, field: str) -> str:
    kind = next(known.type for known in msgspec.structs.fields(group) if known.name == field)
    mounted = f" Or {name}_FILE: a file with it." if from_file(kind) else ""
    return field_docs(group).get(field, "") + mounted


def written(value: object) -> str:
    """A setting's value as text that ``pdq.core.environment.load`` reads back as the same value."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{name}={weight}" for name, weight in value.items())
    return str(value)


def settings(as_json: AsJson = False) -> None:
    """List every setting: its environment variable, its default, what it means."""
    found = listing()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("variable", "default", "meaning", box=None, pad_edge=False, header_style="bold")
    for variable in found:
        table.add_row(variable.name, Text(variable.default), Text(variable.meaning))
    console().print(table)
