"""Admission: every limit by itself, what follows from all of them, and fairness over a queue in plain order."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdq.core.admission import (
    NEWCOMER,
    Admitted,
    Capacity,
    Code,
    Reason,
    Refused,
    Request,
    admit,
    decode_room,
    fair_share,
    prefill_room,
    prompts_room,
    pull_order,
    queue_wait_s,
)
from pdq.core.handoff import LIVE
from pdq.core.load import Count, Load, Rates
from pdq.core.messages import Priority
from pdq.core.settings import AdmissionSettings
from tests.unit.loads import load

LIMITS = AdmissionSettings(
    interactive_queued_tokens=10_000,
    interactive_queued_requests=20,
    batch_queued_tokens=20_000,
    batch_queued_requests=40,
    batch_share=0.8,
    batch_turn=4,
    decode_overcommit=1.5,
    handoffs_per_prefill_worker=4,
    transfers_per_worker=3,
    tenant_requests=10,
    tenant_reserved_tokens=30_000,
    tenant_weights={"gold": 3.0},
    fair_above=0.5,
    retry_min_s=1.0,
    retry_max_s=60.0,
)
RATES = Rates(
    prefill_tokens_per_s=1_000.0, arrived_tokens_per_s=1_000.0, ended_requests_per_s=2.0, freed_tokens_per_s=500.0
)
CAPACITY = Capacity(prefill_workers=2, decode_workers=2, decode_kv_tokens=40_000, can_start=False, rates=RATES)
SMALL = Request(prompt_tokens=100, max_new_tokens=100)


def waiting(requests: int, tokens: int, priority: Priority = "interactive", tenant: str = "other") -> Load:
    return load({priority: {tenant: Count(requests, tokens, tokens)}})


REFUSALS: list[tuple[str, Load, Capacity, Request, Code, Reason, float]] = [
    (
        "no prefill worker, and none will come",
        load(),
        replace(CAPACITY, prefill_workers=0),
        SMALL,
        "unavailable",
        Reason.NO_WORKERS,
        1.0,
    ),
    (
        "no decode worker, and none will come",
        load(),
        replace(CAPACITY, decode_workers=0),
        SMALL,
        "unavailable",
        Reason.NO_WORKERS,
        1.0,
    ),
    ("as many requests wait as may", waiting(20, 20), CAPACITY, SMALL, "overloaded", Reason.QUEUED_REQUESTS, 1.0),
    (
        "4,000 tokens over what may wait, drained at 2,000 per second",
        waiting(2, 10_000),
        CAPACITY,
        replace(SMALL, prompt_tokens=4_000),
        "overloaded",
        Reason.QUEUED_TOKENS,
        2.0,
    ),
    (
        "more batch requests than may wait",
        waiting(43, 43, "batch"),
        CAPACITY,
        replace(SMALL, priority="batch"),
        "overloaded",
        Reason.QUEUED_REQUESTS,
        2.0,
    ),
    (
        "2,000 tokens over what may be reserved, freed at 500 per second",
        load(fetched=Count(30, 30_000, 61_800)),
        CAPACITY,
        SMALL,
        "overloaded",
        Reason.DECODE_MEMORY,
        4.0,
    ),
    (
        "batch reserves less of decode than interactive may",
        load(fetched=Count(30, 30_000, 48_800)),
        CAPACITY,
        replace(SMALL, priority="batch"),
        "overloaded",
        Reason.DECODE_MEMORY,
        2.0,
    ),
    (
        "every prefill worker's handoff window is full, and prompts leave at half the speed",
        load({"interactive": {"other": Count(4, 8_000, 8_000)}}, ready=Count(8, 800, 800)),
        replace(CAPACITY, rates=replace(RATES, drained_tokens_per_s=500.0)),
        replace(SMALL, deadline_s=101.0),
        "overloaded",
        Reason.HANDOFFS,
        9.125,
    ),
    (
        "it would wait 4 s and compute 0.1 s, with a quarter to be safe, and has 1 s",
        waiting(4, 8_000),
        CAPACITY,
        replace(SMALL, deadline_s=101.0),
        "overloaded",
        Reason.DEADLINE,
        4.125,
    ),
    (
        "decode takes 2 s, and it has 1 s",
        load(fetched=Count(1, 100, 150)),
        replace(CAPACITY, rates=replace(RATES, rest_s=2.0, rest_s_per_token=0.1)),
        replace(SMALL, deadline_s=101.0),
        "overloaded",
        Reason.DEADLINE,
        1.625,
    ),
    (
        "what is being computed is before it, too",
        load(prefilling=Count(2, 8_000, 8_000)),
        CAPACITY,
        replace(SMALL, deadline_s=101.0),
        "overloaded",
        Reason.DEADLINE,
        4.125,
    ),
    (
        "its deadline has passed",
        waiting(1, 1),
        CAPACITY,
        replace(SMALL, deadline_s=99.0),
        "overloaded",
        Reason.DEADLINE,
        1.0,
    ),
    (
        "the tenant has all the requests it may have",
        load(tenants={"a": Count(11, 100, 100)}),
        CAPACITY,
        replace(SMALL, tenant="a"),
        "tenant_limit",
        Reason.TENANT_REQUESTS,
        1.0,
    ),
    (
        "the tenant has all the tokens it may have",
        load(tenants={"a": Count(5, 9_000, 30_800)}),
        CAPACITY,
        replace(SMALL, tenant="a"),
        "tenant_limit",
        Reason.TENANT_TOKENS,
        2.0,
    ),
    (
        "the tenant fills more than half of a queue that it shares",
        load({"interactive": {"a": Count(5, 5_000, 5_000), "b": Count(1, 100, 100)}}),
        CAPACITY,
        replace(SMALL, tenant="a"),
        "tenant_limit",
        Reason.TENANT_SHARE,
        1.0,
    ),
    (
        "the tenant has more than half of a queue's requests, however small they are",
        load({"interactive": {"a": Count(11, 11, 11), "b": Count(1, 1, 1)}}),
        CAPACITY,
        replace(SMALL, tenant="a"),
        "tenant_limit",
        Reason.TENANT_SHARE,
        1.5556,
    ),
    (
        "the tenant has more than half of decode memory",
        load(tenants={"a": Count(5, 9_000, 26_000), "b": Count(5, 100, 4_500)}, fetched=Count(10, 9_100, 30_500)),
        CAPACITY,
        replace(SMALL, tenant="a", max_new_tokens=1_000),
        "tenant_limit",
        Reason.TENANT_SHARE,
        1.0,
    ),
    (
        "who names no tenant is not told of tenants",
        waiting(5, 8_000, tenant=""),
        CAPACITY,
        SMALL,
        "overloaded",
        Reason.TENANT_SHARE,
        1.0,
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[0])
def test_a_request_over_a_limit_is_refused_with_the_reason_and_the_time_that_draining_takes(
    case: tuple[str, Load, Capacity, Request, Code, Reason, float],
) -> None:
    _, seen, capacity, request, code, reason, retry_after_s = case
    refused = admit(seen, capacity, LIMITS, request, now_s=100.0)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (code, reason)
    assert refused.retry_after_s == pytest.approx(retry_after_s, abs=1e-4)
    assert refused.why


ADMISSIONS: list[tuple[str, Load, Capacity, Request]] = [
    ("an idle system", load(), CAPACITY, SMALL),
    ("one below each cap", waiting(19, 9_900), CAPACITY, SMALL),
    ("a full batch queue does not concern interactive", waiting(40, 20_000, "batch"), CAPACITY, SMALL),
    ("a prompt over the cap, into an empty queue", load(), CAPACITY, replace(SMALL, prompt_tokens=15_000)),
    ("interactive where batch is refused", load(fetched=Count(30, 30_000, 48_800)), CAPACITY, SMALL),
    ("a deadline that will be met", waiting(4, 8_000), CAPACITY, replace(SMALL, deadline_s=105.2)),
    (
        "all handoff windows are full, and there is time",
        load(ready=Count(9, 900, 900)),
        CAPACITY,
        SMALL,
    ),
    (
        "what was pulled already waits no more",
        waiting(4, 8_000),
        CAPACITY,
        replace(SMALL, deadline_s=101.0, queues=False),
    ),
    (
        "a decode worker that takes it whole needs no prefill worker",
        load(),
        replace(CAPACITY, prefill_workers=0),
        replace(SMALL, queues=False),
    ),
    (
        "a small request where the usual ones take long",
        load(),
        replace(CAPACITY, rates=replace(RATES, rest_s=60.0, rest_s_per_token=0.1)),
        replace(SMALL, max_new_tokens=5, deadline_s=101.0),
    ),
    (
        "more than decode may reserve, when nothing is there",
        load(),
        replace(CAPACITY, decode_kv_tokens=100),
        SMALL,
    ),
    (
        "an idle system, however slow it was",
        load(),
        replace(CAPACITY, rates=replace(RATES, rest_s=60.0)),
        replace(SMALL, deadline_s=101.0),
    ),
    ("nothing measured yet", waiting(4, 8_000), replace(CAPACITY, rates=Rates()), replace(SMALL, deadline_s=100.1)),
    (
        "from zero: the queue holds it",
        waiting(4, 8_000),
        replace(CAPACITY, prefill_workers=0, decode_workers=0, decode_kv_tokens=0, can_start=True),
        SMALL,
    ),
    (
        "a tenant alone in the queue may fill most of it",
        waiting(5, 7_900, tenant="a"),
        CAPACITY,
        replace(SMALL, tenant="a"),
    ),
    (
        "a tenant over its share while the queue is short",
        load({"interactive": {"a": Count(5, 4_800, 4_800), "b": Count(1, 100, 100)}}),
        CAPACITY,
        replace(SMALL, tenant="a"),
    ),
    (
        "a tenant with three times the weight",
        load({"interactive": {"gold": Count(5, 6_900, 6_900), "b": Count(1, 100, 100)}}),
        CAPACITY,
        replace(SMALL, tenant="gold"),
    ),
    (
        "a tenant that has nothing in a contended queue",
        load({"interactive": {"a": Count(5, 6_000, 6_000)}}),
        CAPACITY,
        replace(SMALL, tenant="late", prompt_tokens=4_000),
    ),
]


@pytest.mark.parametrize("case", ADMISSIONS, ids=lambda case: case[0])
def test_a_request_within_all_limits_is_admitted(case: tuple[str, Load, Capacity, Request]) -> None:
    _, seen, capacity, request = case
    assert isinstance(admit(seen, capacity, LIMITS, request, now_s=100.0), Admitted)


def test_the_time_to_come_back_is_bounded_however_slow_the_drain() -> None:
    slow = replace(CAPACITY, rates=replace(RATES, freed_tokens_per_s=0.001))
    refused = admit(load(fetched=Count(9, 9, 90_000)), slow, LIMITS, SMALL, now_s=0.0)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == LIMITS.retry_max_s


@pytest.mark.parametrize(("priority", "longest_s"), [("interactive", 3.0), ("batch", 3.5)])
def test_a_wait_longer_than_its_class_may_have_is_refused_while_the_queue_has_room(
    priority: Priority, longest_s: float
) -> None:
    limits = replace(LIMITS, interactive_wait_s=3.0, batch_wait_s=3.5)
    request = replace(SMALL, priority=priority)
    most = int(longest_s * 2_000)
    assert isinstance(admit(waiting(2, most, priority), CAPACITY, limits, request, now_s=0.0), Admitted)
    refused = admit(waiting(2, most + 200, priority), CAPACITY, limits, request, now_s=0.0)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == ("overloaded", Reason.WAIT)
    unmeasured = replace(CAPACITY, rates=Rates())
    assert isinstance(admit(waiting(2, most + 200, priority), unmeasured, limits, request, now_s=0.0), Admitted)


def test_batch_waits_for_interactive_and_interactive_only_for_batch_turns() -> None:
    seen = load({"interactive": {"": Count(3, 3_000, 0)}, "batch": {"": Count(9, 9_000, 0)}})
    assert queue_wait_s(seen, CAPACITY, LIMITS, "batch") == 6.0
    assert queue_wait_s(seen, CAPACITY, LIMITS, "interactive") == 2.0


def test_what_waits_in_a_queue_of_its_own_is_not_before_a_prompt_in_the_prefill_queue() -> None:
    seen = load(
        {"interactive": {"": Count(3, 3_000, 0)}, "batch": {"": Count(9, 9_000, 0)}}, prefilling=Count(2, 2_000, 0)
    )
    seen = replace(seen, whole={"interactive": Count(1, 1_000, 0), "prefilling": Count(2, 2_000, 0)})
    assert queue_wait_s(seen, CAPACITY, LIMITS, "batch") == 5.5
    assert queue_wait_s(seen, replace(CAPACITY, takes_whole=True), LIMITS, "batch") == 7.0


# --- Properties -------------------------------------------------------------------------------------------------------

counts = st.builds(Count, st.integers(0, 30), st.integers(0, 30_000), st.integers(0, 60_000))
by_tenant = st.dictionaries(st.sampled_from(["a", "b", "gold"]), counts)
queues = st.fixed_dictionaries({"interactive": by_tenant, "batch": by_tenant})
loads = st.builds(
    Load,
    requests=st.dictionaries(st.sampled_from(sorted(LIVE)), st.integers(0, 30)),
    prompt_tokens=st.dictionaries(st.sampled_from(sorted(LIVE)), st.integers(0, 30_000)),
    reserved_tokens=st.dictionaries(st.sampled_from(sorted(LIVE)), st.integers(0, 60_000)),
    queued=queues,
    tenants=by_tenant,
)
rates = st.none() | st.floats(0.01, 10_000)
capacities = st.builds(
    Capacity,
    prefill_workers=st.integers(0, 4),
    decode_workers=st.integers(0, 4),
    decode_kv_tokens=st.integers(0, 100_000),
    can_start=st.booleans(),
    rates=st.builds(Rates, rates, rates, rates, rates),
)
requests = st.builds(
    Request,
    prompt_tokens=st.integers(1, 12_000),
    max_new_tokens=st.integers(1, 4_000),
    priority=st.sampled_from(["interactive", "batch"]),
    tenant=st.sampled_from(["a", "b", "gold", "new"]),
    deadline_s=st.floats(0, 100) | st.just(math.inf),
)


def _plus(a: Mapping[str, Count], b: Mapping[str, Count]) -> dict[str, Count]:
    def count(x: Count, y: Count) -> Count:
        return Count(x.requests + y.requests, x.prompt_tokens + y.prompt_tokens, x.reserved_tokens + y.reserved_tokens)

    return {name: count(a.get(name, Count()), b.get(name, Count())) for name in {*a, *b}}


def _more(a: Load, b: Load) -> Load:
    return Load(
        requests=Counter(a.requests) + Counter(b.requests),
        prompt_tokens=Counter(a.prompt_tokens) + Counter(b.prompt_tokens),
        reserved_tokens=Counter(a.reserved_tokens) + Counter(b.reserved_tokens),
        queued={priority: _plus(a.queued[priority], b.queued[priority]) for priority in a.queued},
        tenants=_plus(a.tenants, b.tenants),
    )


@given(loads, loads, capacities, requests)
def test_more_load_never_turns_a_refusal_into_an_admission(
    some: Load, more: Load, capacity: Capacity, request: Request
) -> None:
    if isinstance(admit(some, capacity, LIMITS, request, 0.0), Refused):
        assert isinstance(admit(_more(some, more), capacity, LIMITS, request, 0.0), Refused)


@given(loads, capacities, requests, st.integers(0, 5_000), st.integers(0, 5_000))
def test_a_request_that_asks_for_less_is_admitted_wherever_a_larger_one_is(
    seen: Load, capacity: Capacity, request: Request, prompt: int, output: int
) -> None:
    larger = replace(
        request, prompt_tokens=request.prompt_tokens + prompt, max_new_tokens=request.max_new_tokens + output
    )
    if isinstance(admit(seen, capacity, LIMITS, larger, 0.0), Admitted):
        assert isinstance(admit(seen, capacity, LIMITS, request, 0.0), Admitted)


@given(loads, capacities, requests)
def test_interactive_is_admitted_wherever_batch_is_with_equal_caps_and_queues(
    seen: Load, capacity: Capacity, request: Request
) -> None:
    limits = replace(
        LIMITS, batch_queued_tokens=10_000, batch_queued_requests=20, batch_wait_s=LIMITS.interactive_wait_s
    )
    both = replace(seen, queued={"interactive": seen.queued["batch"], "batch": seen.queued["batch"]})
    if isinstance(admit(both, capacity, limits, replace(request, priority="batch"), 0.0), Admitted):
        assert isinstance(admit(both, capacity, limits, replace(request, priority="interactive"), 0.0), Admitted)


@given(loads, capacities, requests)
def test_every_refusal_says_why_and_when_to_come_back(seen: Load, capacity: Capacity, request: Request) -> None:
    outcome = admit(seen, capacity, LIMITS, request, 0.0)
    if isinstance(outcome, Refused):
        assert outcome.why
        assert LIMITS.retry_min_s <= outcome.retry_after_s <= LIMITS.retry_max_s


@given(st.sets(st.sampled_from(["a", "b", "gold"]), min_size=1))
def test_the_shares_of_those_who_wait_leave_a_part_for_whoever_comes(tenants: set[str]) -> None:
    weight = sum(LIMITS.tenant_weights.get(name, 1.0) for name in tenants)
    shares = [fair_share(tenants, LIMITS, name) for name in tenants]
    assert sum(shares) == pytest.approx(weight / (weight + NEWCOMER))


# --- Fairness, over a plain queue -------------------------------------------------------------------------------------


def _served(offered: Mapping[str, int], ticks: int) -> Counter[str]:
    """Requests served per tenant: each tick every tenant offers so many, and a queue in order serves ten."""
    queue: deque[str] = deque()
    served: Counter[str] = Counter()
    for _ in range(ticks):
        arriving = {name: iter(range(count)) for name, count in offered.items()}
        turns = cycle(offered)
        for name in islice(turns, sum(offered.values()) * len(offered)):
            if next(arriving[name], None) is None:
                continue
            inside = Counter(queue)
            seen = load({"interactive": {who: Count(n, 100 * n, 100 * n) for who, n in inside.items()}})
            request = Request(100, 1, tenant=name)
            roomy = replace(LIMITS, interactive_queued_requests=1_000)
            if isinstance(admit(seen, replace(CAPACITY, decode_kv_tokens=10**9), roomy, request, 0.0), Admitted):
                queue.append(name)
        for _ in range(min(10, len(queue))):
            served[queue.popleft()] += 1
    return served


def test_a_flood_of_one_tenant_does_not_take_the_share_of_another() -> None:
    served = _served({"flood": 40, "calm": 5}, ticks=60)
    assert served["calm"] >= 0.9 * 5 * 60 - 50  # all it asked for, less what still waits
    assert served["flood"] >= 0.9 * (10 * 60 - served["calm"])  # and the rest is not wasted


def test_tenants_that_all_ask_for_more_are_served_by_weight() -> None:
    served = _served({"gold": 20, "plain": 20}, ticks=150)
    assert served["gold"] / served["plain"] == pytest.approx(3.0, rel=0.2)


def test_interactive_goes_first_and_batch_gets_its_turns() -> None:
    firsts = [pull_order(pulls, LIMITS)[0] for pulls in range(12)]
    assert firsts == ["interactive"] * 3 + ["batch"] + ["interactive"] * 3 + ["batch"] + ["interactive"] * 3 + ["batch"]
    assert all(set(pull_order(pulls, LIMITS)) == {"interactive", "batch"} for pulls in range(8))


def test_a_worker_whose_window_is_full_does_not_pull() -> None:
    assert [prefill_room(held, 1, 0.001, LIMITS) for held in range(5)] == [3, 2, 1, 0, 0]
    assert [decode_room(running, LIMITS) for running in range(5)] == [3, 2, 1, 0, 0]


def test_a_worker_pulls_ahead_what_it_computes_in_a_moment_and_at_least_the_next_prompt() -> None:
    roomy = replace(LIMITS, handoffs_per_prefill_worker=16)
    assert [prefill_room(0, 0, mean_s, roomy) for mean_s in (0.0, 0.001, 0.01, 0.04, 5.0)] == [2, 16, 10, 2, 2]
    assert [prefill_room(0, in_hand, 5.0, roomy) for in_hand in range(4)] == [2, 1, 0, 0]
    assert [prompts_room(in_hand, 0.01) for in_hand in (0, 4, 20)] == [10, 6, 0]
    assert prefill_room(15, 0, 5.0, roomy) == 1
