"""``pdq autoscaler``: sizes the pools of one model, on a fleet. ``pdq up --autoscale`` does the same on one machine."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdq.cli.find import DEFAULT_STATE_DIR, OfModel, StateDir, environment, served_model

if TYPE_CHECKING:
    from pdq.connect import Connected
    from pdq.core.settings import Settings
    from pdq.ports import Actuator

By = Literal["kubernetes", "advise"]


def autoscaler(
    model: OfModel = None,
    actuator: Annotated[
        By,
        typer.Option(
            help="`kubernetes`: scales two Deployments (PDQ_KUBERNETES_*). `advise`: decides, reports and exports, for "
            "others to carry out."
        ),
    ] = "advise",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Decide and log, beside whoever decides now. Change and report nothing.")
    ] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Let the number of workers follow the load: observe, decide, apply, every PDQ_SCALING_PERIOD_S.

    Several may run side by side: one decides, and another goes on when it resigns (SIGTERM) or falls silent. Every
    decision is logged with its reason, shown by `pdq status`, and exported for Prometheus (PDQ_SCALING_METRICS_HOST and
    _PORT). What an operator fixes with `pdq scale` stands until it is released.
    """
    from pdq import runtime
    from pdq.autoscale.advise import Onlooker
    from pdq.autoscale.loop import Autoscaler
    from pdq.autoscale.metrics import Metrics
    from pdq.autoscale.policies import FollowLoad
    from pdq.connect import connect
    from pdq.core.environment import load

    settings = load(environment(state_dir))

    async def follow(lifecycle: runtime.Lifecycle) -> None:
        async with connect(settings, "autoscaler") as system:
            name = await served_model(system, model)
            metrics = Metrics(name)
            async with _actuator(actuator, name, system, settings, dry_run) as acting:
                loop = Autoscaler(
                    model=name,
                    who=f"pdq autoscaler, process {os.getpid()} on {socket.gethostname()}",
                    ledger=system.ledger,
                    registry=system.registry,
                    board=Onlooker(system.board) if dry_run else system.board,
                    actuator=acting,
                    policy=FollowLoad(settings.scaling),
                    limits=settings.scaling,
                    metrics=metrics,
                )
                with metrics.served(settings.scaling):
                    await lifecycle.until(lifecycle.draining, loop.run())

    raise typer.Exit(runtime.run("autoscaler", follow))


@asynccontextmanager
async def _actuator(
    by: By, model: str, system: "Connected", settings: "Settings", dry_run: bool
) -> "AsyncIterator[Actuator]":
    if by == "advise":
        from pdq.autoscale.advise import Advise

        yield Advise(model, system.registry)
        return
    from pdq.cli import kubernetes

    async with kubernetes.actuator(settings.kubernetes, dry_run) as actuator:
        yield actuator
