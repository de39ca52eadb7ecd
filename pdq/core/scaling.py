"""How many workers each pool should have: two policies, coupled, as one pure function.

*Prefill* follows time: the prompt tokens that arrive, and those that wait, over what one worker was measured to compute.
*Decode* follows room: the sequences and reserved tokens that are with it or about to be.

The coupling is what two separate controllers cannot have. Handoffs that pile up at ``ready`` hold prefill workers' memory,
so prefill looks overloaded when decode is: then decode grows, and prefill does not. Decode that idles while prompts queue
has not too many workers but too early ones: it does not shrink below what is queued. And a pool at zero makes the
other useless: they go to zero, and come back, together. The ratio of the pools is an outcome, not a setting.

What is called for is this module's; how fast a pool gets there is ``pdq.core.pacing``'s. A worker that was asked for
counts as if it were there, or every start-up would be ordered again and again.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from pdq.core.handoff import LIVE, State
from pdq.core.load import Load, Rates
from pdq.core.pacing import Bounds, Cause, Need, PoolMemory, note, pace
from pdq.core.settings import ScalingSettings


class PoolSeen(Struct, frozen=True):
    """One pool, from its registrations, its actuator and its operator."""

    replicas: int
    """Workers that the actuator has been told to run, those that still start included, those that drain not."""
    ready: int
    """Of these, registered and not draining."""
    kv_tokens: int = 0
    """KV memory of the ready ones together."""
    manual: int | None = None
    """What an operator has fixed; None: nothing, or released again."""


class Observation(Struct, frozen=True):
    """What was seen of one model. ``None`` is what could not be read: it is never taken for zero."""

    load: Load | None
    rates: Rates
    prefill: PoolSeen | None
    decode: PoolSeen | None


class Memory(Struct, frozen=True):
    """Carried from each decision to the next; a controller that starts anew begins with ``Memory()``."""

    prefill: PoolMemory = PoolMemory()
    decode: PoolMemory = PoolMemory()
    kv_tokens_per_worker: float | None = None
    """Of the decode workers last seen, for when there are none."""
    busy_s: float | None = None
    """When there last was any request."""


class PoolDecision(Struct, frozen=True):
    replicas: int | None
    """None: leave the actuator alone, nothing is known of this pool."""
    cause: Cause
    why: str
    inputs: Mapping[str, float]
    """The figures from which it was decided."""


class Decision(Struct, frozen=True):
    prefill: PoolDecision
    decode: PoolDecision
    memory: Memory


def decide(seen: Observation, limits: ScalingSettings, memory: Memory, now_s: float) -> Decision:
    """The next sizes of both pools, each with its inputs and the reason in words."""
    memory = _remember(seen, memory, limits, now_s)
    load = seen.load
    if load is None:
        why = "the ledger's counters could not be read"
        prefill, decode = (_hold(pool, why) for pool in (seen.prefill, seen.decode))
        prefill_bounds = decode_bounds = Bounds(0, 0)
    else:
        idle_s = now_s - memory.busy_s if memory.busy_s is not None else 0.0
        prefill_bounds, decode_bounds = _bounds(load, seen, limits, idle_s)
        piled = _piled(load, seen.decode, limits)
        prefill = _prefill(load, seen.rates, seen.prefill, limits, piled)
        decode = _decode(load, seen, limits, memory, piled)
    prefill_said, prefill_memory = _size(seen.prefill, prefill, prefill_bounds, memory.prefill, limits, now_s)
    decode_said, decode_memory = _size(seen.decode, decode, decode_bounds, memory.decode, limits, now_s)
    return Decision(prefill_said, decode_said, replace(memory, prefill=prefill_memory, decode=decode_memory))


# --- What the load calls for ------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """What one pool needs; without ``need`` nothing can be said, and it stays as it is."""

    need: Need | None
    why: str
    inputs: Mapping[str, float] = {}
    because: Cause | None = None
    """The cause of staying, where the pacing cannot know it."""


def _hold(pool: PoolSeen | None, why: str) -> _Wanted:
    return _Wanted(None, why if pool is not None else "this pool's registrations could not be read")


def _prefill(load: Load, rates: Rates, pool: PoolSeen | None, limits: ScalingSettings, piled: int) -> _Wanted:
    """Enough workers for what arrives, and for what waits as far as those that are there will not have cleared it by
    the time at which a worker that is asked for now could help."""
    if pool is None:
        return _hold(pool, "")
    speed, arriving = rates.prefill_tokens_per_s, rates.arrived_tokens_per_s
    waiting = _waiting_tokens(load, pool)
    if not speed or arriving is None:
        why = f"{waiting:.0f} prompt tokens wait, but how fast a worker computes was not measured yet: holding"
        return _Wanted(Need(1, 1, max(1, pool.replicas)), why, {"waiting_tokens": waiting}, Cause.NO_METRICS)

    coming = max(0, pool.replicas - pool.ready) / 2  # on average half-way through their start
    cleared = ((pool.ready + coming) * speed - arriving) * limits.startup_s
    lasting = max(0.0, waiting - cleared) if waiting else 0.0

    def workers(utilization: float, wait_s: float) -> int:
        flow = arriving / (speed * utilization)
        backlog = (arriving + lasting / wait_s) / speed if lasting else 0.0
        return _ceil(max(flow, backlog))

    target = workers(limits.prefill_utilization_target, limits.prefill_wait_target_s)
    need = Need(
        activation=workers(limits.prefill_utilization_activation, limits.prefill_wait_activation_s),
        target=target,
        keep=target,
    )
    wait_s = waiting / (speed * max(1, pool.ready))
    inputs = {
        "waiting_tokens": waiting,
        "lasting_tokens": lasting,
        "wait_s": wait_s,
        "arriving_tokens_per_s": arriving,
        "tokens_per_s_per_worker": speed,
    }
    why = f"{arriving:.0f} tokens/s arrive, a worker computes {speed:.0f}; the queue's wait is {wait_s:.1f} s"
    if piled and need.activation > pool.replicas:
        # Prefill that runs further ahead would only hold more memory that nobody fetches.
        held_back = Need(pool.replicas, pool.replicas, max(pool.replicas, need.keep))
        why += f"; {piled} handoffs wait to be fetched: decode is what is missing"
        return _Wanted(held_back, why, inputs, Cause.HANDOFFS)
    return _Wanted(need, why, inputs)


def _waiting_tokens(load: Load, pool: PoolSeen) -> float:
    """Queued, and pulled but not yet computed: a worker computes one prompt at a time, whatever it has pulled."""
    requests, tokens = load.requests.get(State.PREFILLING, 0), load.prompt_tokens.get(State.PREFILLING, 0)
    behind = tokens * max(0, requests - pool.ready) / requests if requests else 0.0
    return load.prompt_tokens.get(State.QUEUED, 0) + behind


def _decode(load: Load, seen: Observation, limits: ScalingSettings, memory: Memory, piled: int) -> _Wanted:
    """Room for the sequences that decode, wait to be fetched, or are being prefilled, and for those that prefill will
    deliver before a worker that is asked for now could help. To keep, also for everything queued."""
    pool = seen.decode
    if pool is None:
        return _hold(pool, "")
    near = (State.FETCHED, State.READY, State.PREFILLING)
    sequences = sum(load.requests.get(state, 0) for state in near)
    reserved = sum(load.reserved_tokens.get(state, 0) for state in near)
    queued, queued_reserved = load.requests.get(State.QUEUED, 0), load.reserved_tokens.get(State.QUEUED, 0)
    coming = _coming(load, seen, limits)
    kv_per_worker = memory.kv_tokens_per_worker or math.inf

    def workers(of_queue: float, per_worker: int, kv_share: float) -> int:
        """For what is near and this part of the queue."""
        by_seats = (sequences + of_queue * queued) / per_worker
        return _ceil(max(by_seats, (reserved + of_queue * queued_reserved) / (kv_per_worker * kv_share)))

    activation = workers(coming, limits.decode_sequences_activation, limits.decode_kv_activation)
    target = workers(coming, limits.decode_sequences_target, limits.decode_kv_target)
    keep = workers(1.0, limits.decode_sequences_target, limits.decode_kv_target)
    share = reserved / (kv_per_worker * max(1, pool.ready))
    inputs = {
        "sequences": sequences,
        "coming": coming * queued,
        "reserved_tokens": reserved,
        "kv_share": share,
        "handoffs_waiting": load.requests.get(State.READY, 0),
        "queued_requests": queued,
    }
    why = f"{sequences} sequences decode or are about to, {share:.0%} of the KV memory is reserved"
    if coming:
        why += f"; {coming * queued:.0f} more will come from the queue"
    if piled:
        activation = max(activation, pool.replicas + 1)
        target = max(target, pool.replicas + _ceil(piled / limits.decode_sequences_target))
        why += f"; {piled} handoffs wait to be fetched"
    return _Wanted(Need(activation, target, max(keep, target)), why, inputs)


def _coming(load: Load, seen: Observation, limits: ScalingSettings) -> float:
    """The part of the queue by which decode will have grown when a new worker would be ready: what prefill can compute
    until then, less what ends until then. A long queue before a slow prefill is no reason for decode to grow."""
    tokens = load.prompt_tokens.get(State.QUEUED, 0)
    if seen.prefill is None or not tokens:
        return 0.0
    computed = (seen.rates.prefill_tokens_per_s or 0.0) * seen.prefill.replicas * limits.startup_s
    ended = (seen.rates.ended_requests_per_s or 0.0) * limits.startup_s
    return max(0.0, min(1.0, computed / tokens) - ended / max(1, load.requests.get(State.QUEUED, 0)))


# --- Coupling ---------------------------------------------------------------------------------------------------------


def _piled(load: Load, decode: PoolSeen | None, limits: ScalingSettings) -> int:
    """Handoffs that wait, if they are more than the decode workers that were asked for will just take; else 0."""
    ready = load.requests.get(State.READY, 0)
    return ready if decode is not None and ready > limits.handoffs_activation * max(1, decode.replicas) else 0


def _bounds(load: Load, seen: Observation, limits: ScalingSettings, idle_s: float) -> tuple[Bounds, Bounds]:
    """Both may be at zero, or neither: alone a pool is of no use."""
    pools = (seen.prefill, seen.decode)
    may_sleep = limits.prefill_min == limits.decode_min == 0 and not any(pool and pool.manual for pool in pools)
    asleep = all(pool is not None and pool.replicas == 0 for pool in pools)
    if may_sleep and not _requests(load) and (asleep or idle_s >= limits.idle_s):
        return Bounds(0, 0), Bounds(0, 0)
    floors = max(1, limits.prefill_min), max(1, limits.decode_min)
    return Bounds(floors[0], max(floors[0], limits.prefill_max)), Bounds(floors[1], max(floors[1], limits.decode_max))


# --- Each pool --------------------------------------------------------------------------------------------------------


def _size(
    pool: PoolSeen | None,
    wanted: _Wanted,
    bounds: Bounds,
    memory: PoolMemory,
    limits: ScalingSettings,
    now_s: float,
) -> tuple[PoolDecision, PoolMemory]:
    inputs = dict(wanted.inputs)
    if pool is None:
        return PoolDecision(memory.decided, Cause.NO_METRICS, f"{wanted.why}: holding", inputs), memory
    inputs |= {"replicas": pool.replicas, "ready": pool.ready}
    if pool.manual is not None:
        changed_s = now_s if pool.manual != pool.replicas else memory.changed_s
        fixed = PoolMemory(decided=pool.manual, changed_s=changed_s, seen=memory.seen)
        return PoolDecision(pool.manual, Cause.MANUAL, f"an operator has fixed {pool.manual}", inputs), fixed
    if wanted.need is None:
        held = replace(memory, decided=pool.replicas)
        return PoolDecision(pool.replicas, Cause.NO_METRICS, f"{wanted.why}: holding", inputs), held
    if bounds.most == 0:
        cause = Cause.TO_ZERO if pool.replicas else Cause.STEADY
        return PoolDecision(0, cause, "there was nothing to do, for either pool", inputs), PoolMemory(decided=0)
    step = pace(wanted.need, pool.replicas, bounds, memory, limits, now_s)
    cause = wanted.because if wanted.because and step.replicas == pool.replicas else step.cause
    return PoolDecision(step.replicas, cause, f"{wanted.why}; {step.why}", inputs), step.memory


def _remember(seen: Observation, memory: Memory, limits: ScalingSettings, now_s: float) -> Memory:
    if seen.prefill is not None:
        memory = replace(memory, prefill=note(memory.prefill, seen.prefill.replicas, seen.prefill.ready, limits, now_s))
    if seen.decode is not None:
        memory = replace(memory, decode=note(memory.decode, seen.decode.replicas, seen.decode.ready, limits, now_s))
        if seen.decode.ready and seen.decode.kv_tokens:
            memory = replace(memory, kv_tokens_per_worker=seen.decode.kv_tokens / seen.decode.ready)
    if memory.busy_s is None or (seen.load is not None and _requests(seen.load)):
        memory = replace(memory, busy_s=now_s)
    return memory


def _requests(load: Load) -> int:
    return sum(load.requests.get(state, 0) for state in LIVE)


def _ceil(workers: float) -> int:
    """Whole workers; a rounding error is not a worker, and beyond any number there is one that bounds can cut."""
    return math.ceil(min(workers, 1e9) - 1e-9)
