"""The fault matrix: every part of a running pdq hurt at every step of a request's life, and nothing comes of it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.faults.matrix.cells import Cell, table
from tests.faults.matrix.plant import Plant
from tests.faults.matrix.run import Row, Texts, Trial, undisturbed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
TABLE = table()
_turns = count()


@dataclass
class Rig:
    """A plant on its own loop, and what was found so far."""

    runner: asyncio.Runner
    plant: Plant
    texts: Texts
    rows: list[Row]
    report: Path
    """The table, written anew after every cell."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("matrix")
    with asyncio.Runner() as runner:
        plant = Plant(directory, {})
        try:
            runner.run(plant.start())
            found = Rig(runner, plant, runner.run(undisturbed(plant)), [], directory / "matrix.md")
            yield found
        finally:
            runner.run(plant.close())
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    reporter.write_line("")
    for line in [*markdown(found.rows).splitlines(), f"written to {found.report}"]:
        reporter.write_line(line)


def markdown(rows: list[Row]) -> str:
    lines = ["| part | fault | step | requests ended | attempts | free after (s) | cell (s) | |", "|---" * 8 + "|"]
    for row in rows:
        cell = row.cell
        ends = ", ".join(f"{number} {how}" for how, number in sorted(row.ends.items()))
        verdict = "; ".join(row.wrong)[:120].replace("\n", " ").replace("|", "/") or "ok"
        seconds = f"{row.settled_s:.1f} | {row.seconds:.1f}"
        lines.append(f"| {cell.role} | {cell.fault} | {cell.step} | {ends} | {row.attempts} | {seconds} | {verdict} |")
    return "\n".join(lines) + "\n"


def test_the_table_has_every_part_and_every_fault() -> None:
    assert len(TABLE) >= 60
    assert len({cell.name for cell in TABLE}) == len(TABLE)
    assert {cell.role for cell in TABLE} == {"prefill", "decode", "bridge", "reaper", "nats", "valkey"}


@pytest.mark.parametrize("cell", TABLE, ids=lambda cell: cell.name)
def test_nothing_comes_of_a_fault(rig: Rig, cell: Cell) -> None:
    row = rig.runner.run(Trial(rig.plant, cell, rig.texts, next(_turns)).run())
    rig.rows.append(row)
    rig.report.write_text(markdown(rig.rows))
    assert not row.wrong, "\n".join([*row.wrong, rig.plant.logs()])
