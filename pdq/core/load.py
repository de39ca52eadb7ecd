"""What a ledger counts of one model, and the rates that follow from two readings of it.

Admission and scaling both decide from these numbers and from nothing else about requests, so they agree on what is
going on. All of a ``Load`` is read in one atomic step: a request never shows in two states, or in none.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from pdq.core.handoff import State
from pdq.core.messages import Priority

RATE_HALF_LIFE_S = 30.0
"""How fast what was measured fades: long enough to smooth single long prompts, short enough to follow a rising load."""
WATCHED_S = 1.0
"""In a longer time between two readings requests may have come, stood, and gone unseen: how long they took is unknown."""


class Count(Struct, frozen=True):
    requests: int = 0
    prompt_tokens: int = 0
    reserved_tokens: int = 0
    """Prompt plus ``max_new_tokens``: output growth is reserved, not hoped for."""


def total(counts: Iterable[Count]) -> Count:
    requests = prompt = reserved = 0
    for count in counts:
        requests += count.requests
        prompt += count.prompt_tokens
        reserved += count.reserved_tokens
    return Count(requests, prompt, reserved)


class Load(Struct, frozen=True, dict=True):
    """One consistent reading of a model's counters.

    A ledger moves them in the same step as the record: the first three per live state, ``queued`` while a record is in
    the state of that name, ``tenants`` from acceptance to end. A tenant whose numbers are all zero is left out, so a
    reading is as large as the number of tenants that have something here now. At any time ``accepted`` is ``ended``
    plus what the states have: a live request's numbers that are corrected are corrected in both.
    """

    requests: Mapping[State, int]
    prompt_tokens: Mapping[State, int]
    reserved_tokens: Mapping[State, int]
    queued: Mapping[Priority, Mapping[str, Count]] = {}
    """What waits for prefill, by class and tenant."""
    tenants: Mapping[str, Count] = {}
    """What every tenant has that has not ended."""
    whole: Mapping[str, Count] = {}
    """What one worker shall do whole and has not prefilled: by class while it is queued, then under ``prefilling``."""
    accepted: Count = Count()
    """Everything ever accepted; only differences between two readings mean something."""
    ended: Count = Count()
    """Everything that ever ended, in whichever way."""

    @cached_property
    def waiting(self) -> Mapping[Priority, Count]:
        """What waits for prefill, by class."""
        classes: tuple[Priority, ...] = ("interactive", "batch")
        return {priority: total(self.queued.get(priority, {}).values()) for priority in classes}


def reading(
    states: Mapping[State, Count],
    ended: Count,
    *,
    queued: Mapping[Priority, Mapping[str, Count]],
    tenants: Mapping[str, Count],
    whole: Mapping[str, Count],
) -> Load:
    """A ``Load`` from what a ledger counts; ``states`` are all that are live."""
    return Load(
        requests={state: count.requests for state, count in states.items()},
        prompt_tokens={state: count.prompt_tokens for state, count in states.items()},
        reserved_tokens={state: count.reserved_tokens for state, count in states.items()},
        queued=queued,
        tenants=tenants,
        whole=whole,
        accepted=total((ended, *states.values())),
        ended=ended,
    )


def entered(load: Load, priority: Priority, tenant: str, count: Count, *, whole: bool) -> Load:
    """The reading as it would be with ``count`` more accepted, and queued; ``whole``: not for prefill workers."""
    queued = load.queued.get(priority, {})
    return replace(
        load,
        requests=_more(load.requests, count.requests),
        prompt_tokens=_more(load.prompt_tokens, count.prompt_tokens),
        reserved_tokens=_more(load.reserved_tokens, count.reserved_tokens),
        queued={**load.queued, priority: {**queued, tenant: _plus(queued.get(tenant), count)}},
        tenants={**load.tenants, tenant: _plus(load.tenants.get(tenant), count)},
        whole={**load.whole, priority: _plus(load.whole.get(priority), count)} if whole else load.whole,
        accepted=_plus(load.accepted, count),
    )


def _more(states: Mapping[State, int], number: int) -> Mapping[State, int]:
    return {**states, State.QUEUED: states.get(State.QUEUED, 0) + number}


def _plus(a: Count | None, b: Count) -> Count:
    if a is None:
        return b
    return Count(a.requests + b.requests, a.prompt_tokens + b.prompt_tokens, a.reserved_tokens + b.reserved_tokens)


class Tally(Struct, frozen=True):
    """What one worker has computed since it started: ``Occupancy.tokens``, and the time in which it did that.

    Without the time a quiet worker would look like a slow one.
    """

    tokens: int
    busy_s: float


class Rates(Struct, frozen=True):
    """What was measured lately; ``None`` is not zero but "nothing was measured"."""

    prefill_tokens_per_s: float | None = None
    """Of one prefill worker while it computes."""
    arrived_tokens_per_s: float | None = None
    """Prompt tokens accepted."""
    ended_requests_per_s: float | None = None
    freed_tokens_per_s: float | None = None
    """Reserved tokens of requests that ended."""
    drained_tokens_per_s: float | None = None
    """Prompt tokens that decode took over while prompts waited, per prefill worker: less than it computes when it stands
    still because nobody fetches what it holds."""
    rest_s: float | None = None
    """From a request's computed prompt to its end."""
    rest_s_per_token: float | None = None
    """The same, for each token that it may produce."""


class _Sums(Struct, frozen=True):
    """Sums that fade together, so that their quotients do not."""

    seconds: float = 0.0
    arrived: float = 0.0
    ended: float = 0.0
    freed: float = 0.0
    computed: float = 0.0
    busy_s: float = 0.0
    drained: float = 0.0
    waited_s: float = 0.0
    """Worker-seconds in which prompts waited, and what decode took over in them."""
    rest_s: float = 0.0
    """Request-seconds from a computed prompt to an end."""
    rested: float = 0.0
    output: float = 0.0
    """Those which ended meanwhile, and the tokens that they might have produced."""


class Meter(Struct, frozen=True):
    """The last readings and fading sums over the earlier ones; ``measure`` makes the next. Start with ``Meter()``."""

    rates: Rates = Rates()
    sums: _Sums = _Sums()
    load: Load | None = None
    tallies: Mapping[str, Tally] = {}
    at_s: float = 0.0


def measure(meter: Meter, load: Load, prefill: Mapping[str, Tally], now_s: float) -> Meter:
    """The meter after one more reading of the ledger and of what each prefill worker has computed.

    A worker or ledger that counts from the beginning again has restarted: what it counted in between is skipped. A worker
    counts a piece of work when it is done, and the time as it goes: its time counts when its tokens do.
    """
    if meter.load is None or now_s <= meter.at_s:
        return replace(meter, load=load, tallies=prefill, at_s=now_s)
    elapsed = now_s - meter.at_s
    fade = 0.5 ** (elapsed / RATE_HALF_LIFE_S)
    pairs = [(meter.tallies[name], tally) for name, tally in prefill.items() if name in meter.tallies]
    pairs = [(old, new) for old, new in pairs if new.tokens > old.tokens and new.busy_s >= old.busy_s]
    was, sums = meter.load, meter.sums
    freed = max(0, load.ended.reserved_tokens - was.ended.reserved_tokens)
    all_busy = min(_before_ready(was), _before_ready(load)) > 2 * len(prefill)  # each has one to compute, and the next
    waited_s = elapsed * len(prefill) if all_busy else 0.0
    drained = load.accepted.prompt_tokens - was.accepted.prompt_tokens - _before_decode(load) + _before_decode(was)
    ended = max(0, load.ended.requests - was.ended.requests)
    watched = elapsed <= WATCHED_S
    sums = _Sums(
        seconds=sums.seconds * fade + elapsed,
        arrived=sums.arrived * fade + max(0, load.accepted.prompt_tokens - was.accepted.prompt_tokens),
        ended=sums.ended * fade + ended,
        freed=sums.freed * fade + freed,
        computed=sums.computed * fade + sum(new.tokens - old.tokens for old, new in pairs),
        busy_s=sums.busy_s * fade + sum(new.busy_s - old.busy_s for old, new in pairs),
        drained=sums.drained * fade + (max(0, drained) if waited_s else 0),
        waited_s=sums.waited_s * fade + waited_s,
        rest_s=sums.rest_s * fade + watched * elapsed * (_after_prefill(load) + _after_prefill(was)) / 2,
        rested=sums.rested * fade + watched * ended,
        output=sums.output * fade + watched * max(0, freed - load.ended.prompt_tokens + was.ended.prompt_tokens),
    )
    # When nobody has computed for long, the last speed still is the best guess.
    known = sums.busy_s > 0.01 and sums.computed > 0
    rates = Rates(
        prefill_tokens_per_s=sums.computed / sums.busy_s if known else meter.rates.prefill_tokens_per_s,
        arrived_tokens_per_s=sums.arrived / sums.seconds,
        ended_requests_per_s=sums.ended / sums.seconds,
        freed_tokens_per_s=sums.freed / sums.seconds,
        # Prompts leave one by one: a moment of waiting proves nothing.
        drained_tokens_per_s=sums.drained / sums.waited_s if sums.drained and sums.waited_s > 0.25 else None,
        rest_s=sums.rest_s / sums.rested if sums.rested >= 0.5 else meter.rates.rest_s,
        rest_s_per_token=sums.rest_s / sums.output if sums.output >= 0.5 else meter.rates.rest_s_per_token,
    )
    if not any(load.requests.values()):
        # Whatever held them up may be over: together they weigh as one, and whoever comes next shows it.
        one = max(1.0, sums.rested)
        sums = replace(sums, rest_s=sums.rest_s / one, rested=sums.rested / one, output=sums.output / one)
    tallies = {name: _at_last_progress(meter.tallies.get(name), tally) for name, tally in prefill.items()}
    return Meter(rates=rates, sums=sums, load=load, tallies=tallies, at_s=now_s)


def _at_last_progress(old: Tally | None, new: Tally) -> Tally:
    return old if old is not None and new.tokens == old.tokens and new.busy_s >= old.busy_s else new


def _before_ready(load: Load) -> int:
    return load.requests.get(State.QUEUED, 0) + load.requests.get(State.PREFILLING, 0)


def _before_decode(load: Load) -> int:
    return sum(load.prompt_tokens.get(state, 0) for state in (State.QUEUED, State.PREFILLING, State.READY))


def _after_prefill(load: Load) -> int:
    return load.requests.get(State.READY, 0) + load.requests.get(State.FETCHED, 0)
