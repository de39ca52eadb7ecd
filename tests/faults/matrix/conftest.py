"""The plants that the matrix works on, one at a time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.faults.matrix.cells import PLANTS, Cell
from tests.faults.matrix.plant import Plant
from tests.faults.matrix.run import Row, Texts, Trial, undisturbed


@dataclass
class Rig:
    """A plant on its own loop."""

    runner: asyncio.Runner
    plant: Plant
    texts: Texts
    _turns: "count[int]" = field(default_factory=count)

    def try_cell(self, cell: Cell) -> Row:
        return self.runner.run(Trial(self.plant, cell, self.texts, next(self._turns)).run())


@pytest.fixture(scope="session")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Rig]]:
    """The rig of a kind of plant; the one before it is stopped when another kind is asked for."""
    running: dict[str, Rig] = {}
    with ExitStack() as stack:

        def rig(kind: str) -> Rig:
            if kind not in running:
                stack.close()
                running.clear()
                directory = tmp_path_factory.mktemp(kind)
                running[kind] = stack.enter_context(_running(directory, kind))
            return running[kind]

        yield rig


@contextmanager
def _running(directory: Path, kind: str) -> Iterator[Rig]:
    plant = Plant(directory, PLANTS[kind])
    with asyncio.Runner() as runner:
        try:
            runner.run(plant.start())
            yield Rig(runner, plant, runner.run(undisturbed(plant)))
        finally:
            runner.run(plant.close())
