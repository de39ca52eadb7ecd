"""``pdq scale``: an operator's word on how many workers a pool has, and waiting until it is so."""

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import typer
from msgspec import Struct

from pdq.cli import kubernetes
from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, OfModel, StateDir, System, served_model, talk
from pdq.cli.human import Progress, console
from pdq.core.errors import InvalidRequest, UnknownModel
from pdq.core.exits import OTHER, UNAVAILABLE
from pdq.core.pacing import Cause
from pdq.ports import Pool

if TYPE_CHECKING:
    from rich.table import Table

MOST: Final = 10_000
POLL_S: Final = 0.2
SILENCE_S: Final = 6.0
"""Who carries out sizes reports more often than that, or once more if he has just started or taken over."""

Wanted = Mapping[Pool, int | None]
"""None: ``auto``."""


class PoolSize(Struct, frozen=True):
    fixed: int | None
    ready: int
    draining: int
    decided: int | None
    """By whoever carries it out; the rest, too. None: nobody does, or he does not know."""
    cause: Cause | None
    why: str
    trouble: str


class Sizes(Struct, frozen=True):
    model: str
    actuator: str | None
    """None: nobody carries out what is fixed."""
    automatic: bool
    """Sizes that are not fixed follow the load; else they are those with which the system was started."""
    pools: Mapping[Pool, PoolSize]


async def sizes(system: System, model: str) -> Sizes:
    workers = Counter((it.pool, it.state) for it in await system.registry.workers(model))
    fixed = await system.board.fixed(model)
    report = await system.board.last_report(model)

    def size(pool: Pool) -> PoolSize:
        said = report.pools.get(pool) if report is not None else None
        return PoolSize(
            fixed=fixed.get(pool),
            ready=workers[pool, "ready"],
            draining=workers[pool, "draining"],
            decided=said.decided if said is not None else None,
            cause=said.cause if said is not None else None,
            why=said.why if said is not None else "",
            trouble=said.trouble if said is not None else "",
        )

    return Sizes(
        model=model,
        actuator=report.actuator if report is not None else None,
        automatic=report is not None and report.automatic,
        pools={pool: size(pool) for pool in Pool},
    )


def scale(
    pools: Annotated[
        list[str] | None,
        typer.Argument(metavar="[POOL=NUMBER|POOL=auto]...", help="`prefill=3 decode=auto`. None: show the sizes."),
    ] = None,
    model: OfModel = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until each pool has so many ready workers.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait.")] = 180,
    by_kubernetes: kubernetes.Kubernetes = False,
    namespace: kubernetes.Namespace = "",
    prefill_deployment: kubernetes.PrefillDeployment = "",
    decode_deployment: kubernetes.DecodeDeployment = "",
    context: kubernetes.Context = "",
    dry_run: kubernetes.DryRun = False,
    as_json: AsJson = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Fix the number of workers of a pool, or leave it to the autoscaler again (`auto`).

    A number stands, whatever the load, until it is released; workers that are too many drain. Without an autoscaler,
    `auto` goes back to the numbers of `pdq up`. Exit status 1: not there in time; it remains asked for. 3: nobody carries
    it out.
    """
    wanted = parse(pools or [])
    place = kubernetes.place(by_kubernetes, namespace, prefill_deployment, decode_deployment, context, dry_run)
    if place is not None:
        kubernetes.scale(place, wanted, state_dir, dry_run, as_json)
        return
    outcome = talk(state_dir, lambda system, _: _scale(system, model, wanted, timeout_s if wait else None))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcome.sizes)))
    elif not wanted:
        console().print(_table(outcome.sizes))
    if outcome.said:
        print(outcome.said, file=sys.stderr if outcome.status or as_json else sys.stdout)
    raise typer.Exit(outcome.status)


def parse(pools: Sequence[str]) -> Wanted:
    """
    Raises:
        InvalidRequest: it says of which word what is wrong.
    """
    wanted: dict[Pool, int | None] = {}
    for word in pools:
        name, equals, size = word.partition("=")
        if not equals or name not in list(Pool):
            raise InvalidRequest(f"{word!r}: say prefill=NUMBER, decode=NUMBER, or auto for the number", field="pools")
        if size != "auto" and not re.fullmatch(r"[0-9]+", size):
            raise InvalidRequest(f"{word!r}: {size!r} is neither a whole number from 0 on nor auto", field="pools")
        if size != "auto" and (len(size) > 9 or int(size) > MOST):
            raise InvalidRequest(f"{word!r}: more than {MOST} workers", field="pools")
        if Pool(name) in wanted:
            raise InvalidRequest(f"{word!r}: {name} was given a size before", field="pools")
        wanted[Pool(name)] = None if size == "auto" else int(size)
    return wanted


class _Outcome(NamedTuple):
    sizes: Sizes
    said: str
    status: int = 0


async def _scale(system: System, named: str | None, wanted: Wanted, timeout_s: float | None) -> _Outcome:
    model = await served_model(system, named)
    if not wanted:
        return _Outcome(await sizes(system, model), "")
    if await system.registry.last(model) is None and await system.board.last_report(model) is None:
        raise UnknownModel(f"no worker ever served a model {model!r}", field="model")
    for pool, size in wanted.items():
        await system.board.fix(model, pool, size)
    if (nobody := await _until_heard(system, model)) is not None:
        return nobody
    fixed = {pool: size for pool, size in wanted.items() if size is not None}
    return await _until_ready(system, model, wanted, fixed, timeout_s)


async def _until_heard(system: System, model: str) -> _Outcome | None:
    """Does anybody carry it out? What to say if not."""
    give_up = time.monotonic() + SILENCE_S
    while (report := await system.board.last_report(model)) is None and time.monotonic() < give_up:
        await asyncio.sleep(POLL_S)
    if report is None:
        why = f"nobody carries out the sizes of {model}: no `pdq up` and no `pdq autoscaler` runs for it"
    elif report.actuator == "advise":
        why = f"the autoscaler of {model} ({report.by}) only advises"
    else:
        return None
    said = f"written down, but {why}. Start one, or scale your Deployments yourself (--kubernetes does)"
    return _Outcome(await sizes(system, model), said, UNAVAILABLE)


async def _until_ready(
    system: System, model: str, wanted: Wanted, fixed: Mapping[Pool, int], timeout_s: float | None
) -> _Outcome:
    give_up = time.monotonic() + (timeout_s or 0)
    with Progress() as progress:
        while True:
            now = await sizes(system, model)
            missing = {pool: size for pool, size in fixed.items() if now.pools[pool].ready != size}
            if not missing or timeout_s is None:
                return _Outcome(now, "; ".join(_done(pool, size, now) for pool, size in wanted.items()))
            lines = [_missing(pool, size, now.pools[pool]) for pool, size in missing.items()]
            if time.monotonic() >= give_up:
                told = f"not there after {timeout_s:g} s, and still asked for: {'; '.join(lines)}"
                return _Outcome(now, told, OTHER)
            progress.show("; ".join(lines))
            await asyncio.sleep(POLL_S)


def _done(pool: Pool, size: int | None, now: Sizes) -> str:
    if size is None:
        return f"{pool} follows {'the load' if now.automatic else 'the number with which the system was started'} again"
    return f"{pool} is fixed at {size}, {now.pools[pool].ready} ready"


def _missing(pool: Pool, size: int, now: PoolSize) -> str:
    draining = f", {now.draining} draining" if now.draining else ""
    trouble = f" ({now.trouble})" if now.trouble else ""
    return f"{pool}: {now.ready} of {size} ready{draining}{trouble}"


def _table(now: Sizes) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(
        *("pool", "fixed", "decided", "ready", "draining", "cause", "why"),
        box=None,
        pad_edge=False,
        header_style="bold",
        title=Text(_head(now)),
        title_justify="left",
        title_style="",
    )
    for column in table.columns[1:5]:
        column.justify = "right"
    for pool, it in now.pools.items():
        figures = ("-" if figure is None else str(figure) for figure in (it.fixed, it.decided, it.ready, it.draining))
        table.add_row(pool, *figures, it.cause or "-", Text(it.trouble or it.why))
    return table


def _head(now: Sizes) -> str:
    if now.actuator is None:
        return f"{now.model}: nobody carries out what is fixed here"
    return f"{now.model}: {'following the load' if now.automatic else 'as started, or as fixed'} ({now.actuator})"
