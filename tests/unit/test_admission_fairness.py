"""Who goes first: tenants over a queue in plain order, batch and interactive, and how much a worker pulls ahead."""

from collections import Counter, deque
from collections.abc import Mapping
from itertools import cycle, islice

import pytest
from msgspec.structs import replace

from pdq.core.admission import (
    Admitted,
    Request,
    admit,
    decode_room,
    prefill_room,
    prompts_room,
    pull_order,
)
from pdq.core.load import Count
from tests.unit.admitting import CAPACITY, LIMITS
from tests.unit.loads import load


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
