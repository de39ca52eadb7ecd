"""The plants that the matrix works on, one at a time, and the table that is printed at the end."""

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
    rows: list[Row]
    report: Path
    """The table, written anew after every cell."""
    _turns: "count[int]" = field(default_factory=count)

    def try_cell(self, cell: Cell) -> Row:
        row = self.runner.run(Trial(self.plant, cell, self.texts, next(self._turns)).run())
        self.rows.append(row)
        self.report.write_text(markdown(self.rows))
        return row


@pytest.fixture(scope="session")
def rigs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Rig]]:
    """The rig of a kind of plant; the one before it is stopped when another kind is asked for."""
    report = tmp_path_factory.mktemp("matrix") / "matrix.md"
    running: dict[str, Rig] = {}
    rows: list[Row] = []
    with ExitStack() as stack:

        def rig(kind: str) -> Rig:
            if kind not in running:
                stack.close()
                running.clear()
                directory = tmp_path_factory.mktemp(kind)
                running[kind] = stack.enter_context(_running(directory, kind, rows, report))
            return running[kind]

        yield rig
    if rows:
        reporter = request.config.pluginmanager.getplugin("terminalreporter")
        for line in ["", *markdown(rows).splitlines(), f"written to {report}"]:
            reporter.write_line(line)


@contextmanager
def _running(directory: Path, kind: str, rows: list[Row], report: Path) -> Iterator[Rig]:
    plant = Plant(directory, PLANTS[kind])
    with asyncio.Runner() as runner:
        try:
            runner.run(plant.start())
            yield Rig(runner, plant, runner.run(undisturbed(plant)), rows, report)
        finally:
            runner.run(plant.close())


def markdown(rows: list[Row]) -> str:
    lines = ["| part | fault | step | requests ended | attempts | free after (s) | cell (s) | |", "|---" * 8 + "|"]
    for row in rows:
        cell = row.cell
        ends = ", ".join(f"{number} {how}" for how, number in sorted(row.ends.items()))
        verdict = "; ".join(row.wrong)[:120].replace("\n", " ").replace("|", "/") or "ok"
        seconds = f"{row.settled_s:.1f} | {row.seconds:.1f}"
        step = cell.step if cell.plant == "direct" else f"{cell.step} ({cell.plant})"
        lines.append(f"| {cell.role} | {cell.fault} | {step} | {ends} | {row.attempts} | {seconds} | {verdict} |")
    return "\n".join(lines) + "\n"
