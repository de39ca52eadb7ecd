"""Where a request runs: every row of the policy, and that every reason there is can be given."""

import pytest
from msgspec.structs import replace

from pdq.core.admission import Capacity
from pdq.core.load import Rates
from pdq.core.routing import ROUTES, Route, Why, route
from pdq.core.settings import HandoffSettings

AUTO = HandoffSettings(mode="auto", auto_local_tokens=64)
BOTH = Capacity(
    prefill_workers=1,
    decode_workers=1,
    decode_kv_tokens=1_000,
    can_start=True,
    rates=Rates(prefill_tokens_per_s=1_000.0),
)
NO_PREFILL = replace(BOTH, prefill_workers=0)
NO_DECODE = replace(BOTH, decode_workers=0)
NEITHER = replace(BOTH, prefill_workers=0, decode_workers=0)
UNMEASURED = replace(BOTH, rates=Rates())

TABLE: list[tuple[str, HandoffSettings, int, float | None, Capacity, str, Why]] = [
    ("short, but configured", HandoffSettings(mode="disaggregated"), 1, 9.0, BOTH, "prefill", Why.CONFIGURED),
    ("long, but configured", HandoffSettings(mode="aggregated"), 9_000, 0.0, BOTH, "prefill", Why.CONFIGURED),
    ("short", AUTO, 64, 0.0, BOTH, "local", Why.SHORT_PROMPT),
    ("just not short", AUTO, 65, 0.0, BOTH, "prefill", Why.LONG_PROMPT),
    ("long, and the queue as long as it takes", AUTO, 2_000, 2.0, BOTH, "prefill", Why.LONG_PROMPT),
    ("long, and the queue longer", AUTO, 2_000, 2.1, BOTH, "local", Why.PREFILL_BUSY),
    ("long, and nothing was measured", AUTO, 2_000, None, UNMEASURED, "prefill", Why.LONG_PROMPT),
    ("long, and nobody to prefill", AUTO, 2_000, None, NO_PREFILL, "local", Why.NO_PREFILL_WORKER),
    ("long, and nobody to decode yet", AUTO, 2_000, 9.0, NO_DECODE, "prefill", Why.LONG_PROMPT),
    ("long, and both pools at zero", AUTO, 2_000, None, NEITHER, "prefill", Why.LONG_PROMPT),
    ("short, and both pools at zero", AUTO, 10, None, NEITHER, "local", Why.SHORT_PROMPT),
]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case[0])
def test_a_request_goes_where_the_policy_says_and_the_reason_tells_why(
    case: tuple[str, HandoffSettings, int, float | None, Capacity, str, Why],
) -> None:
    _, handoff, prompt_tokens, wait_s, capacity, queue, reason = case
    found = route(prompt_tokens, wait_s, capacity, handoff)
    assert (found.queue, found.reason) == (queue, reason)


def test_what_goes_to_the_local_queue_is_done_by_one_worker() -> None:
    assert all(it.mode == "aggregated" for it in ROUTES if it.queue == "local")


def test_no_route_is_known_that_is_never_taken() -> None:
    taken = {route(tokens, wait_s, capacity, handoff) for _, handoff, tokens, wait_s, capacity, *_ in TABLE}
    assert taken == set[Route](ROUTES)
