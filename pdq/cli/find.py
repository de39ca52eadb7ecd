"""Finding a running system, and talking to it: where its servers are, one connection, one loop per command.

``pdq up`` writes its addresses to the file ``env`` in its state directory. A variable in the environment wins over that
file, so that the same commands work on an operator's own clusters, without any state directory.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Protocol, TypeVar

import typer

from pdq.core import names
from pdq.core.environment import load, variables_of
from pdq.core.errors import InvalidSettings, Unavailable
from pdq.core.settings import Settings
from pdq.ports import Board, HandoffLedger, JobQueue, TokenBus, WorkerRegistry

T = TypeVar("T")

ENV_FILE: Final = "env"
NEEDED: Final = (names.ENV_NATS_URL, names.ENV_REDIS_URL)
CONNECTIONS: Final = {needed: variables_of(needed.split("_")[1].lower()) for needed in NEEDED}
"""By URL: all variables that say how to reach that server and with which credentials."""
WRITTEN: Final = (*(name for group in CONNECTIONS.values() for name in group), names.ENV_BRIDGE_URL)

StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        envvar="PDQ_STATE_DIR",
        help="State directory of the `pdq up` to talk to. PDQ_NATS_URL and PDQ_REDIS_URL in the environment win over it.",
    ),
]
DEFAULT_STATE_DIR: Final = Path(".pdq")

OfModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="The model's name in requests. Not needed where only one is served."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class System(Protocol):
    """What commands ask of a running system."""

    @property
    def queue(self) -> JobQueue: ...
    @property
    def bus(self) -> TokenBus: ...
    @property
    def ledger(self) -> HandoffLedger: ...
    @property
    def registry(self) -> WorkerRegistry: ...
    @property
    def board(self) -> Board: ...


async def served_model(system: System, named: str | None) -> str:
    """The model that ``--model`` names; not given, the one that there is.

    Raises:
        InvalidSettings: there are several.
        Unavailable: there is none.
    """
    known = sorted({it.model for it in await system.registry.workers()} | set(await system.ledger.models()))
    if named is not None or len(known) == 1:
        return named or known[0]
    if known:
        raise InvalidSettings(f"several models are served, name one with --model: {', '.join(known)}")
    raise Unavailable("no model is served, and none ever was: start workers, or name the model with --model")


def environment(state_dir: Path) -> dict[str, str]:
    """This process's environment, completed from the ``env`` file of ``state_dir``.

    Raises:
        Unavailable: neither says where the servers are.
        InvalidSettings: the file is not one that ``pdq up`` wrote.
    """
    file = state_dir / ENV_FILE
    written = dict(_read(file))
    for url, group in CONNECTIONS.items():
        # The environment names a server: what the file knows of another one, passwords above all, is not for it.
        if os.environ.get(url) or os.environ.get(f"{url}_FILE"):
            written = {name: value for name, value in written.items() if name not in group}
    merged = {**written, **os.environ}
    if missing := [variable for variable in NEEDED if not (merged.get(variable) or merged.get(f"{variable}_FILE"))]:
        raise Unavailable(
            f"no running system found: there is no {file}, and the environment does not say {' and '.join(missing)}. "
            "Start one with `pdq up`, name its --state-dir, or set these variables to your own servers"
            if not file.exists()
            else f"{file} does not name {' and '.join(missing)}: start `pdq up` again"
        )
    return merged


def _read(file: Path) -> Mapping[str, str]:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"cannot read {file}: {error}") from error
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        variable, _, value = line.partition("=")
        if variable not in WRITTEN:
            raise InvalidSettings(f"{file}: {variable!r} is not one of {', '.join(WRITTEN)}")
        found[variable] = value
    return found


def talk(state_dir: Path, work: Callable[[System, Settings], Awaitable[T]]) -> T:
    """Run ``work`` on a connection to the system that ``state_dir`` or the environment names."""
    settings = load(environment(state_dir))

    async def connected() -> T:
        from pdq.connect import connect

        async with connect(settings, "cli") as system:
            return await work(system, settings)

    return asyncio.run(connected())
