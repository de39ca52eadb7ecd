"""``pdq leases``: every live handoff, who holds which side of it, and for how long still."""

from collections.abc import Sequence

import msgspec
import typer
from msgspec import Struct

from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, StateDir, System, talk
from pdq.cli.human import console, seconds, size
from pdq.core.handoff import State
from pdq.core.lease import Lease
from pdq.core.settings import Settings
from pdq.ports import Record


class Holder(Struct, frozen=True):
    worker: str
    epoch: int
    left_ms: int
    """Negative: it has run out and nobody has noticed yet."""


class Handoff(Struct, frozen=True):
    """A live record as an operator sees it. The secret that opens its KV is not shown."""

    request_id: str
    model: str
    state: State
    attempt: int
    epoch: int
    source: Holder | None
    sink: Holder | None
    age_ms: int
    deadline_left_ms: int
    prompt_tokens: int
    kv_bytes: int | None
    """Of the whole prompt; None while no worker has said what its layout is."""


def handoff(record: Record, now_ms: int) -> Handoff:
    def holder(lease: Lease | None) -> Holder | None:
        return Holder(lease.worker, lease.epoch, lease.until_ms - now_ms) if lease else None

    return Handoff(
        request_id=record.key.request_id,
        model=record.key.model,
        state=record.state,
        attempt=record.attempt,
        epoch=record.epoch,
        source=holder(record.source),
        sink=holder(record.sink),
        age_ms=now_ms - record.created_ms,
        deadline_left_ms=record.deadline_ms - now_ms,
        prompt_tokens=record.prompt_tokens,
        kv_bytes=record.layout.kv_bytes(record.prompt_tokens) if record.layout else None,
    )


async def collect(system: System, settings: Settings | None = None) -> list[Handoff]:
    """Live handoffs of all models, oldest first."""
    records = [record for model in await system.ledger.models() for record in await system.ledger.live(model)]
    now_ms = await system.ledger.now_ms()
    return sorted((handoff(record, now_ms) for record in records), key=lambda each: -each.age_ms)


def leases(state_dir: StateDir = DEFAULT_STATE_DIR, as_json: AsJson = False) -> None:
    """List the live handoffs: state, holders of both sides, epoch, age, time left, prompt tokens, KV bytes."""
    found = talk(state_dir, collect)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
    elif found:
        _print(found)
    else:
        typer.echo("no live handoff")


def _print(handoffs: Sequence[Handoff]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        *("request", "state", "source", "sink", "epoch", "age", "deadline in", "prompt", "KV"),
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for each in handoffs:
        table.add_row(
            each.request_id,
            each.state,
            Text(_holder(each.source)),
            Text(_holder(each.sink)),
            str(each.epoch),
            seconds(each.age_ms),
            seconds(each.deadline_left_ms),
            str(each.prompt_tokens),
            "-" if each.kv_bytes is None else size(each.kv_bytes),
        )
    console().print(table)


def _holder(holder: Holder | None) -> str:
    return f"{holder.worker} ({seconds(holder.left_ms)} left)" if holder else "-"
