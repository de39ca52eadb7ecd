"""Admission, for any load: what follows from all of its limits together."""

import math
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdq.core.admission import (
    NEWCOMER,
    Admitted,
    Capacity,
    Refused,
    Request,
    admit,
    fair_share,
)
from pdq.core.handoff import LIVE
from pdq.core.load import Count, Load, Rates
from tests.unit.admitting import LIMITS

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
