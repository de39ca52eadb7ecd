import statistics

from hypothesis import given
from hypothesis import strategies as st

from pdq.core.draw import uniform

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**32)


@given(SEEDS, POSITIONS)
def test_numbers_lie_between_zero_and_one_and_repeat(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


@given(SEEDS, POSITIONS, POSITIONS)
def test_positions_and_seeds_give_numbers_of_their_own(seed: int, one: int, other: int) -> None:
    assert (uniform(seed, one) == uniform(seed, other)) == (one == other)


def test_numbers_are_spread_evenly() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert abs(statistics.mean(numbers) - 0.5) < 0.01
    assert abs(statistics.variance(numbers) - 1 / 12) < 0.002


def test_numbers_never_change_between_versions() -> None:
    assert uniform(0, 0) == 0.8150393007738989
    assert uniform(-1, 7) == 0.9908527907682421
