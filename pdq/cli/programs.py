"""``pdq bridge``, ``pdq worker`` and ``pdq reaper``: the long-running programs, each of which drains on SIGTERM."""

import os
import sys
from typing import Annotated

import typer

from pdq.cli.find import DEFAULT_STATE_DIR, StateDir, environment
from pdq.cli.models import Engine, Model, prepare, resolve
from pdq.ports import Pool

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME_OR_DIR",
        help="A Hugging Face directory, or the name of a model that pdq prepares. Default: smollm2-135m-instruct.",
    ),
]
EngineOption = Annotated[Engine, typer.Option(help="Which engine the workers run. `sim` needs no model.")]


def bridge(
    model: ModelOption = None,
    engine: EngineOption = "torch",
    host: Annotated[str | None, typer.Option(help="Address to listen on (PDQ_BRIDGE_HOST).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for a free one (PDQ_BRIDGE_PORT).")] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Serve the OpenAI API: requests in, prefill jobs out, token frames back.

    Validates, tokenizes and admits requests, publishes them to NATS and streams the tokens to the client. Any number of
    bridges may run side by side. On SIGTERM it takes no new requests and lets the running streams finish.
    """
    chosen = prepare(resolve(model, engine))
    overrides = {"PDQ_BRIDGE_HOST": host, "PDQ_BRIDGE_PORT": None if port is None else str(port)}
    environ = environment(state_dir) | {name: value for name, value in overrides.items() if value is not None}
    argv = bridge_command(chosen)
    os.execve(argv[0], argv, environ)


def worker(
    pool: Annotated[Pool, typer.Argument(help="The queue it serves.")],
    model: ModelOption = None,
    engine: EngineOption = "torch",
    worker_id: Annotated[str | None, typer.Option("--id", help="Its name. Default: pool and a random part.")] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Run one prefill or decode worker.

    A prefill worker computes prompts and offers their KV; a decode worker fetches KV and generates. On SIGTERM it pulls
    no new jobs and leaves when its sequences have ended and its last KV has been fetched; a second SIGTERM ends it at
    once, and its requests are taken over by others.
    """
    chosen = prepare(resolve(model, engine))
    argv = worker_command(pool, chosen, engine, worker_id)
    os.execve(argv[0], argv, environment(state_dir))


def worker_command(pool: Pool, model: Model, engine: Engine, worker_id: str | None = None) -> list[str]:
    """The program that runs one worker."""
    identity = ("--id", worker_id) if worker_id is not None else ()
    return [sys.executable, "-m", f"workers.{engine}", pool.value, *_model_arguments(model), *identity]


def bridge_command(model: Model) -> list[str]:
    """The program that runs one bridge."""
    return [sys.executable, "-m", "pdq.bridge", *_model_arguments(model)]


def _model_arguments(model: Model) -> tuple[str, ...]:
    directory = ("--directory", str(model.directory)) if model.directory is not None else ()
    return ("--model", model.name, *directory)


def reaper(state_dir: StateDir = DEFAULT_STATE_DIR) -> None:
    """Run the reaper: it speaks for workers that died, and ends requests whose deadline has passed.

    It also tells producers on NATS what has become of their jobs. Several may run side by side; every expiry happens once.
    """
    from pdq import runtime
    from pdq.connect import connect
    from pdq.core.environment import load
    from pdq.stages.endings import Endings
    from pdq.stages.outbox import Outbox
    from pdq.stages.reaper import NAME, Reaper
    from pdq.stages.status import Status

    settings = load(environment(state_dir))

    async def reap(lifecycle: runtime.Lifecycle) -> None:
        async with connect(settings, NAME) as system:
            endings = Endings(system.ledger, system.bus, Outbox(system.bus, NAME), NAME)
            work = Reaper(system.ledger, system.queue, system.bus, endings, settings.lease)
            status = Status(system.ledger, system.queue, system.bus, system.registry, endings)
            await system.bus.answer_status(status.answer)
            # It holds nothing that could be finished first.
            await lifecycle.until(lifecycle.draining, work.run())

    raise typer.Exit(runtime.run(NAME, reap))
