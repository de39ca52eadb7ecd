"""Shell completion of what only a running system knows. Silent and quick: a system that is away completes nothing."""

import asyncio
from pathlib import Path
from typing import Final

import typer

from pdq.cli.find import DEFAULT_STATE_DIR, environment
from pdq.core.environment import load
from pdq.core.errors import PdqError
from pdq.core.settings import Settings
from pdq.ports import Pool

PATIENCE_S: Final = 1.0

Completion = list[tuple[str, str]]
"""(word, what it is)."""


def drainable(context: typer.Context, incomplete: str) -> Completion:
    """Pools and live workers."""
    return _starting(incomplete, context, away=False)


def undrainable(context: typer.Context, incomplete: str) -> Completion:
    """These, and workers that were sent away."""
    return _starting(incomplete, context, away=True)


def restartable(incomplete: str) -> Completion:
    every = [*_POOLS, ("all", "both pools")]
    return [it for it in every if it[0].startswith(incomplete)]


_POOLS: Final[Completion] = [(pool.value, f"all {pool} workers") for pool in Pool]


def _starting(incomplete: str, context: typer.Context, away: bool) -> Completion:
    import pdq.connect  # noqa: F401  (before the clock runs: it takes a while on a busy machine, and asks nobody)

    found = list(_POOLS)
    try:
        settings = load(environment(Path(context.params.get("state_dir") or DEFAULT_STATE_DIR)))
        found += asyncio.run(asyncio.wait_for(_workers(settings, away), PATIENCE_S))
    except (PdqError, TimeoutError):
        pass  # the shell is no place to learn of it
    return [it for it in found if it[0].startswith(incomplete)]


async def _workers(settings: Settings, away: bool) -> Completion:
    from pdq.connect import directory

    async with directory(settings) as (registry, board):
        live = sorted(await registry.workers(), key=lambda info: info.worker)
        found = {info.worker: f"{info.pool}, {info.state}" for info in live}
        for model in sorted({info.model for info in live}) if away else ():
            found |= {worker: "sent away" for worker in sorted(await board.away(model)) if worker not in found}
    return list(found.items())
