"""The rates that follow from readings of the counters, and of what each prefill worker has computed."""

import pytest
from msgspec.structs import replace

from pdq.core.handoff import State
from pdq.core.load import Count, Load, Meter, Rates, Tally, measure
from tests.unit.loads import load


def _reading(accepted: int, ended: int) -> Load:
    return replace(
        load(), accepted=Count(accepted, accepted * 100, accepted * 150), ended=Count(ended, ended * 100, ended * 150)
    )


def test_rates_are_those_of_a_steady_load() -> None:
    meter = Meter()
    for second in range(0, 300, 5):
        workers = {"p1": Tally(second * 200, second * 0.25), "p2": Tally(second * 200, second * 0.25)}
        meter = measure(meter, _reading(second * 4, second * 3), workers, float(second))
    assert meter.rates.prefill_tokens_per_s == pytest.approx(800)
    assert meter.rates.arrived_tokens_per_s == pytest.approx(400)
    assert meter.rates.ended_requests_per_s == pytest.approx(3)
    assert meter.rates.freed_tokens_per_s == pytest.approx(450)


def test_speed_is_remembered_when_nobody_computes_and_arrivals_are_not() -> None:
    meter = measure(Meter(), _reading(0, 0), {"p1": Tally(0, 0.0)}, 0.0)
    meter = measure(meter, _reading(10, 0), {"p1": Tally(1_000, 2.0)}, 5.0)
    for second in range(10, 900, 5):
        meter = measure(meter, _reading(10, 10), {"p1": Tally(1_000, 2.0)}, float(second))
    assert meter.rates.prefill_tokens_per_s == pytest.approx(500)
    assert meter.rates.arrived_tokens_per_s == pytest.approx(0, abs=0.01)


def test_a_long_piece_of_work_is_no_slow_one_while_it_lasts() -> None:
    """The time of a chunk passes before its tokens are counted."""
    still = load()
    meter = measure(Meter(), still, {"a": Tally(0, 0.0)}, 0.0)
    meter = measure(meter, still, {"a": Tally(1_000, 1.0)}, 1.0)
    for now_s in range(2, 6):
        meter = measure(meter, still, {"a": Tally(1_000, float(now_s))}, float(now_s))
        assert meter.rates.prefill_tokens_per_s == pytest.approx(1_000)
    meter = measure(meter, still, {"a": Tally(6_000, 6.0)}, 6.0)
    assert meter.rates.prefill_tokens_per_s == pytest.approx(1_000)


def test_a_worker_that_counts_from_zero_again_is_not_a_negative_speed() -> None:
    meter = measure(Meter(), _reading(0, 0), {"p1": Tally(9_000, 9.0)}, 0.0)
    meter = measure(meter, _reading(0, 0), {"p1": Tally(10, 0.1)}, 5.0)
    assert meter.rates.prefill_tokens_per_s is None
    meter = measure(meter, _reading(0, 0), {"p1": Tally(2_010, 2.1)}, 10.0)
    assert meter.rates.prefill_tokens_per_s == pytest.approx(1_000)


def test_what_decode_takes_over_is_measured_only_while_prompts_wait() -> None:
    """Two workers that compute 1,000 tokens a second each, and stand still half of the time."""
    meter = Meter()
    for second in range(5):
        here = Count(100 - 10 * second, 10_000 - 1_000 * second)
        seen = replace(load({"interactive": {"": here}}), accepted=Count(500, 50_000))
        workers = {name: Tally(500 * second, 0.5 * second) for name in ("p1", "p2")}
        meter = measure(meter, seen, workers, float(second))
    assert meter.rates.prefill_tokens_per_s == pytest.approx(1_000)
    assert meter.rates.drained_tokens_per_s == pytest.approx(500)
    idle = replace(load(), accepted=Count(500, 50_000))
    for second in range(5, 20):
        meter = measure(meter, idle, {}, float(second))
    assert meter.rates.drained_tokens_per_s == pytest.approx(500)


def test_the_time_from_a_computed_prompt_to_the_end_follows_from_how_many_are_there() -> None:
    meter = Meter()
    for second in range(60):
        seen = replace(_reading(2 * second, 2 * second), requests={State.READY: 2, State.FETCHED: 4})
        meter = measure(meter, seen, {}, float(second))
    assert meter.rates.rest_s == pytest.approx(3.0)
    assert meter.rates.rest_s_per_token == pytest.approx(3.0 / 50)


def test_a_long_time_between_two_readings_is_not_taken_for_a_long_request() -> None:
    one = replace(_reading(1, 0), requests={State.FETCHED: 1})
    meter = measure(Meter(), one, {}, 0.0)
    meter = measure(meter, _reading(1, 1), {}, 0.2)
    assert meter.rates.rest_s == pytest.approx(0.1)
    meter = measure(meter, replace(_reading(2, 1), requests={State.FETCHED: 1}), {}, 300.0)
    meter = measure(meter, _reading(2, 2), {}, 600.0)
    assert meter.rates.rest_s == pytest.approx(0.1)


def test_what_held_requests_up_is_soon_forgotten_once_nobody_is_left_of_them() -> None:
    meter = Meter()
    for second in range(30):
        meter = measure(meter, replace(_reading(100, 0), requests={State.READY: 100}), {}, float(second))
    meter = measure(meter, _reading(100, 100), {}, 30.0)
    assert meter.rates.rest_s is not None
    assert meter.rates.rest_s > 20
    for number in range(1, 4):
        began_s = 30.0 + number
        during = replace(_reading(100 + number, 99 + number), requests={State.FETCHED: 1})
        meter = measure(meter, during, {}, began_s)
        meter = measure(meter, _reading(100 + number, 100 + number), {}, began_s + 0.1)
    assert meter.rates.rest_s is not None
    assert meter.rates.rest_s < 4


def test_nothing_is_known_after_one_reading() -> None:
    assert measure(Meter(), _reading(5, 5), {}, 0.0).rates == Rates()
