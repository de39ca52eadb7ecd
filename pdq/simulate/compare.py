"""One trace under every policy, and how each did: who was served in time, and what that took."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from pdq.core.settings import AdmissionSettings, ScalingSettings
from pdq.simulate.fleet import Fleet, Scaler, hours
from pdq.simulate.profile import Profile
from pdq.simulate.scalers import Coupled, Fixed, Independent
from pdq.simulate.traces import Arrival
from pdq.simulate.workers import Request


class Terms(Struct, frozen=True):
    """What is the same for every policy."""

    ttft_s: float = 1.0
    """Limit of the time to first token."""
    itl_s: float = 0.1
    """Limit of a request's mean time between tokens."""
    startup_s: float = 30.0
    """From the order to start a worker until it is ready."""
    warmup_s: float = 300.0
    """Requests and worker-hours of this first time are not counted: nobody knows the load yet."""
    start: tuple[int, int] = (2, 2)
    """Sizes with which the scaling policies begin."""
    queue_jobs: float = 1.0
    """Prefill jobs (waiting or in hand) per worker that the uncoupled controller aims at."""
    queue_sequences: float = 32.0
    """Decode jobs per worker that it aims at."""
    max_running: int = 256
    """Sequences that one decode worker takes at most."""
    timeout_s: float = 600.0
    """Deadline of every request."""


class Outcome(Struct, frozen=True):
    """One policy's result. Shares are of all requests: one that was refused met no limit."""

    policy: str
    requests: int
    ttft_share: float
    itl_share: float
    both_share: float
    refused: Mapping[str, int]
    ttft_p50_s: float
    ttft_p99_s: float
    """Of those that were served."""
    prefill_hours: float
    decode_hours: float
    prefill_mean: float
    decode_mean: float
    prefill_most: int
    decode_most: int
    changes: int
    """How often a pool's size was changed."""

    @property
    def worker_hours(self) -> float:
        return self.prefill_hours + self.decode_hours


def compare(
    arrivals: Sequence[Arrival],
    profile: Profile,
    admission: AdmissionSettings,
    scaling: ScalingSettings,
    terms: Terms,
) -> list[Outcome]:
    """pdq's policy; pools fixed at the mean sizes that it needed, rounded; two controllers without coupling."""
    coupled = _run("coupled", Coupled(scaling), arrivals, profile, admission, scaling, terms)
    sizes = max(1, round(coupled.prefill_mean)), max(1, round(coupled.decode_mean))
    fixed = _run(
        f"fixed {sizes[0]} + {sizes[1]}",
        Fixed(*sizes),
        arrivals,
        profile,
        admission,
        scaling,
        replace(terms, start=sizes),
    )
    alone = Independent(scaling, terms.queue_jobs, terms.queue_sequences)
    return [coupled, fixed, _run("queue length, uncoupled", alone, arrivals, profile, admission, scaling, terms)]


def _run(
    name: str,
    scaler: Scaler,
    arrivals: Sequence[Arrival],
    profile: Profile,
    admission: AdmissionSettings,
    scaling: ScalingSettings,
    terms: Terms,
) -> Outcome:
    fleet = Fleet(
        profile,
        admission,
        scaler,
        start=terms.start,
        startup_s=terms.startup_s,
        period_s=scaling.period_s,
        max_running=terms.max_running,
        timeout_s=terms.timeout_s,
    )
    requests = [it for it in fleet.run(arrivals) if it.arrival.at_s >= terms.warmup_s]
    end_s = arrivals[-1].at_s
    prefill, decode = (
        hours(pool, end_s) - hours(pool, min(terms.warmup_s, end_s))
        for pool in (fleet.prefill_workers, fleet.decode_workers)
    )
    counted_hours = max(end_s - terms.warmup_s, 1e-9) / 3_600
    sizes = [it for it in fleet.sizes if it[0] >= terms.warmup_s] or fleet.sizes[-1:]
    return Outcome(
        policy=name,
        requests=len(requests),
        ttft_share=_share(it.ttft_s <= terms.ttft_s for it in requests),
        itl_share=_share(it.itl_s <= terms.itl_s for it in requests),
        both_share=_share(it.ttft_s <= terms.ttft_s and it.itl_s <= terms.itl_s for it in requests),
        refused=Counter(it.refused for it in requests if it.refused),
        ttft_p50_s=_quantile(requests, 0.5),
        ttft_p99_s=_quantile(requests, 0.99),
        prefill_hours=prefill,
        decode_hours=decode,
        prefill_mean=prefill / counted_hours,
        decode_mean=decode / counted_hours,
        prefill_most=max(it[1] for it in sizes),
        decode_most=max(it[2] for it in sizes),
        changes=sum(fleet.changes),
    )


def _share(met: Iterable[bool]) -> float:
    outcomes = list(met)
    return sum(outcomes) / len(outcomes) if outcomes else 0.0


def _quantile(requests: Sequence[Request], share: float) -> float:
    served = sorted(it.ttft_s for it in requests if not it.refused)
    return served[min(len(served) - 1, int(share * len(served)))] if served else 0.0
