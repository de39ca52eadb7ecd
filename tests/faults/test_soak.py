"""A short soak; `make soak` runs the long one."""

from pathlib import Path

import pytest

from tests.faults.soak import soak


@pytest.mark.faults
@pytest.mark.timeout(400)
async def test_a_minute_of_load_and_deaths_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    summary = await soak(tmp_path, seconds=60, seed=7)
    print(summary.table())
    assert not summary.wrong
    assert sum(summary.faults.values()) >= 5
    assert summary.ends["done"] >= 50
