"""Whether a request is accepted, decided before any compute is spent, from one consistent reading of the counters.

The two pools share what is scarce, so the limits are joint: prefill must not run ahead of what decode can hold, and
what waits must be able to finish in time. ``admit`` is the one place that says no; whoever accepts (the bridge)
reads ``Load`` and the pools' capacity, asks, and only then writes the record. Limits bound waiting and memory, not
speed: a pool that is at zero and may start leaves the request to the queue.

Order and fairness, over queues that are first in, first out:

- *Tenants.* A queue serves its jobs in order, so each tenant's share of the service is its share of the queue. From
  ``fair_above`` of what may wait, or of decode memory, on, ``admit`` lets no tenant hold more of it than its weight's
  part, and keeps a part for a tenant that is not here yet. So the flooding tenant is refused, the others find room at
  any time, and nobody waits behind more than its share allows.
- *Classes.* Each class has a consumer of its own. A worker asks them in the order of ``pull_order``: interactive first,
  except at every ``batch_turn``-th pull.
- *Work in hand.* A worker asks ``prefill_room`` or ``decode_room`` how many jobs it may pull.
"""

import math
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from pdq.core.handoff import State
from pdq.core.load import Count, Load, Rates
from pdq.core.messages import Priority
from pdq.core.settings import AdmissionSettings

Code = Literal["overloaded", "unavailable", "tenant_limit"]

SAFETY: Final = 1.25
"""A deadline must be met even if the estimate is a fifth too low: else, at the limit, all that is accepted is late."""
NEWCOMER: Final = 0.25
"""The weight that whoever has nothing here yet has in the shares: a tenant that is alone gets 80 %."""
AHEAD_S: Final = 0.1
"""Work that a prefill worker pulls ahead."""
LEAST_AHEAD: Final = 2
"""One prompt that is computed, and the next."""

_INTERACTIVE_FIRST: Final[tuple[Priority, ...]] = ("interactive", "batch")
_BATCH_FIRST: Final[tuple[Priority, ...]] = ("batch", "interactive")


class Reason(StrEnum):
    """What a refusal is counted under."""

    NO_WORKERS = "no_workers"
    QUEUED_REQUESTS = "queued_requests"
    QUEUED_TOKENS = "queued_tokens"
    WAIT = "wait"
    DECODE_MEMORY = "decode_memory"
    HANDOFFS = "handoffs"
    DEADLINE = "deadline"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_SHARE = "tenant_share"


class Capacity(Struct, frozen=True):
    """What the live workers of a model offer, from their registrations, and what was measured of them."""

    prefill_workers: int
    """Those that are ready."""
    decode_workers: int
    decode_kv_tokens: int
    """KV memory of the ready decode workers together."""
    can_start: bool
    """A pool that has no worker now will get one (scaling from zero)."""
    takes_whole: bool = False
    """What one worker shall do whole waits in the prefill queue, too, and not in one of its own."""
    rates: Rates = Rates()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Of the whole pool, also when it is held up by decode; None if it was never measured, or is empty."""
        speeds = [it for it in (self.rates.prefill_tokens_per_s, self.rates.drained_tokens_per_s) if it]
        return min(speeds) * self.prefill_workers if speeds and self.prefill_workers else None


class Request(Struct, frozen=True):
    prompt_tokens: int
    max_new_tokens: int
    priority: Priority = "interactive"
    tenant: str = ""
    deadline_s: float = math.inf
    """On the clock of ``now_s``."""
    queues: bool = True
    """It will wait for a prefill worker. Not so what a decode worker takes whole, or what was pulled already."""

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


class Admitted(Struct, frozen=True):
    wait_s: float | None
    """How long it will probably wait for prefill; None if nothing was measured yet."""


class Refused(Struct, frozen=True):
    code: Code
    """``overloaded`` and ``tenant_limit`` are the requester's to slow down for, ``unavailable`` is not."""
    reason: Reason
    why: str
    retry_after_s: float


def admit(
    load: Load, capacity: Capacity, limits: AdmissionSettings, request: Request, now_s: float
) -> Admitted | Refused:
    """Whether ``request`` may enter. More load never turns a refusal into an admission."""
    wait_s = queue_wait_s(load, capacity, limits, request.priority) if request.queues else 0.0
    return (
        _without_workers(capacity, limits, request)
        or _tenant_over_its_limits(load, capacity, limits, request)
        or _tenant_over_its_share(load, capacity, limits, request)
        or _queue_full(load, capacity, limits, request)
        or _waits_too_long(wait_s, limits, request)
        or _decode_full(load, capacity, limits, request)
        or _too_late(wait_s, load, capacity, limits, request, now_s)
        or Admitted(wait_s)
    )


def queue_wait_s(load: Load, capacity: Capacity, limits: AdmissionSettings, priority: Priority) -> float | None:
    """Estimated wait of a request of this class that comes now: what is before it, over the pool's measured speed.

    What is being computed counts in full. Interactive requests are passed by batch ones only on batch's turns; a batch
    request waits for all that is here, but not for interactive ones to come: it is refused only if it is surely late.
    """
    speed = capacity.prefill_tokens_per_s
    if speed is None:
        return None
    interactive, batch = (_for_prefill(load, capacity, it) for it in _INTERACTIVE_FIRST)
    before = _for_prefill(load, capacity, "prefilling") + interactive
    before += batch if priority == "batch" else min(batch, interactive // (limits.batch_turn - 1))
    return before / speed


def pull_order(pulls: int, limits: AdmissionSettings) -> tuple[Priority, ...]:
    """The classes in the order in which a worker asks for jobs, at its ``pulls``-th pull (from 0)."""
    return _BATCH_FIRST if (pulls + 1) % limits.batch_turn == 0 else _INTERACTIVE_FIRST


def prompts_room(in_hand: int, mean_s: float) -> int:
    """How many prompts a worker may pull that has ``in_hand`` which are not computed yet, and computes one in ``mean_s``.
    It computes them in order: ``AHEAD_S`` of work keeps it busy, and more would only make an urgent prompt wait behind
    others that could have waited in the queue."""
    ahead = max(AHEAD_S / mean_s, LEAST_AHEAD) if mean_s else LEAST_AHEAD
    return max(0, int(ahead) - in_hand)


def prefill_room(held: int, in_hand: int, mean_s: float, limits: AdmissionSettings) -> int:
    """How many prompts a prefill worker may pull that holds ``held`` handoffs, and see ``prompts_room``."""
    window = limits.handoffs_per_prefill_worker - held - in_hand
    return max(0, min(window, prompts_room(in_hand, mean_s)))


def decode_room(transferring: int, limits: AdmissionSettings) -> int:
    """How many handoffs a decode worker may pull that fetches ``transferring`` now. Its memory is the engine's to guard."""
    return max(0, limits.transfers_per_worker - transferring)


def fair_share(tenants: Iterable[str], limits: AdmissionSettings, tenant: str) -> float:
    """``tenant``'s part of what ``tenants`` have something of: its weight over that of all of them, itself and the
    ``NEWCOMER`` included."""
    weights = limits.tenant_weights
    return weights.get(tenant, 1.0) / (sum(weights.get(name, 1.0) for name in {tenant, *tenants}) + NEWCOMER)


# --- The limits, in the order in which they are asked -----------------------------------------------------------------


def _without_workers(capacity: Capacity, limits: AdmissionSettings, request: Request) -> Refused | None:
    missing = [
        pool
        for pool, workers in (("prefill", capacity.prefill_workers), ("decode", capacity.decode_workers))
        if not workers and (request.queues or pool == "decode")
    ]
    if not missing or capacity.can_start:
        return None
    why = f"there is no {' and no '.join(missing)} worker, and none will be started"
    return Refused("unavailable", Reason.NO_WORKERS, why, limits.retry_min_s)


def _tenant_over_its_limits(
    load: Load, capacity: Capacity, limits: AdmissionSettings, request: Request
) -> Refused | None:
    has, rates = load.tenants.get(request.tenant, Count()), capacity.rates
    over = has.requests + 1 - limits.tenant_requests
    if over > 0:
        why = f"tenant {request.tenant!r} has {has.requests} requests here, its limit is {limits.tenant_requests}"
        retry_s = _retry_s(over, rates.ended_requests_per_s, limits)
        return Refused("tenant_limit", Reason.TENANT_REQUESTS, why, retry_s)
    over = has.reserved_tokens + request.reserved_tokens - limits.tenant_reserved_tokens
    if over > 0:
        why = (
            f"tenant {request.tenant!r} has {has.reserved_tokens} tokens reserved, {request.reserved_tokens} more "
            f"exceed its limit of {limits.tenant_reserved_tokens}"
        )
        return Refused("tenant_limit", Reason.TENANT_TOKENS, why, _retry_s(over, rates.freed_tokens_per_s, limits))
    return None


class _Scarce(NamedTuple):
    """One thing that tenants share."""

    what: str
    room: float
    taken: int
    of_tenant: int
    wanted: int
    rate_per_s: float | None
    """How fast it becomes free."""
    tenants: Iterable[str]
    """Who has something of it."""


def _tenant_over_its_share(
    load: Load, capacity: Capacity, limits: AdmissionSettings, request: Request
) -> Refused | None:
    """Whoever has nothing of what is scarce may always have one request there."""
    for it in _scarce(load, capacity, limits, request):
        if not it.of_tenant or it.taken + it.wanted <= it.room * limits.fair_above:
            continue
        allowed = it.room * fair_share(it.tenants, limits, request.tenant)
        over = it.of_tenant + it.wanted - allowed
        if over > 0:
            why = (
                f"{it.of_tenant} of {it.taken} {it.what} are of tenant {request.tenant!r}, "
                f"whose fair share of {it.room:.0f} is {allowed:.0f} now"
            )
            # Who names no tenant does not know of tenants.
            code: Code = "tenant_limit" if request.tenant else "overloaded"
            return Refused(code, Reason.TENANT_SHARE, why, _retry_s(over, it.rate_per_s, limits))
    return None


def _scarce(load: Load, capacity: Capacity, limits: AdmissionSettings, request: Request) -> Iterator[_Scarce]:
    kind, rates = request.priority, capacity.rates
    max_requests, max_tokens = _caps(limits, kind)
    waiting = load.queued.get(kind, {})
    has, all_ = waiting.get(request.tenant, Count()), load.waiting[kind]
    yield _Scarce(
        f"waiting {kind} requests",
        *(max_requests, all_.requests, has.requests, 1),
        rates.ended_requests_per_s,
        waiting,
    )
    yield _Scarce(
        f"waiting {kind} prompt tokens",
        *(max_tokens, all_.prompt_tokens, has.prompt_tokens, request.prompt_tokens),
        capacity.prefill_tokens_per_s,
        waiting,
    )
    if capacity.decode_workers:
        has = load.tenants.get(request.tenant, Count())
        yield _Scarce(
            "reserved tokens",
            _decode_room(capacity, limits, kind),
            *(sum(load.reserved_tokens.values()), has.reserved_tokens, request.reserved_tokens),
            rates.freed_tokens_per_s,
            load.tenants,
        )


def _queue_full(load: Load, capacity: Capacity, limits: AdmissionSettings, request: Request) -> Refused | None:
    """An empty queue takes any one request."""
    has = load.waiting[request.priority]
    max_requests, max_tokens = _caps(limits, request.priority)
    over = has.requests + 1 - max_requests
    if over > 0:
        why = f"{has.requests} {request.priority} requests wait, the limit is {max_requests}"
        rate = capacity.rates.ended_requests_per_s
        return Refused("overloaded", Reason.QUEUED_REQUESTS, why, _retry_s(over, rate, limits))
    over = has.prompt_tokens + request.prompt_tokens - max_tokens
    if over > 0 and has.requests:
        why = (
            f"{has.prompt_tokens} {request.priority} prompt tokens wait, {request.prompt_tokens} more exceed the limit "
            f"of {max_tokens}"
        )
        rate = capacity.prefill_tokens_per_s
        return Refused("overloaded", Reason.QUEUED_TOKENS, why, _retry_s(over, rate, limits))
    return None


def _waits_too_long(wait_s: float | None, limits: AdmissionSettings, request: Request) -> Refused | None:
    longest_s = limits.batch_wait_s if request.priority == "batch" else limits.interactive_wait_s
    over_s = (wait_s or 0.0) - longest_s
    if over_s <= 0:
        return None
    why = f"the wait is about {wait_s:.1f} s, {request.priority} requests may wait {longest_s:g} s"
    return Refused("overloaded", Reason.WAIT, why, _between(over_s, limits))


def _decode_full(load: Load, capacity: Capacity, limits: AdmissionSettings, request: Request) -> Refused | None:
    """Whatever is accepted will need decode memory, wherever it is now. A decode pool that starts is not judged, and one
    that has nothing to do takes any one request."""
    reserved = sum(load.reserved_tokens.values())
    if not capacity.decode_workers or not reserved:
        return None
    room = _decode_room(capacity, limits, request.priority)
    over = reserved + request.reserved_tokens - room
    if over <= 0:
        return None
    why = (
        f"{reserved} tokens are reserved for decode, {request.reserved_tokens} more exceed the {room:.0f} that "
        f"{request.priority} requests may reserve of {capacity.decode_kv_tokens} KV tokens"
    )
    return Refused("overloaded", Reason.DECODE_MEMORY, why, _retry_s(over, capacity.rates.freed_tokens_per_s, limits))


def _too_late(
    wait_s: float | None,
    load: Load,
    capacity: Capacity,
    limits: AdmissionSettings,
    request: Request,
    now_s: float,
) -> Refused | None:
    """Not only the wait must fit before the deadline, but the service too, as far as it was measured. When prefill workers
    hold all that they may, it is decode that makes requests late, and the reason says so. A system that has nothing to do
    takes any one request: were it slow once, it would never learn otherwise."""
    left_s = request.deadline_s - now_s
    service_s = _service_s(capacity.rates, request)
    needed_s = SAFETY * ((wait_s or 0.0) + service_s)
    if needed_s <= left_s or not any(load.requests.values()):
        return None
    ready = load.requests.get(State.READY, 0)
    held_up = ready >= capacity.prefill_workers * limits.handoffs_per_prefill_worker > 0
    why = (
        f"about {wait_s or 0.0:.1f} s of waiting for prefill and {service_s:.1f} s of computing do not fit safely before "
        f"the deadline in {max(0.0, left_s):.1f} s" + (f"; {ready} computed prompts wait for decode" if held_up else "")
    )
    reason = Reason.HANDOFFS if held_up else Reason.DEADLINE
    return Refused("overloaded", reason, why, _between(needed_s - max(0.0, left_s), limits))


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def _caps(limits: AdmissionSettings, priority: Priority) -> tuple[int, int]:
    """(requests, prompt tokens) of this class that may wait."""
    if priority == "batch":
        return limits.batch_queued_requests, limits.batch_queued_tokens
    return limits.interactive_queued_requests, limits.interactive_queued_tokens


def _decode_room(capacity: Capacity, limits: AdmissionSettings, priority: Priority) -> float:
    """Tokens that may be reserved before requests of this class are refused."""
    part = limits.batch_share if priority == "batch" else 1.0
    return capacity.decode_kv_tokens * limits.decode_overcommit * part


def _service_s(rates: Rates, request: Request) -> float:
    """How long the request will probably be computed, from pulled to ended; what was not measured counts as nothing."""
    prefill_s = request.prompt_tokens / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s else 0.0
    rest_s = rates.rest_s or 0.0
    if rates.rest_s_per_token is not None:
        rest_s = min(rest_s, rates.rest_s_per_token * request.max_new_tokens)
    return prefill_s + rest_s


def _for_prefill(load: Load, capacity: Capacity, where: Priority | Literal["prefilling"]) -> int:
    """Prompt tokens there that are for the workers which take jobs from the prefill queue."""
    if where == "prefilling":
        tokens = load.prompt_tokens.get(State.PREFILLING, 0)
    else:
        tokens = load.waiting[where].prompt_tokens
    return tokens if capacity.takes_whole else tokens - load.whole.get(where, Count()).prompt_tokens


def _retry_s(over: float, rate_per_s: float | None, limits: AdmissionSettings) -> float:
    """When what is over the limit will have drained at the measured rate."""
    return _between(over / rate_per_s if rate_per_s else limits.retry_min_s, limits)


def _between(seconds: float, limits: AdmissionSettings) -> float:
    return min(max(seconds, limits.retry_min_s), limits.retry_max_s)
