"""``pdq failpoints``: every place where a fault can be made to happen."""

import msgspec
import typer
from msgspec import Struct

from pdq.cli.find import AsJson
from pdq.cli.human import console
from pdq.failpoints import POINTS


class Place(Struct, frozen=True):
    name: str
    where: str
    actions: tuple[str, ...]


def places() -> list[Place]:
    """All of them, in the order in which a request meets them."""
    always = ("kill", "stop", "delay", "error")
    return [Place(name, point.where, (*always, *point.can)) for name, point in POINTS.items()]


def failpoints(as_json: AsJson = False) -> None:
    """List the places where PDQ_FAILPOINTS can make a fault happen.

    PDQ_FAILPOINTS="decode.step=kill+5" kills a decode worker at its sixth step. See docs/failpoints.md.
    """
    found = places()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    from rich.table import Table

    table = Table("point", "actions", "where", box=None, pad_edge=False, header_style="bold")
    for place in found:
        table.add_row(place.name, ", ".join(place.actions), place.where)
    console().print(table)
