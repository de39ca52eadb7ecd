"""``pdq status``: what a running system is doing now, per model: workers, queues, records, and what sizes the pools."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec import Struct

from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, StateDir, System, talk
from pdq.cli.human import console, seconds
from pdq.core.settings import Settings
from pdq.ports import Pool, Queue, ScalingReport, WorkerInfo

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
    scaling: ScalingReport | None = None
    """The last decision on the pools' sizes; None: nobody decides."""
    decided_ms_ago: int | None = None
    fixed: Mapping[Pool, int] = {}
    """What operators have fixed."""
    away: Sequence[str] = ()
    """Workers that operators have sent away and not called back."""


async def collect(system: System, settings: Settings | None = None) -> list[ModelStatus]:
    """Every model that has a worker or ever had a record, in order of its name."""
    workers = sorted(await system.registry.workers(), key=lambda worker: (worker.pool, worker.worker))
    models = sorted({worker.model for worker in workers} | set(await system.ledger.models()))
    return [await _collect(system, model, [it for it in workers if it.model == model]) for model in models]


async def _collect(system: System, model: str, workers: Sequence[WorkerInfo]) -> ModelStatus:
    load = await system.ledger.load(model)
    report = await system.board.last_report(model)
    return ModelStatus(
        model=model,
        workers=workers,
        queues={queue: Depth(*await system.queue.depth(queue, model)) for queue in Queue},
        records={state.value: count for state, count in load.requests.items() if count},
        scaling=report,
        decided_ms_ago=max(0, await system.ledger.now_ms() - report.at_ms) if report is not None else None,
        fixed=await system.board.fixed(model),
        away=sorted(await system.board.away(model)),
    )


def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, until Ctrl-C. With --json: a line each.")
    ] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, metavar="SECONDS", help="With --watch: time between two looks.")
    ] = 2.0,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Show models, their workers in both pools, what waits in the queues, live requests by state, and the last decision on
    the pools' sizes."""
    if watch:
        with suppress(KeyboardInterrupt):
            talk(state_dir, lambda system, _: _watch(system, every_s, as_json))
        return
    found = talk(state_dir, collect)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"models": found})))
    else:
        console().print(*_lines(found), sep="\n")


async def _watch(system: System, every_s: float, as_json: bool) -> None:
    from rich.console import Group
    from rich.live import Live

    async def looks() -> AsyncIterator[list[ModelStatus]]:
        while True:
            yield await collect(system)
            await asyncio.sleep(every_s)

    if as_json or not sys.stdout.isatty():
        async for found in looks():
            if as_json:
                typer.echo(msgspec.json.encode({"models": found}))
            else:
                console().print(*_lines(found), sep="\n")
        return
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        async for found in looks():
            live.update(Group(*_lines(found)), refresh=True)


def _lines(found: Sequence[ModelStatus]) -> "list[RenderableType]":
    return [line for model in found for line in render(model)] or ["no model is served, and none ever was"]


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
        *_scaling(status),
        *([Text(f"away     {', '.join(status.away)}")] if status.away else []),
        "",
    ]


def _scaling(status: ModelStatus) -> "list[RenderableType]":
    from rich.table import Table
    from rich.text import Text

    report = status.scaling
    if report is None:
        fixed = ", ".join(f"{pool} fixed at {size}" for pool, size in status.fixed.items())
        return [Text(f"sizes    {fixed}; nobody carries that out" if fixed else "sizes    nobody decides")]
    how = "following the load" if report.automatic else "as started"
    ago = seconds(status.decided_ms_ago or 0)
    table = Table.grid(padding=(0, 2))
    for pool, it in report.pools.items():
        was, now = ("?" if size is None else str(size) for size in (it.replicas, it.decided))
        table.add_row("", pool, was if was == now else f"{was} -> {now}", it.cause, Text(it.why))
        if it.trouble:
            table.add_row("", "", "", "trouble", Text(it.trouble, style="red"))
    return [Text(f"sizes    {how}, decided {ago} ago by {report.by} ({report.actuator})"), table]
