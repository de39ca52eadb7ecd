"""All commands under one program, and the one place where an error becomes a line on stderr and an exit status."""

import sys
from typing import Annotated

import typer

from pdq.cli import (
    audit,
    autoscaler,
    cancel,
    demo,
    drain,
    failpoints,
    leases,
    programs,
    publish,
    restart,
    scale,
    schemas,
    settings,
    simulate,
    states,
    status,
    trace,
    up,
)
from pdq.core import errors
from pdq.core.exits import exit_status

app = typer.Typer(
    name="pdq",
    help="Serve LLMs with prefill and decode in separate pools, driven by message queues.",
    epilog="Exit status: 0 success; 2 bad input; 3 a server is unavailable; 4 not found; 1 any other failure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pdq {version('pdq')}")
        raise typer.Exit


@app.callback()
def _program(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(up.up)
app.command()(demo.demo)
app.command()(status.status)
app.command()(scale.scale)
app.command()(drain.drain)
app.command()(drain.undrain)
app.command()(restart.restart)
app.command()(leases.leases)
app.command()(audit.audit)
app.command()(trace.trace)
app.command()(cancel.cancel)
app.command()(publish.publish)
app.command()(programs.bridge)
app.command()(programs.worker)
app.command()(programs.reaper)
app.command()(autoscaler.autoscaler)
app.command()(settings.settings)
app.command()(failpoints.failpoints)
app.command()(schemas.schemas)
app.command()(states.states)
app.command()(simulate.simulate)


def run() -> None:
    """Run the command that the arguments name, and exit."""
    try:
        app(prog_name="pdq")
    except errors.PdqError as error:
        print(f"pdq: {error}", file=sys.stderr)
        sys.exit(exit_status(error))
