"""``pdq status``: what a running system is doing now, per model: workers, queues, records."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import typer
from msgspec import Struct

from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, StateDir, System, talk
from pdq.cli.human import console
from pdq.core.settings import Settings
from pdq.ports import Queue, WorkerInfo

if TYPE_CHECKING:
    from rich.console import RenderableType


class Depth(Struct, frozen=True):
    waiting: int
    taken: int
    """Delivered to a worker and not acknowledged yet."""


class ModelStatus(Struct, frozen=True):
    model: str
    workers: Sequence[WorkerInfo]
    queues: Mapping[Queue, Depth]
    records: Mapping[str, int]
    """Live records, by state."""


async def collect(system: System, settings: Settings | None = None) -> list[ModelStatus]:
    """Every model that has a worker or ever had a record, in order of its name."""
    workers = sorted(await system.registry.workers(), key=lambda worker: (worker.pool, worker.worker))
    models = sorted({worker.model for worker in workers} | set(await system.ledger.models()))
    return [
        ModelStatus(
            model=model,
            workers=[worker for worker in workers if worker.model == model],
            queues={queue: Depth(*await system.queue.depth(queue, model)) for queue in Queue},
            records={
                state.value: count for state, count in (await system.ledger.load(model)).requests.items() if count
            },
        )
        for model in models
    ]


def status(state_dir: StateDir = DEFAULT_STATE_DIR, as_json: AsJson = False) -> None:
    """Show models, their workers in both pools, what waits in the queues, and live requests by state."""
    found = talk(state_dir, collect)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"models": found})))
        return
    for model in found:
        console().print(*render(model), sep="\n")
    if not found:
        typer.echo("no model is served, and none ever was")


def render(status: ModelStatus) -> "list[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    table = Table(
        *("pool", "worker", "state", "blocks free", "running", "held", "served", "steps", "tokens"),
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for column in table.columns[3:]:
        column.justify = "right"
    for worker in status.workers:
        now = worker.occupancy
        table.add_row(
            f"{worker.pool}+local" if worker.aggregated else worker.pool,
            Text(worker.worker),
            worker.state,
            f"{now.free_blocks}/{now.total_blocks}",
            *(str(figure) for figure in (now.running, now.held, now.served, now.steps, now.tokens)),
        )
    queues = ", ".join(f"{queue} {depth.waiting} waiting {depth.taken} taken" for queue, depth in status.queues.items())
    records = ", ".join(f"{count} {state}" for state, count in status.records.items())
    return [
        Text(status.model, style="bold"),
        table if status.workers else Text("no worker"),
        Text(f"queues   {queues}"),
        Text(f"requests {records or 'none'}"),
        "",
    ]
