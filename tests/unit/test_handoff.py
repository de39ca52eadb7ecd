"""Properties of the state tables themselves: every ledger executes them, so a hole here is a hole everywhere."""

import itertools
import re

import pytest

from pdq.core import handoff
from pdq.core.handoff import (
    LIVE,
    RESTS_ON,
    RULES,
    TERMINAL,
    TRANSITIONS,
    Author,
    Event,
    Retain,
    Side,
    State,
    predecessors,
    releases_on,
)


def reachable(start: State) -> set[State]:
    found, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        for (state, _), target in TRANSITIONS.items():
            if state is here and target not in found:
                found.add(target)
                frontier.append(target)
    return found


def test_every_state_is_either_live_or_terminal() -> None:
    assert set(State) == LIVE | TERMINAL
    assert not LIVE & TERMINAL
    assert {state for state in State if state.terminal} == TERMINAL


def test_every_state_can_be_reached_from_queued() -> None:
    assert reachable(State.QUEUED) == set(State)


@pytest.mark.parametrize("state", sorted(LIVE))
def test_every_live_state_can_reach_success_and_every_other_end(state: State) -> None:
    assert reachable(state) >= TERMINAL


@pytest.mark.parametrize("state", sorted(LIVE))
@pytest.mark.parametrize("event", [Event.FAIL, Event.CANCEL, Event.EXPIRE])
def test_every_live_state_can_fail_be_cancelled_and_expire(state: State, event: Event) -> None:
    assert TRANSITIONS[state, event].terminal


def test_terminal_states_have_no_way_out() -> None:
    assert not [row for row in TRANSITIONS if row[0] in TERMINAL]


def test_every_event_has_a_rule_and_a_row() -> None:
    assert set(RULES) == set(Event) == {event for _, event in TRANSITIONS}


@pytest.mark.parametrize("event", Event)
def test_an_event_either_always_ends_the_record_or_never(event: Event) -> None:
    assert len({target.terminal for target in predecessors(event).values()}) == 1


def test_only_claimants_claim_and_all_claimants_do() -> None:
    assert {event for event, rule in RULES.items() if rule.claims} == {Event.BEGIN, Event.CLAIM}
    assert {event for event, rule in RULES.items() if rule.author is Author.CLAIMANT} == {Event.BEGIN, Event.CLAIM}
    assert [event for event, rule in RULES.items() if rule.counts_attempt] == [Event.BEGIN]


@pytest.mark.parametrize(("event", "retain"), list(itertools.product(Event, Retain)))
def test_an_event_that_ends_the_record_releases_both_leases_whatever_is_retained(event: Event, retain: Retain) -> None:
    if any(target.terminal for target in predecessors(event).values()):
        assert set(releases_on(event, retain)) == set(Side)


@pytest.mark.parametrize(
    ("retain", "released"), [(Retain.FETCHED, (Side.SOURCE,)), (Retain.FIRST_TOKEN, ()), (Retain.DONE, ())]
)
def test_fetched_lets_the_source_go_only_if_nothing_retains_it(retain: Retain, released: tuple[Side, ...]) -> None:
    assert releases_on(Event.FETCHED, retain) == released


def test_no_event_releases_the_lease_that_it_claims() -> None:
    assert not [event for event, rule in RULES.items() if rule.claims in rule.releases]


def test_what_leads_to_another_attempt_voids_the_kv_and_holds_no_sink() -> None:
    again = {event for event, rule in RULES.items() if rule.voids_kv}
    assert again == {event for event, target in rows() if target in (State.QUEUED, State.PREFILLING)} - {Event.CLAIM}
    assert all(Side.SINK in RULES[event].releases for event in again)


def rows() -> list[tuple[Event, State]]:
    return [(event, target) for (_, event), target in TRANSITIONS.items()]


def test_a_holder_of_state_event_starts_only_where_the_state_rests_on_a_lease() -> None:
    for state, event in TRANSITIONS:
        if RULES[event].author is Author.HOLDER_OF_STATE:
            assert state in RESTS_ON


def test_every_working_state_can_be_left_once_its_holder_is_lost() -> None:
    """What the reaper needs: a way back that anyone may take when the resting lease has run out."""
    for state in RESTS_ON:
        ways = [event for start, event in TRANSITIONS if start is state and event in (Event.REQUEUE, Event.YIELD)]
        assert ways
        assert all(RULES[event].author is Author.HOLDER_OF_STATE for event in ways)


def test_the_sink_can_claim_only_where_kv_is_or_comes() -> None:
    assert set(predecessors(Event.CLAIM)) == {State.PREFILLING, State.READY}
    assert set(predecessors(Event.FETCHED)) == {State.READY}


def test_the_diagram_names_every_event_and_every_state() -> None:
    words = set(re.findall(r"[a-z]+", handoff.__doc__ or ""))
    assert words >= {event.value for event in Event}
    assert words >= {state.value for state in State}
