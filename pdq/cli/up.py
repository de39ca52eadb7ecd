"""``pdq up``: everything on this machine, until Ctrl-C."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from pdq.cli import models
from pdq.cli.find import DEFAULT_STATE_DIR
from pdq.cli.plan import Mode, Plan
from pdq.cli.programs import EngineOption, ModelOption
from pdq.core.environment import load
from pdq.core.errors import InvalidSettings

QUIET_S: Final = 2.0
"""Nothing that takes longer than this goes by without a word."""

Prefill = Annotated[int, typer.Option("--prefill", min=0, help="Number of prefill workers.")]
Decode = Annotated[int, typer.Option("--decode", min=1, help="Number of decode workers.")]
ModeOption = Annotated[
    Mode,
    typer.Option(
        help="`disaggregated`: prefill and decode in separate workers. `aggregated`: decode workers do both. "
        "`auto`: short prompts go to decode workers whole."
    ),
]
StackStateDir = Annotated[
    Path,
    typer.Option("--state-dir", envvar="PDQ_STATE_DIR", help="Where logs, data and the addresses (file `env`) go."),
]
Autoscale = Annotated[
    bool,
    typer.Option(
        "--autoscale", help="Let the number of workers follow the load, within `PDQ_SCALING_*` (see `pdq settings`)."
    ),
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the bridge, 0 for a free one.")]


def up(
    port: Port = 8000,
    prefill: Prefill = 1,
    decode: Decode = 1,
    model: ModelOption = None,
    engine: EngineOption = "torch",
    mode: ModeOption = "disaggregated",
    autoscale: Autoscale = False,
    state_dir: StackStateDir = DEFAULT_STATE_DIR,
) -> None:
    """Start everything on this machine and stay up: servers, workers, bridge, reaper.

    Prints one line with `ready` and the base URL when requests can be served, and runs until Ctrl-C or SIGTERM; then
    streams are finished and nothing is left behind. With PDQ_NATS_URL and PDQ_REDIS_URL set, your servers are used and
    none are started. `pdq scale` changes the number of workers while it runs; with --autoscale they follow the load, from
    the numbers given here.
    """
    from pdq import runtime
    from pdq.cli.stack import Stack

    plan = make_plan(port, prefill, decode, model, engine, mode, state_dir, autoscale)

    async def run(lifecycle: runtime.Lifecycle) -> None:
        with Waiting() as waiting:
            stack = Stack(plan, waiting.progress)
            async with stack.running(lifecycle.stopped):
                await lifecycle.until(lifecycle.draining, stack.ready())
                if lifecycle.draining.is_set():
                    return
                waiting.done()
                print(f"pdq is ready: {stack.url}/v1  (model {plan.model.name}, Ctrl-C stops)", flush=True)
                print(curl(stack.url, plan.model.name, with_key=bool(load(os.environ).bridge.api_keys)), flush=True)
                await lifecycle.until(lifecycle.draining, stack.supervise())

    raise typer.Exit(runtime.run("up", run))


def make_plan(
    port: int,
    prefill: int,
    decode: int,
    model: str | None,
    engine: models.Engine,
    mode: Mode,
    state_dir: Path,
    autoscale: bool = False,
) -> Plan:
    """The plan for these options."""
    from pdq.adapters.processes import free_port

    if autoscale and (mode == "aggregated" or not prefill):
        # From its first workers a system learns what its model can take, and how fast.
        raise InvalidSettings(
            "--autoscale sizes two pools and starts with a worker in each: leave --mode aggregated and --prefill 0 out. "
            "Idle pools go to zero by themselves where PDQ_SCALING_PREFILL_MIN and PDQ_SCALING_DECODE_MIN are 0"
        )
    if prefill == 0 and mode == "disaggregated":
        raise InvalidSettings("--prefill 0 leaves nobody to prefill: add --mode aggregated, or a prefill worker")
    return Plan(
        state_dir=state_dir.resolve(),
        model=models.resolve(model, engine),
        engine=engine,
        mode=mode,
        prefill=prefill,
        decode=decode,
        port=port or free_port(),
        autoscale=autoscale,
    )


def curl(url: str, model: str, with_key: bool = False) -> str:
    """A command line that works when it is pasted; an API key is left to be put in."""
    key = "-H 'authorization: Bearer KEY' " if with_key else ""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "What is a queue?"}}]}}'
    return f"curl -N {url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'"


class Waiting:
    """Says on stderr what is being waited for, as soon as it takes longer than two seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._what = "starting"
        self._said = ""
        self._timer: asyncio.Task[None] | None = None

    def __enter__(self) -> "Waiting":
        self._timer = asyncio.ensure_future(self._remind())
        return self

    def __exit__(self, *exc: object) -> None:
        self.done()

    def progress(self, what: str) -> None:
        self._what = what

    def done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._said and sys.stderr.isatty():
                print(file=sys.stderr, flush=True)

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S)
            self._say()

    def _say(self) -> None:
        """On a terminal the seconds tick in place; in a log only news get a line."""
        line = f"[{time.monotonic() - self._started:4.0f} s] {self._what}"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif self._what != self._said:
            print(line, file=sys.stderr, flush=True)
        self._said = self._what
