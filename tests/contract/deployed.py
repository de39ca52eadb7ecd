"""What the files in deploy/ are held against: the settings that programs know, the commands that exist."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer.main
from msgspec.structs import fields

from pdq.cli.app import app
from pdq.core.environment import PLACES, variables_of
from pdq.core.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SETTINGS = {variable for group in fields(Settings) for variable in variables_of(group.name)} | set(PLACES)


def unknown_settings(found: Iterable[str]) -> list[str]:
    """Those of the ``PDQ_`` variables that no program knows."""
    return [name for name in found if name.startswith("PDQ_") and name not in SETTINGS]


def parse(arguments: Sequence[str]) -> str:
    """The ``pdq`` command that these arguments call; fails as ``pdq`` would if they are wrong."""
    command, *rest = arguments
    COMMANDS[command].make_context(command, list(rest))
    return command
