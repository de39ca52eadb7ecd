"""Admission: every limit by itself, with the reason and the time to come back that it gives."""

import pytest
from msgspec.structs import replace

from pdq.core.admission import (
    Admitted,
    Capacity,
    Code,
    Reason,
    Refused,
    Request,
    admit,
    queue_wait_s,
)
from pdq.core.load import Count, Load, Rates
from pdq.core.messages import Priority
from tests.unit.admitting import CAPACITY, LIMITS, RATES, SMALL
from tests.unit.loads import load


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
