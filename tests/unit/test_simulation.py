"""The fleet simulation: its arithmetic against plain reckoning, its books, and the policies in a closed loop."""

import json
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from pdq.cli.app import app
from pdq.core.errors import InvalidRequest
from pdq.core.handoff import LIVE
from pdq.core.scaling import Observation
from pdq.core.settings import AdmissionSettings, ScalingSettings
from pdq.simulate.compare import Terms, compare
from pdq.simulate.fleet import Fleet, Scaler, hours
from pdq.simulate.profile import PROFILES
from pdq.simulate.scalers import Coupled, Fixed, Independent
from pdq.simulate.traces import Arrival, copies, read, swing
from pdq.simulate.workers import DecodeWorker, Request

DATA = Path(__file__).parents[1] / "data"
SAMPLES = sorted(DATA.glob("*.csv")) + sorted(DATA.glob("*.jsonl"))
ONE = PROFILES["opt-13b-1gpu"]
FOUR = PROFILES["opt-13b-4gpu"]
ADMISSION = AdmissionSettings()
SCALING = ScalingSettings(prefill_max=20, decode_max=20)


def fleet(scaler: Scaler, start: tuple[int, int] = (1, 1), admission: AdmissionSettings = ADMISSION) -> Fleet:
    return Fleet(ONE, admission, scaler, start=start, startup_s=30.0, period_s=5.0, max_running=256, timeout_s=600.0)


def steady(requests_per_s: float, seconds: float, seed: int = 1) -> list[Arrival]:
    """Poisson arrivals of 1,000 prompt tokens and 100 output tokens."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    while at_s < seconds:
        arrivals.append(Arrival(at_s, 1_000, 100))
        at_s += draw.expovariate(requests_per_s)
    return arrivals


def stepwise(worker: DecodeWorker, steps: int) -> float:
    """The same time, one step after the other."""
    a, b, c = worker.profile.decode_small
    return sum(a + b * (worker.context + worker.running * step) + c * worker.running for step in range(steps)) / 1_000


def test_many_steps_at_once_take_as_long_as_one_by_one() -> None:
    worker = DecodeWorker(ONE, 0.0, 0.0, running=17, context=20_000)
    for steps in (1, 2, 50, 1_000):
        assert worker.elapsed_s(steps) == pytest.approx(stepwise(worker, steps))
        assert worker.steps_until(worker.elapsed_s(steps)) == steps
        assert worker.steps_until(worker.elapsed_s(steps) + 0.001) == steps + 1


def test_a_request_alone_takes_prefill_transfer_and_its_steps() -> None:
    [request] = fleet(Fixed(1, 1)).run([Arrival(0.0, 1_000, 11)])
    worker = DecodeWorker(ONE, 0.0, 0.0, running=1, context=1_001)
    assert request.ttft_s == pytest.approx(ONE.prefill_s(1_000))
    assert request.itl_s * 10 == pytest.approx(ONE.transfer_s(1_000) + stepwise(worker, 10))


def test_a_request_of_one_token_needs_no_decode_worker() -> None:
    [request] = fleet(Fixed(1, 1)).run([Arrival(0.0, 1_000, 1)])
    assert request.itl_s == 0.0
    assert request.last_s == request.first_s


def test_one_that_lands_during_a_step_joins_at_its_end() -> None:
    first, second = fleet(Fixed(2, 1)).run([Arrival(0.0, 100, 400), Arrival(0.105, 100, 400)])
    assert first.last_s is not None
    assert second.last_s is not None
    assert first.last_s < second.last_s < first.last_s + 0.2


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_request_of_a_sample_is_served_or_refused_and_the_books_are_empty_after(path: Path) -> None:
    arrivals = read(path)
    ran = Fleet(
        FOUR, ADMISSION, Coupled(SCALING), start=(2, 2), startup_s=30.0, period_s=5.0, max_running=256, timeout_s=600.0
    )
    requests = ran.run(arrivals)
    assert len(requests) == len(arrivals) >= 300
    assert all((it.last_s is None) == bool(it.refused) for it in requests)
    after = ran._books.load()
    for counters in (after.requests, after.prompt_tokens, after.reserved_tokens):
        assert counters == dict.fromkeys(LIVE, 0)
    assert after.accepted == after.ended
    for decode in ran.decode_workers:
        assert (decode.running, decode.reserved, decode.context) == (0, 0, 0)
    assert all(it.held == it.held_tokens == 0 for it in ran.prefill_workers)


def test_the_same_trace_gives_the_same_result() -> None:
    def results() -> list[tuple[float, float]]:
        return [(it.ttft_s, it.itl_s) for it in fleet(Coupled(SCALING)).run(steady(5, 200))]

    assert results() == results()


def test_constant_load_gives_constant_pools_after_the_first_minutes() -> None:
    ran = fleet(Coupled(SCALING))
    ran.run([Arrival(at / 8, 1_000, 100) for at in range(8 * 1_200)])
    assert len({(prefill, decode) for at_s, prefill, decode in ran.sizes if at_s > 600}) == 1


class _Script:
    """Sizes by the clock."""

    def __init__(self, *plan: tuple[float, int, int]) -> None:
        self._plan = plan

    def sizes(self, seen: Observation, now_s: float) -> tuple[int, int]:
        return next((prefill, decode) for from_s, prefill, decode in reversed(self._plan) if now_s >= from_s)


def test_a_worker_that_leaves_finishes_what_it_has_and_is_paid_until_then() -> None:
    ran = fleet(_Script((0, 2, 2), (100, 1, 1)), start=(2, 2))
    requests = ran.run(steady(4.0, 300))
    assert all(it.last_s is not None for it in requests)
    gone = [it for it in ran.decode_workers if it.gone_s is not None]
    assert len(gone) == 1
    assert gone[0].gone_s is not None
    assert gone[0].gone_s > 100
    assert hours(ran.decode_workers, 300) * 3_600 == pytest.approx(300 + gone[0].gone_s)


def test_a_new_worker_is_paid_from_its_order_and_works_after_its_start() -> None:
    ran = fleet(_Script((0, 1, 1), (100, 2, 1)))
    ran.run(steady(4.0, 300))
    assert hours(ran.prefill_workers, 300) * 3_600 == pytest.approx(500)
    assert ran.prefill_workers[1].ready_s == 130
    assert ran.prefill_workers[1].tokens > 0


def test_no_prefill_worker_holds_more_handoffs_than_its_window() -> None:
    admission = replace(ADMISSION, handoffs_per_prefill_worker=3)
    most = 0

    class Watching(Fixed):
        def sizes(self, seen: Observation, now_s: float) -> tuple[int, int]:
            nonlocal most
            most = max(most, *(it.held for it in ran.prefill_workers))
            return super().sizes(seen, now_s)

    ran = fleet(Watching(2, 1), (2, 1), admission)
    ran.run([Arrival(at / 4, 1_000, 2_000) for at in range(400)])
    assert most == 3


def test_more_than_can_ever_be_held_is_refused_and_what_was_accepted_finishes() -> None:
    requests = fleet(Fixed(1, 1)).run([Arrival(at / 20, 1_000, 200) for at in range(4_000)])
    refused = [it for it in requests if it.refused]
    assert len(refused) > 1_000
    assert all(it.last_s is not None for it in requests if not it.refused)


def test_the_coupled_policy_serves_a_rising_load_that_fixed_pools_do_not() -> None:
    rising = sorted(
        it._replace(at_s=200 * step + it.at_s) for step in range(4) for it in steady(3.0 + 4 * step, 200, step)
    )
    coupled, fixed, _ = compare(rising, ONE, ADMISSION, SCALING, Terms(warmup_s=60.0))
    assert coupled.both_share > fixed.both_share
    assert coupled.worker_hours < 1.2 * fixed.worker_hours


def test_queue_length_controllers_keep_to_the_same_bounds_and_steps() -> None:
    ran = fleet(Independent(SCALING, 1.0, 32.0))
    ran.run(steady(10.0, 400))
    sizes = [prefill for _, prefill, _ in ran.sizes]
    assert all(math.ceil(a / 2) <= b <= 2 * a for a, b in pairwise(sizes))
    assert 1 <= min(sizes) <= max(sizes) <= 20


def test_copies_keep_the_shape_and_multiply_the_load() -> None:
    once = read(SAMPLES[0])
    more = copies(once, 3)
    assert len(more) == 3 * len(once)
    assert sum(it.prompt_tokens for it in more) == 3 * sum(it.prompt_tokens for it in once)
    assert more[-1].at_s <= once[-1].at_s + 60


def test_a_swing_thins_out_the_ends_and_keeps_the_middle() -> None:
    thinned = swing([Arrival(float(at), 1, 1) for at in range(1_000)], 0.1)
    parts = [sum(start <= it.at_s < start + 100 for it in thinned) for start in (0, 450, 900)]
    assert parts[0] < 20 < 90 < parts[1] <= 100
    assert parts[2] < 20


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", '{"x": 1}\n'])
def test_a_file_that_is_no_trace_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=str(path)):
        read(path)


def test_the_reserved_output_is_never_less_than_what_comes() -> None:
    assert [Arrival(0.0, 1, output).max_new_tokens for output in (1, 64, 65, 1_000)] == [64, 64, 128, 1_024]


def test_the_command_prints_a_table_and_the_same_as_json() -> None:
    arguments: Sequence[str] = ["simulate", "--trace", str(SAMPLES[0]), "--warmup-s", "0"]
    table = CliRunner().invoke(app, [*arguments])
    assert table.exit_code == 0, table.output
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert report["outcomes"][0]["policy"] == "coupled"
    assert all(it["policy"] in table.output for it in report["outcomes"])
    assert {it["requests"] for it in report["outcomes"]} == {len(read(SAMPLES[0]))}


def test_a_request_that_was_refused_met_no_limit() -> None:
    request = Request(Arrival(0.0, 10, 10), 74, refused="deadline")
    assert request.ttft_s == request.itl_s == math.inf
