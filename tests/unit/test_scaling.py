"""The scaling policy: single decisions from a table, and closed loops on a simulated clock."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdq.core.handoff import LIVE, State
from pdq.core.load import Load, Rates
from pdq.core.pacing import Cause
from pdq.core.scaling import Decision, Memory, Observation, PoolSeen, decide
from pdq.core.settings import ScalingSettings
from tests.unit.plant import Plant

LIMITS = ScalingSettings(
    period_s=5.0,
    prefill_min=1,
    prefill_max=12,
    decode_min=1,
    decode_max=12,
    prefill_wait_target_s=2.0,
    prefill_wait_activation_s=4.0,
    prefill_utilization_target=0.65,
    prefill_utilization_activation=0.85,
    decode_sequences_target=30,
    decode_sequences_activation=40,
    decode_kv_target=0.7,
    decode_kv_activation=0.9,
    handoffs_activation=4,
    step_factor=2.0,
    out_window_s=5.0,
    in_window_s=120.0,
    out_cooldown_s=10.0,
    in_cooldown_s=60.0,
    idle_s=300.0,
    startup_s=20.0,
    ready_within_s=120.0,
)
TO_ZERO = replace(LIMITS, prefill_min=0, decode_min=0)


def seen(
    requests: dict[State, int] | None = None,
    *,
    prefill: int = 4,
    decode: int = 4,
    arriving: float = 2_600.0,
    prompt: int = 500,
    output: int = 500,
) -> Observation:
    counts = requests or {}
    load = Load(
        requests=counts,
        prompt_tokens={state: n * prompt for state, n in counts.items()},
        reserved_tokens={state: n * (prompt + output) for state, n in counts.items()},
    )
    rates = Rates(prefill_tokens_per_s=1_000.0, arrived_tokens_per_s=arriving, ended_requests_per_s=8.0)
    return Observation(load, rates, PoolSeen(prefill, prefill), PoolSeen(decode, decode, decode * 100_000))


def settled(observation: Observation, limits: ScalingSettings = LIMITS, seconds: float = 200.0) -> Decision:
    """The first decision that changes something while this is seen again and again; else the last one."""
    memory = Memory()
    for tick in range(int(seconds / limits.period_s)):
        decision = decide(observation, limits, memory, tick * limits.period_s)
        memory = decision.memory
        if {decision.prefill.cause, decision.decode.cause} & {Cause.OUT, Cause.IN}:
            break
    return decision


STEADY = {State.FETCHED: 110}
TABLE = [
    ("all within the targets", seen(STEADY), (4, Cause.STEADY), (4, Cause.STEADY)),
    ("between target and activation", seen({State.FETCHED: 150}, arriving=3_300), (4, Cause.STEADY), (4, Cause.STEADY)),
    ("prompts arrive faster", seen(STEADY, arriving=3_600), (6, Cause.OUT), (4, Cause.STEADY)),
    (
        "a queue that will last",
        seen({State.QUEUED: 200} | STEADY, arriving=3_300),
        (8, Cause.OUT),
        (4, Cause.STEADY),
    ),
    (
        "a queue that will be gone before a new worker helps",
        seen({State.QUEUED: 40} | STEADY),
        (4, Cause.STEADY),
        (4, Cause.STEADY),
    ),
    ("more sequences", seen({State.FETCHED: 165}), (4, Cause.STEADY), (6, Cause.OUT)),
    ("longer sequences", seen({State.FETCHED: 80}, output=4_500), (4, Cause.STEADY), (6, Cause.OUT)),
    (
        "handoffs pile up, and prompts behind them",
        seen({State.QUEUED: 400, State.READY: 40, State.FETCHED: 60}, arriving=4_500),
        (4, Cause.HANDOFFS),
        (6, Cause.OUT),
    ),
    ("less arrives", seen(STEADY, arriving=1_200), (2, Cause.IN), (4, Cause.STEADY)),
    ("fewer sequences", seen({State.FETCHED: 50}), (4, Cause.STEADY), (2, Cause.IN)),
    ("three would be at the target exactly", seen({State.FETCHED: 90}), (4, Cause.STEADY), (3, Cause.IN)),
    ("three would be just over the target", seen({State.FETCHED: 91}), (4, Cause.STEADY), (4, Cause.STEADY)),
    (
        "decode idles while prompts queue that will need it",
        seen({State.QUEUED: 100, State.FETCHED: 5}, prefill=3, arriving=1_950, prompt=200),
        (3, Cause.STEADY),
        (4, Cause.STEADY),
    ),
    ("at most a factor per step", seen({State.FETCHED: 2_000}), (4, Cause.STEADY), (8, Cause.OUT)),
    ("shrinking, too", seen({State.FETCHED: 1}), (4, Cause.STEADY), (2, Cause.IN)),
    ("never below the minimum", seen({State.FETCHED: 1}, decode=1), (4, Cause.STEADY), (1, Cause.STEADY)),
    ("never above the maximum", seen({State.FETCHED: 2_000}, decode=12), (4, Cause.STEADY), (12, Cause.LIMIT)),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case[0])
def test_what_is_seen_long_enough_leads_to_this(
    case: tuple[str, Observation, tuple[int, Cause], tuple[int, Cause]],
) -> None:
    _, observation, prefill, decode = case
    decision = settled(observation)
    assert (decision.prefill.replicas, decision.prefill.cause) == prefill, decision.prefill.why
    assert (decision.decode.replicas, decision.decode.cause) == decode, decision.decode.why


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case[0])
def test_every_decision_carries_its_inputs_and_its_reason_in_words(
    case: tuple[str, Observation, tuple[int, Cause], tuple[int, Cause]],
) -> None:
    decision = settled(case[1])
    assert {"replicas", "ready", "waiting_tokens", "arriving_tokens_per_s"} <= set(decision.prefill.inputs)
    assert {"replicas", "ready", "sequences", "handoffs_waiting"} <= set(decision.decode.inputs)
    assert decision.prefill.why
    assert decision.decode.why


def test_a_memory_survives_being_written_down() -> None:
    memory = settled(seen({State.FETCHED: 2_000})).memory
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory


# --- Closed loops -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests_per_s", [1.0, 3.2, 5.0, 7.3, 10.0])
def test_constant_load_does_not_move_the_pools_for_ten_minutes(requests_per_s: float) -> None:
    plant = Plant(LIMITS, prefill=2, decode=2, offered=lambda _: requests_per_s).run(600)
    plant.run(600)
    assert len(set(plant.sizes(since_s=600))) == 1
    assert plant.wait_s < 1


def test_constant_load_at_80_percent_does_not_move_a_fleet_that_was_sized_by_hand() -> None:
    plant = Plant(LIMITS, prefill=5, decode=3, offered=lambda _: 8.0).run(600)
    assert set(plant.sizes()) == {(5, 3)}


def test_a_step_in_load_is_followed_and_then_stands_still() -> None:
    plant = Plant(LIMITS, prefill=4, decode=2, offered=lambda now: 4.0 if now < 300 else 8.0).run(900)
    assert set(plant.sizes()[:60]) == {(4, 2)}
    assert plant.wait_s < 1
    assert len(set(plant.sizes(since_s=700))) == 1
    assert (5, 2) <= plant.size <= (7, 3)  # 4,000 tokens/s, 80 sequences
    assert max(size for size, _ in plant.sizes() if size) <= 9  # 7 are the target


def test_a_spike_that_the_queue_absorbs_moves_nothing() -> None:
    plant = Plant(LIMITS, prefill=4, decode=2, offered=lambda now: 14.0 if 300 <= now < 302 else 4.0).run(800)
    assert set(plant.sizes()) == {(4, 2)}


def test_after_a_long_spike_the_pools_come_back_in_steps() -> None:
    plant = Plant(LIMITS, offered=lambda now: 10.0 if 200 <= now < 320 else 1.0).run(1_500)
    sizes = [prefill for prefill, _ in plant.sizes() if prefill is not None]
    assert max(sizes) > 4
    assert plant.size == (1, 1)
    assert all(a / 2 <= b <= a * 2 for a, b in pairwise(sizes))


def test_a_slow_ramp_is_followed_without_a_step_back() -> None:
    plant = Plant(LIMITS, offered=lambda now: 1.0 + now / 200).run(1_800)
    sizes = plant.sizes()
    assert sizes == sorted(sizes, key=lambda size: (size[0] or 0, size[1] or 0))
    assert plant.size[0] is not None
    assert plant.size[0] >= 6
    assert plant.wait_s < 2


def test_a_wave_is_followed_with_one_move_up_and_one_down_at_most_per_step() -> None:
    period_s = 1_200
    plant = Plant(LIMITS, prefill=3, offered=lambda now: 5 + 4 * math.sin(2 * math.pi * now / period_s)).run(3_600)
    sizes = [size for size, _ in plant.sizes(since_s=1_200)]
    turns = [b for a, b, c in zip(sizes, sizes[1:], sizes[2:], strict=False) if (b - a) * (c - b) < 0]  # type: ignore[operator]
    assert not turns  # never up and down again between two decisions
    changes = [(a, b) for a, b in pairwise(sizes) if a != b]
    assert len(changes) <= 20  # two waves, each 1 to 9 requests per second and back
    assert plant.wait_s < 1


def test_long_prompts_grow_prefill_and_not_decode() -> None:
    plant = Plant(LIMITS, prompt_tokens=4_000, output_tokens=10, decode_s=1.0, offered=lambda _: 1.5).run(900)
    assert plant.size[0] is not None
    assert plant.size[0] >= 7
    assert plant.size[1] == 1


def test_long_outputs_grow_decode_and_not_prefill() -> None:
    plant = Plant(LIMITS, prompt_tokens=50, output_tokens=2_000, decode_s=100.0, offered=lambda _: 2.0).run(900)
    assert plant.size[0] == 1
    assert plant.size[1] is not None
    assert plant.size[1] >= 5


def test_while_handoffs_pile_up_decode_grows_and_prefill_does_not() -> None:
    plant = Plant(LIMITS, prefill=3, prompt_tokens=200, decode_s=40.0, offered=lambda _: 8.0)
    plant.run(30)
    assert plant.ready > 4
    assert plant.queued > 50
    plant.run(600)
    assert {prefill for prefill, _ in plant.sizes()} == {3}
    assert plant.size[1] is not None
    assert plant.size[1] >= 8
    assert plant.ready < 1
    assert plant.wait_s < 1


def test_prefill_does_not_grow_for_a_queue_that_stands_because_decode_has_reached_its_maximum() -> None:
    limits = replace(LIMITS, decode_max=2)
    plant = Plant(limits, prefill=3, decode=2, prompt_tokens=200, decode_s=40.0, offered=lambda _: 8.0).run(600)
    assert plant.queued > 1_000
    assert set(plant.sizes()) == {(3, 2)}
    assert (Cause.HANDOFFS, Cause.LIMIT) in plant.causes()


def test_decode_starts_with_prefill_when_a_queue_will_come_through() -> None:
    plant = Plant(LIMITS, offered=lambda now: 1.0 if now < 300 else 8.0).run(500)
    prefill_out = next(at for at, it in plant.decisions if it.prefill.cause is Cause.OUT)
    decode_out = next(at for at, it in plant.decisions if it.decode.cause is Cause.OUT)
    assert decode_out <= prefill_out + 15


def test_idle_pools_go_to_zero_together_and_come_back_together() -> None:
    plant = Plant(TO_ZERO, prefill=2, decode=2, offered=lambda now: 2.0 if now < 100 or now >= 1_000 else 0.0)
    plant.run(1_000)
    assert plant.size == (0, 0)
    assert all((prefill == 0) == (decode == 0) for prefill, decode in plant.sizes())
    plant.run(600)
    prefill, decode = plant.size
    assert prefill
    assert decode
    assert (Cause.FROM_ZERO, Cause.FROM_ZERO) in plant.causes()
    assert all((prefill == 0) == (decode == 0) for prefill, decode in plant.sizes())
    assert plant.wait_s < 1


def test_a_minimum_above_zero_is_never_left_however_idle() -> None:
    assert Plant(replace(LIMITS, prefill_min=2), prefill=2).run(2_000).size == (2, 1)


def test_a_pool_does_not_go_to_zero_where_the_other_may_not() -> None:
    assert Plant(replace(LIMITS, prefill_min=0)).run(2_000).size == (1, 1)


def test_a_worker_that_never_becomes_ready_is_replaced_and_blocks_nothing_else() -> None:
    plant = Plant(LIMITS, prefill=2, decode=1, offered=lambda now: 2.5 if now < 200 else 6.0)
    plant.pools[0].broken = 1
    plant.run(1_500)
    prefill, decode = plant.size
    assert prefill is not None
    assert plant.pools[0].ready(plant.now_s) == prefill - 1
    assert plant.wait_s < 1
    assert decode == 2
    assert "1 did not become ready" in plant.decisions[-1][1].prefill.why
    assert len(set(plant.sizes(since_s=900))) == 1


def test_a_pool_in_which_nothing_ever_starts_does_not_grow_without_end() -> None:
    plant = Plant(TO_ZERO, prefill=0, decode=0, offered=lambda _: 0.5)
    plant.pools[0].broken = 100
    plant.run(2_000)
    assert plant.size == (2, 1)


def test_a_worker_that_crashes_and_is_restarted_orders_no_other() -> None:
    plant = Plant(LIMITS, prefill=5, decode=3, offered=lambda _: 6.5).run(300)
    plant.pools[0].started[0] = plant.now_s
    plant.run(300)
    assert {size for size, _ in plant.sizes()} == {5}


def test_an_operators_number_stands_until_it_is_released_while_the_other_pool_goes_on() -> None:
    plant = Plant(LIMITS, offered=lambda now: 2.0 if now < 300 else 9.0).run(200)
    plant.pools[0].manual = 3
    plant.run(600)
    assert {prefill for prefill, _ in plant.sizes(since_s=205)} == {3}
    assert plant.decisions[-1][1].prefill.cause is Cause.MANUAL
    assert plant.decisions[-1][1].decode.cause is not Cause.MANUAL
    plant.pools[0].manual = None
    plant.run(300)
    assert plant.size[0] is not None
    assert plant.size[0] > 3


def test_an_operators_number_keeps_the_other_pool_from_zero() -> None:
    plant = Plant(TO_ZERO, prefill=1, decode=1)
    plant.pools[0].manual = 2
    plant.run(1_000)
    assert plant.size == (2, 1)


def test_without_the_counters_both_pools_hold_and_say_so() -> None:
    plant = Plant(TO_ZERO, prefill=3, decode=3, offered=lambda _: 5.0, blind=lambda now: now >= 300).run(300)
    before = plant.size
    plant.run(1_000)
    assert set(plant.sizes(since_s=300)) == {before}
    for said in (plant.decisions[-1][1].prefill, plant.decisions[-1][1].decode):
        assert said.cause is Cause.NO_METRICS
        assert "holding" in said.why


def test_a_pool_that_cannot_be_observed_is_left_at_what_was_decided_and_the_other_goes_on() -> None:
    observation = seen({State.FETCHED: 165})
    memory = decide(observation, LIMITS, Memory(), 0.0).memory
    for tick in range(1, 4):
        decision = decide(replace(observation, prefill=None), LIMITS, memory, tick * 5.0)
        assert (decision.prefill.replicas, decision.prefill.cause) == (4, Cause.NO_METRICS)
        memory = decision.memory
        if decision.decode.cause is Cause.OUT:
            break
    assert decision.decode.replicas == 6


def test_without_a_measured_speed_prefill_holds_and_says_so() -> None:
    decision = settled(replace(seen({State.QUEUED: 500}), rates=Rates()), seconds=100)
    assert (decision.prefill.replicas, decision.prefill.cause) == (4, Cause.NO_METRICS)
    assert "not measured" in decision.prefill.why


def test_a_speed_of_next_to_nothing_asks_for_the_most_that_one_step_allows() -> None:
    slowest = replace(seen({State.QUEUED: 500}), rates=Rates(5e-324, 1.0))
    decision = settled(slowest).prefill
    assert (decision.replicas, decision.cause) == (8, Cause.OUT)


# --- Properties -------------------------------------------------------------------------------------------------------

pools = st.builds(
    PoolSeen,
    replicas=st.integers(0, 20),
    ready=st.integers(0, 20),
    kv_tokens=st.integers(0, 10**6),
    manual=st.none() | st.integers(0, 20),
)
numbers = st.dictionaries(st.sampled_from(sorted(LIVE)), st.integers(0, 10**6))
observations = st.builds(
    Observation,
    load=st.none() | st.builds(Load, numbers, numbers, numbers),
    rates=st.builds(Rates, st.none() | st.floats(0, 1e6), st.none() | st.floats(0, 1e6)),
    prefill=st.none() | pools,
    decode=st.none() | pools,
)


@given(st.lists(observations, min_size=1, max_size=8), st.booleans())
def test_whatever_is_seen_sizes_stay_in_bounds_and_steps(all_seen: list[Observation], to_zero: bool) -> None:
    limits, memory = (TO_ZERO if to_zero else LIMITS), Memory()
    for tick, observation in enumerate(all_seen):
        decision = decide(observation, limits, memory, tick * 5.0)
        memory = decision.memory
        for pool, said in ((observation.prefill, decision.prefill), (observation.decode, decision.decode)):
            if pool is None or observation.load is None:
                assert said.cause in (Cause.NO_METRICS, Cause.MANUAL)
            elif pool.manual is not None:
                assert said.replicas == pool.manual
            else:
                assert said.replicas is not None
                assert 0 <= said.replicas <= 12
                if 0 < pool.replicas <= 12 and said.replicas:
                    assert pool.replicas / 2 <= said.replicas <= max(pool.replicas * 2, pool.replicas + 1)
