"""How long a worker has computed."""

from pdq.stages.busy import Busy


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_with_at_least_one_prompt_counts_once_and_time_with_none_does_not() -> None:
    clock = Clock()
    busy = Busy(clock)
    clock.now_s += 5
    with busy.computing():
        clock.now_s += 1
        with busy.computing():
            clock.now_s += 2
        clock.now_s += 4
    assert busy.seconds == 7
    clock.now_s += 10
    assert busy.seconds == 7
    first, second = busy.computing(), busy.computing()
    first.__enter__()
    clock.now_s += 1
    second.__enter__()
    clock.now_s += 1
    first.__exit__(None, None, None)
    clock.now_s += 1
    second.__exit__(None, None, None)
    assert busy.seconds == 10
    assert busy.mean_s == 10 / 4


def test_what_is_computed_now_counts_until_now() -> None:
    clock = Clock()
    busy = Busy(clock)
    with busy.computing():
        clock.now_s += 3
        assert busy.seconds == 3


def test_a_computation_that_fails_has_taken_its_time() -> None:
    clock = Clock()
    busy = Busy(clock)
    try:
        with busy.computing():
            clock.now_s += 2
            raise ValueError
    except ValueError:
        clock.now_s += 1
    assert busy.seconds == 2
