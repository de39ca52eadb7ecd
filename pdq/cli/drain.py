"""``pdq drain`` and ``pdq undrain``: workers leave without losing a request, and come back.

A single worker is marked on the board as sent away, so that nobody starts it again, and told by message. A pool is fixed at
zero, which whoever supervises it carries out; if nobody does, each of its workers is sent away.
"""

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from msgspec import Struct

from pdq.cli import kubernetes
from pdq.cli.complete import drainable, undrainable
from pdq.cli.departures import (
    GRACE_S,
    Display,
    Order,
    Seen,
    Teller,
    check_spill,
    listing,
    named,
    pool_of,
    told,
    until_gone,
)
from pdq.cli.duration import Deadline
from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, OfModel, StateDir, System, served_model, talk
from pdq.cli.human import warn
from pdq.core import names
from pdq.core.errors import InvalidRequest, WorkerNotFound
from pdq.core.exits import OTHER
from pdq.core.messages import Undrain
from pdq.core.settings import Settings
from pdq.ports import Pool, WorkerInfo

HEARD_S: Final = 5.0
"""For a worker to say that it heard."""


class Drained(Struct, frozen=True):
    """What ``--json`` prints."""

    model: str
    by: str | None
    """Who carries a pool's size out; None: the workers were told one by one."""
    workers: Sequence[Seen]


def drain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WORKER|prefill|decode", help="A worker's name, or a whole pool.", autocompletion=drainable
        ),
    ],
    deadline_s: Deadline = None,
    spill: Annotated[
        bool,
        typer.Option(
            "--spill", help="Do not wait until KV is fetched: move it to the worker's tier (PDQ_TRANSPORT_SPILL)."
        ),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it has left, with progress.")] = True,
    model: OfModel = None,
    by_kubernetes: kubernetes.Kubernetes = False,
    namespace: kubernetes.Namespace = "",
    prefill_deployment: kubernetes.PrefillDeployment = "",
    decode_deployment: kubernetes.DecodeDeployment = "",
    context: kubernetes.Context = "",
    dry_run: kubernetes.DryRun = False,
    as_json: AsJson = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Let a worker, or a whole pool, finish what it has and leave. No request is lost.

    It takes nothing new. A prefill worker stays until its last KV is fetched, a decode worker until its sequences have
    ended; at the deadline KV moves to a tier if there is one, and sequences go on elsewhere. It is not started again until
    `pdq undrain`. A supervised pool leaves within PDQ_DRAIN_DEADLINE_S in any case. Exit status 1: it is still there.

    With --kubernetes its pod goes for good: it gets the lowest deletion cost, and its Deployment one replica less.
    """
    place = kubernetes.place(by_kubernetes, namespace, prefill_deployment, decode_deployment, context, dry_run)
    if place is not None:
        if spill or deadline_s is not None:
            raise InvalidRequest("--kubernetes stops pods: they know no --spill and no --deadline", field="kubernetes")
        if what in list(Pool):
            kubernetes.scale(place, {Pool(what): 0}, state_dir, dry_run, as_json)
        else:
            kubernetes.drain(place, what, dry_run, as_json)
        return

    async def work(system: System, settings: Settings) -> Drained:
        order = Order(settings.drain.deadline_s if deadline_s is None else deadline_s, spill)
        with Display(quiet=as_json) as display:
            leaving = _Leaving(system, order, wait, display)
            if what in list(Pool):
                chosen = await served_model(system, model)
                explicit = spill or deadline_s is not None
                return await leaving.pool(chosen, Pool(what), settings.drain.deadline_s, explicit)
            return await leaving.one(what)

    outcome = talk(state_dir, work)
    staying = [seen for seen in outcome.workers if seen.state == "ready" or (wait and seen.state != "left")]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcome)))
    else:
        typer.echo(_said(outcome, staying, wait), err=bool(staying))
    if staying:
        raise typer.Exit(OTHER)


def _said(outcome: Drained, staying: Sequence[Seen], wait: bool) -> str:
    if staying:
        return f"still there: {'; '.join(map(str, staying))}"
    workers = ", ".join(seen.worker for seen in outcome.workers)
    if not workers:
        return "nothing to drain: it has left already; `pdq undrain` takes it back"
    return f"{'drained' if wait else 'draining'}: {workers}; `pdq undrain` takes it back"


class _Leaving(NamedTuple):
    system: System
    order: Order
    wait: bool
    display: Display

    async def one(self, worker: str) -> Drained:
        info = await named(self.system, worker)
        if self.order.spill:
            check_spill([info])
        await self._warn_of_the_last([info])
        await self.system.board.send_away(info.model, worker)
        return await self._by_message([info])

    async def pool(self, model: str, pool: Pool, signal_deadline_s: float, explicit: bool) -> Drained:
        """``explicit``: the order says more than a supervisor's SIGTERM does."""
        workers = await pool_of(self.system, model, pool)
        if self.order.spill:
            check_spill(workers)
        report = await self.system.board.last_report(model)
        await self._warn_of_the_last(workers)
        if report is None or report.actuator == "advise":
            warn(f"nobody carries out the size of {model}'s pools: each {pool} worker is sent away by message")
            for info in workers:
                await self.system.board.send_away(model, info.worker)
            return await self._by_message(workers)
        await self.system.board.fix(model, pool, 0)
        hurried: set[str] = set()

        async def each(info: WorkerInfo) -> None:
            # Only once it drains: a worker that leaves before its supervisor wants it to would be started again.
            if explicit and info.state == "draining" and info.worker not in hurried:
                hurried.add(info.worker)
                await told(self.system, info.worker, self.order)

        heard_s = HEARD_S + 2 * report.period_ms / 1000
        seen = await until_gone(
            self.system,
            model,
            lambda info: info.pool is pool,
            each,
            heard_s + (signal_deadline_s + GRACE_S if self.wait else 0),
            self.display,
            "left" if self.wait else "draining",
        )
        return Drained(model, report.by, seen)

    async def _by_message(self, workers: Sequence[WorkerInfo]) -> Drained:
        started = {info.worker: info.started_ms for info in workers}
        seen = await until_gone(
            self.system,
            workers[0].model,
            lambda info: started.get(info.worker) == info.started_ms,
            Teller(self.system, self.order),
            HEARD_S + (self.order.deadline_s + GRACE_S if self.wait else 0),
            self.display,
            "left" if self.wait else "draining",
        )
        return Drained(workers[0].model, None, seen)

    async def _warn_of_the_last(self, leaving: Sequence[WorkerInfo]) -> None:
        first, names = leaving[0], {info.worker for info in leaving}
        live = await self.system.registry.workers(first.model)
        if not [it for it in live if it.pool is first.pool and it.state == "ready" and it.worker not in names]:
            warn(f"no other {first.pool} worker of {first.model} is ready: requests wait until there is one")


def undrain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WORKER|prefill|decode", help="A worker's name, or a whole pool.", autocompletion=undrainable
        ),
    ],
    model: OfModel = None,
    as_json: AsJson = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Take a drain back: a worker that still drains serves again, one that has left is started by its supervisor.

    For a pool: its size is no longer fixed, and workers of it that were sent away and still drain stay. Exit status 1: it
    has to leave, because its supervisor stopped it.
    """

    async def work(system: System, _: Settings) -> Undrained:
        if what in list(Pool):
            return await _undrain_pool(system, await served_model(system, model), Pool(what))
        return await _undrain_worker(system, what, model)

    outcome = talk(state_dir, work)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcome)))
    else:
        typer.echo(_told_back(outcome))
    if outcome.leaving:
        raise typer.Exit(OTHER)


class Undrained(Struct, frozen=True):
    """What ``--json`` prints."""

    model: str
    released: bool
    """A pool's fixed size was released."""
    serving: Sequence[str]
    """Those that pull again, or never stopped."""
    called_back: Sequence[str]
    """Those that have left; whoever supervises them starts them again."""
    leaving: Sequence[str]
    """Those that have to leave all the same."""
    away: Sequence[str] = ()
    """Others that were sent away and have left, of whichever pool."""


def _told_back(outcome: Undrained) -> str:
    parts = ["the pool's size is no longer fixed"] if outcome.released else []
    if outcome.serving:
        parts.append(f"serving: {', '.join(outcome.serving)}")
    if outcome.called_back:
        parts.append(f"called back, to be started by its supervisor: {', '.join(outcome.called_back)}")
    if outcome.leaving:
        parts.append(f"leaving all the same, for its supervisor stopped it: {', '.join(outcome.leaving)}")
    if outcome.away:
        parts.append(f"still sent away, call each back by its name: {', '.join(outcome.away)}")
    return "; ".join(parts) or "nothing to take back"


async def _undrain_worker(system: System, worker: str, model: str | None) -> Undrained:
    """``model`` is where else to look: one that has no live worker and never had a record is not known otherwise."""
    live = await system.registry.workers()
    models = {info.model for info in live} | set(await system.ledger.models()) | ({model} if model else set())
    called = [it for it in sorted(models) if await system.board.call_back(it, worker)]
    if info := next((info for info in live if info.worker == worker), None):
        serving, leaving = await _stay(system, [info])
        # One that left in this very moment is started again, because it was called back.
        gone = [] if serving or leaving else [worker]
        return Undrained(info.model, False, serving, gone, leaving)
    if not called:
        raise WorkerNotFound(f"no worker {worker!r} drains or was sent away; {listing(live)}")
    return Undrained(called[0], False, (), [worker], ())


async def _undrain_pool(system: System, model: str, pool: Pool) -> Undrained:
    released = pool in await system.board.fixed(model)
    await system.board.fix(model, pool, None)
    live = await system.registry.workers(model)
    away = await system.board.away(model)
    ours = [info for info in live if info.pool is pool and info.worker in away]
    for info in ours:
        await system.board.call_back(model, info.worker)
    serving, leaving = await _stay(system, ours)
    return Undrained(model, released, serving, (), leaving, sorted(away - {info.worker for info in live}))


async def _stay(system: System, workers: Sequence[WorkerInfo]) -> tuple[list[str], list[str]]:
    """(who serves again, who leaves all the same); who is in neither has left."""
    wanted = {info.worker: info.started_ms for info in workers}
    if not wanted:
        return [], []

    async def each(info: WorkerInfo) -> None:
        if info.state == "draining":
            await system.bus.control(names.worker_subject(info.worker), Undrain())

    seen = await until_gone(
        system,
        workers[0].model,
        lambda info: wanted.get(info.worker) == info.started_ms,
        each,
        HEARD_S,
        lambda _: None,
        "ready",
    )
    by_state = {state: [it.worker for it in seen if it.state == state] for state in ("ready", "draining")}
    return by_state["ready"], by_state["draining"]
