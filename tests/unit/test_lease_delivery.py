"""Leases as values, what becomes of a delivered job, and how refusals read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq.core import errors
from pdq.core.delivery import MAX_RETRIES_OF_HELD, Ack, Leave, Reject, Retry, backoff_s, verdict
from pdq.core.lease import Lease, RecordKey, renewal_period_s
from pdq.core.refusals import refusal

EVERY_ERROR = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PdqError) and kind is not errors.PdqError
]


def made(kind: type[errors.PdqError]) -> errors.PdqError:
    extra = {errors.RecordEnded: {"state": "done"}, errors.LeaseHeld: {"remaining_ms": 250}}.get(kind, {})
    return kind("why", **extra)


@given(until=st.integers(0, 2**50), now=st.integers(0, 2**50))
def test_a_lease_runs_until_its_last_millisecond_is_over(until: int, now: int) -> None:
    assert Lease("w", 1, until).running(now) == (now < until)


@given(st.integers(100, 3_600_000))
def test_two_renewals_may_be_lost_before_a_lease_is(ttl_ms: int) -> None:
    assert 2 * renewal_period_s(ttl_ms) * 1000 < ttl_ms


def test_a_handled_job_is_acknowledged() -> None:
    assert verdict(None, 1) == Ack()


@pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda kind: kind.__name__)
@given(deliveries=st.integers(1, 1000))
def test_every_error_of_ours_has_one_verdict_that_follows_from_its_kind(
    kind: type[errors.PdqError], deliveries: int
) -> None:
    match verdict(made(kind), deliveries):
        case Ack():
            assert kind in (errors.TurnedAway, errors.RecordEnded, errors.RequestCancelled, errors.IllegalTransition)
        case Leave():
            assert kind in (errors.StaleEpoch, errors.LeaseHeld)
        case Retry(delay_s):
            assert kind.retryable
            assert 0 < delay_s <= 5
        case Reject(code, detail):
            assert not kind.retryable
            assert (code, detail) == (kind.code, "why")


def test_a_job_whose_record_is_held_waits_for_the_lease() -> None:
    assert verdict(errors.LeaseHeld("held", remaining_ms=2_500), 1) == Retry(2.5)
    assert verdict(errors.LeaseHeld("held", remaining_ms=0), 1) == Retry(0.05)


def test_a_job_that_is_held_for_long_does_not_use_up_its_deliveries() -> None:
    assert verdict(errors.LeaseHeld("held", remaining_ms=2_500), MAX_RETRIES_OF_HELD + 1) == Leave()


def test_who_lost_its_lease_says_nothing_about_a_job_that_another_worker_may_have() -> None:
    assert verdict(errors.StaleEpoch("lost"), 1) == Leave()


def test_a_bug_is_rejected_with_its_type() -> None:
    assert verdict(KeyError("x"), 1) == Reject("internal_error", "KeyError: 'x'")


@given(st.integers(1, 10_000))
def test_backoff_grows_and_is_bounded(deliveries: int) -> None:
    assert 0.1 <= backoff_s(deliveries) <= backoff_s(deliveries + 1) <= 5


REFUSALS = ["RecordNotFound", "RecordEnded", "IllegalTransition", "StaleEpoch", "LeaseHeld", "DeadlineExceeded"]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_was_refused_for_whom(name: str) -> None:
    kind = getattr(errors, name)
    error = refusal(kind.code, RecordKey("m/x", "r1"), "begin", state="ready", remaining_ms=7)
    assert type(error) is kind
    assert str(error).startswith("begin of request r1 (model m/x): ")
    assert name == "RecordNotFound" or "ready" in str(error)


def test_a_refusal_that_ends_the_request_is_in_words_for_its_requester() -> None:
    error = refusal("attempts_exhausted", RecordKey("m/x", "r1"), "begin", state="prefilling")
    assert type(error) is errors.AttemptsExhausted
    assert "record" not in str(error)


def test_an_unknown_refusal_is_a_bug() -> None:
    with pytest.raises(ValueError, match="what"):
        refusal("what", RecordKey("m", "r"), "begin")
