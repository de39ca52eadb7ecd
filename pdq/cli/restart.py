"""``pdq restart``: every worker of a pool is replaced, without losing a request and without a gap.

A worker drains without being sent away, so whoever supervises it (``pdq up``, a kubelet) starts it again. The next one
follows when as many are ready as before.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

import msgspec
import typer
from msgspec import Struct

from pdq.cli.complete import restartable
from pdq.cli.departures import GRACE_S, POLL_S, Display, Order, Seen, Teller, pool_of, until_gone
from pdq.cli.drain import HEARD_S
from pdq.cli.duration import Deadline
from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, OfModel, StateDir, System, served_model, talk
from pdq.cli.human import seconds
from pdq.core.exits import OTHER
from pdq.core.settings import Settings
from pdq.ports import Pool, WorkerInfo

Which = Literal["prefill", "decode", "all"]

ORDER: Final = {"prefill": (Pool.PREFILL,), "decode": (Pool.DECODE,), "all": (Pool.PREFILL, Pool.DECODE)}


class Restarted(Struct, frozen=True):
    worker: str
    pool: Pool
    took_ms: int
    """From being told until its pool was as large as before."""


class Outcome(Struct, frozen=True):
    """What ``--json`` prints."""

    model: str
    restarted: Sequence[Restarted]
    trouble: str = ""
    """Why it did not go on; the workers that follow were not touched."""


def restart(
    pool: Annotated[
        Which, typer.Argument(metavar="prefill|decode|all", help="Whose workers.", autocompletion=restartable)
    ],
    one_by_one: Annotated[
        bool,
        typer.Option("--one-by-one/--all-at-once", help="The next one only when the pool is as large as before."),
    ] = True,
    deadline_s: Deadline = None,
    model: OfModel = None,
    as_json: AsJson = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Replace the workers of a pool by new ones, one after the other, while requests are served.

    Each one drains and leaves; its supervisor (`pdq up`, Kubernetes) starts it again. Exit status 1: a worker did not
    leave, or nobody started it again in time (PDQ_SCALING_READY_WITHIN_S); the others were left alone then.
    """

    async def work(system: System, settings: Settings) -> Outcome:
        order = Order(settings.drain.deadline_s if deadline_s is None else deadline_s, spill=False)
        chosen = await served_model(system, model)
        pools = [await pool_of(system, chosen, it) for it in ORDER[pool]]
        done: list[Restarted] = []
        with Display(quiet=as_json) as display:
            for workers in pools:
                for batch in ([it] for it in workers) if one_by_one else (workers,):
                    if trouble := await _replace(system, batch, order, settings, display, done.append):
                        return Outcome(chosen, done, trouble)
        return Outcome(chosen, done)

    outcome = talk(state_dir, work)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcome)))
    else:
        for it in outcome.restarted:
            typer.echo(f"{it.worker} was replaced within {seconds(it.took_ms)}")
    if outcome.trouble:
        if not as_json:
            typer.echo(outcome.trouble, err=True)
        raise typer.Exit(OTHER)


async def _replace(
    system: System,
    workers: Sequence[WorkerInfo],
    order: Order,
    settings: Settings,
    display: Display,
    done: Callable[[Restarted], None],
) -> str:
    """What went wrong; empty: these have left, and as many are ready as before."""
    model, pool, started = workers[0].model, workers[0].pool, time.monotonic()
    going = {info.worker: info.started_ms for info in workers}

    def one_of_them(info: WorkerInfo) -> bool:
        return going.get(info.worker) == info.started_ms

    before = await _ready(system, model, pool)
    within_s = HEARD_S + order.deadline_s + GRACE_S
    seen = await until_gone(system, model, one_of_them, Teller(system, order), within_s, display)
    if staying := [at for at in seen if at.state != "left"]:
        return f"still there: {'; '.join(map(str, staying))}"
    give_up = time.monotonic() + settings.scaling.ready_within_s
    while (now := await _ready(system, model, pool)) < before:
        if time.monotonic() >= give_up:
            return (
                f"{_names(seen)} left, and after {settings.scaling.ready_within_s:g} s {now} of {before} {pool} workers "
                "are ready: does nobody start it again?"
            )
        await asyncio.sleep(POLL_S)
    took_ms = round(1000 * (time.monotonic() - started))
    for info in workers:
        done(Restarted(info.worker, pool, took_ms))
    return ""


async def _ready(system: System, model: str, pool: Pool) -> int:
    return sum(it.pool is pool and it.state == "ready" for it in await system.registry.workers(model))


def _names(seen: Sequence[Seen]) -> str:
    return ", ".join(at.worker for at in seen)
