"""The fault matrix: every part of a running pdq hurt at every step of a request's life, and nothing comes of it."""

from collections.abc import Callable

import pytest

from tests.faults.matrix.cells import FAULTS, Cell, table
from tests.faults.matrix.conftest import Rig
from tests.faults.matrix.report import ROW

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
TABLE = table()


def test_the_table_has_every_part_and_every_fault() -> None:
    assert len(TABLE) >= 60
    assert len({cell.name for cell in TABLE}) == len(TABLE)
    assert {cell.role for cell in TABLE} == {"prefill", "decode", "bridge", "reaper", "nats", "valkey"}
    assert {cell.fault for cell in TABLE} == set(FAULTS)


@pytest.mark.parametrize("cell", TABLE, ids=lambda cell: cell.name)
def test_nothing_comes_of_a_fault(
    rigs: Callable[[str], Rig], cell: Cell, record_property: Callable[[str, object], None]
) -> None:
    rig = rigs(cell.plant)
    row = rig.try_cell(cell)
    record_property(ROW, str(row))
    assert not row.wrong, "\n".join([*row.wrong, rig.plant.logs()])
    if cell.plant == "tier" and cell.role == "prefill":
        assert row.attempts_of_hurt == 1, "the tier has its KV: it is not computed twice"
