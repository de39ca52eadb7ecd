"""The fleet as discrete events: arrivals, prefill, handoff, transfer, decode steps, workers that come and go.

Everything that decides is the real thing: ``admit``, ``prefill_room`` and ``decode_room`` on every request, a ``Meter`` and
a scaler on every period, all on a ``Load`` that is kept as a ledger keeps it. Only time is pretended. Not modelled: prefix
caches, batched prefill, clients that come back after a refusal, workers that fail.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from pdq.core.admission import Capacity, Refused, admit, decode_room, prefill_room
from pdq.core.admission import Request as Asked
from pdq.core.handoff import LIVE, State
from pdq.core.load import Count, Load, Meter, Tally, measure
from pdq.core.scaling import Observation, PoolSeen
from pdq.core.settings import AdmissionSettings
from pdq.simulate.profile import Profile
from pdq.simulate.traces import Arrival
from pdq.simulate.workers import DecodeWorker, PrefillWorker, Request


class Scaler(Protocol):
    """A policy under comparison: (prefill, decode) workers for what is seen."""

    def sizes(self, seen: Observation, now_s: float) -> tuple[int, int]: ...


class Books:
    """The counters of the one model, moved as a ledger moves them."""

    def __init__(self) -> None:
        self._requests = dict.fromkeys(LIVE, 0)
        self._prompt = dict.fromkeys(LIVE, 0)
        self._reserved = dict.fromkeys(LIVE, 0)
        self._accepted = self._ended = Count()

    def accept(self, request: Request) -> None:
        self._accepted = _plus(self._accepted, request)
        self._count(State.QUEUED, request, 1)

    def move(self, request: Request, start: State, end: State) -> None:
        self._count(start, request, -1)
        if end is State.DONE:
            self._ended = _plus(self._ended, request)
        else:
            self._count(end, request, 1)

    def load(self) -> Load:
        queued = Count(self._requests[State.QUEUED], self._prompt[State.QUEUED], self._reserved[State.QUEUED])
        return Load(
            requests=dict(self._requests),
            prompt_tokens=dict(self._prompt),
            reserved_tokens=dict(self._reserved),
            queued={"interactive": {"": queued}} if queued.requests else {},
            tenants={},  # a trace names no tenants, so their limits do not bind
            accepted=self._accepted,
            ended=self._ended,
        )

    def _count(self, state: State, request: Request, sign: int) -> None:
        self._requests[state] += sign
        self._prompt[state] += sign * request.prompt_tokens
        self._reserved[state] += sign * request.reserved_tokens


class Fleet:
    def __init__(
        self,
        profile: Profile,
        admission: AdmissionSettings,
        scaler: Scaler,
        *,
        start: tuple[int, int],
        startup_s: float,
        period_s: float,
        max_running: int,
        timeout_s: float,
    ) -> None:
        self._profile = profile
        self._kv_tokens = profile.kv_tokens
        self._admission = admission
        self._scaler = scaler
        self._startup_s = startup_s
        self._period_s = period_s
        self._max_running = max_running
        self._timeout_s = timeout_s
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._books = Books()
        self._meter = Meter()
        self._queued: deque[Request] = deque()
        self._ready: deque[Request] = deque()
        self._prefill: list[PrefillWorker] = []
        self._decode: list[DecodeWorker] = []
        self.prefill_workers: list[PrefillWorker] = []
        """All that ever were, as ``decode_workers``."""
        self.decode_workers: list[DecodeWorker] = []
        self._resize(start, startup_s=0.0)
        self.changes = [0, 0]
        """How often each pool's size was changed."""
        self.sizes: list[tuple[float, int, int]] = []
        """(when, prefill, decode) at every decision."""

    def run(self, arrivals: Sequence[Arrival]) -> list[Request]:
        """Every request of the trace, served or refused. Scaling ends with the trace; what is accepted is finished."""
        requests = [Request(it, it.prompt_tokens + it.max_new_tokens) for it in arrivals]
        end_s = arrivals[-1].at_s
        self._at(0.0, self._observe, end_s)
        events = self._events
        for request in requests:
            while events and events[0][0] <= request.arrival.at_s:
                self._next()
            self._now_s = request.arrival.at_s
            self._arrive(request)
        while events:
            self._next()
        return requests

    # --- Events -------------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, happen: Callable[[Any], None], what: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen, what))

    def _next(self) -> None:
        self._now_s, _, happen, what = heapq.heappop(self._events)
        happen(what)

    def _arrive(self, request: Request) -> None:
        ready = [it for it in self._decode if it.ready_s <= self._now_s]
        capacity = Capacity(
            prefill_workers=sum(it.ready_s <= self._now_s for it in self._prefill),
            decode_workers=len(ready),
            decode_kv_tokens=len(ready) * self._kv_tokens,
            can_start=True,
            rates=self._meter.rates,
        )
        if request.reserved_tokens > self._kv_tokens:
            request.refused = "context"
            return
        asked = Asked(request.prompt_tokens, request.arrival.max_new_tokens, deadline_s=self._now_s + self._timeout_s)
        outcome = admit(self._books.load(), capacity, self._admission, asked, self._now_s)
        if isinstance(outcome, Refused):
            request.refused = outcome.reason
            return
        self._books.accept(request)
        self._queued.append(request)
        self._pull_prefill()

    def _computed(self, worker: PrefillWorker) -> None:
        request = worker.computing
        assert request is not None
        worker.computing = None
        request.first_s = self._now_s
        if request.arrival.output_tokens == 1:
            request.last_s = self._now_s
            self._books.move(request, State.PREFILLING, State.DONE)
            worker.held_tokens -= request.prompt_tokens
            self._leave(worker)
        else:
            self._books.move(request, State.PREFILLING, State.READY)
            worker.held += 1
            self._ready.append(request)
            self._pull_decode()
        self._pull_prefill()

    def _fetched(self, landed: tuple[DecodeWorker, Request]) -> None:
        worker, request = landed
        source = request.source
        assert source is not None
        source.held -= 1
        source.held_tokens -= request.prompt_tokens
        self._books.move(request, State.READY, State.FETCHED)
        worker.transferring -= 1
        worker.joining.append(request)
        if worker.running:
            self._next_boundary(worker, worker.steps_until(self._now_s))
        else:
            worker.since_s = self._now_s
            self._join(worker)
        self._leave(source)
        self._pull_prefill()
        self._pull_decode()

    def _boundary(self, planned: tuple[DecodeWorker, int, int]) -> None:
        worker, steps, plan = planned
        if plan != worker.plan:
            return
        worker.steps += steps
        worker.context += worker.running * steps
        worker.since_s = self._now_s
        worker.planned = 0
        ended = bool(worker.ends) and worker.ends[0][0] <= worker.steps
        while worker.ends and worker.ends[0][0] <= worker.steps:
            request = heapq.heappop(worker.ends)[2]
            request.last_s = self._now_s
            worker.running -= 1
            worker.context -= request.prompt_tokens + request.arrival.output_tokens
            worker.reserved -= request.reserved_tokens
            self._books.move(request, State.FETCHED, State.DONE)
        self._join(worker)
        if ended:
            self._leave(worker)
            self._pull_decode()

    def _join(self, worker: DecodeWorker) -> None:
        """Between two steps: take in who has landed, and go on to the next end if there is anybody."""
        for request in worker.joining:
            worker.running += 1
            worker.context += request.prompt_tokens + 1  # the first token came from prefill
            last = worker.steps + request.arrival.output_tokens - 1
            heapq.heappush(worker.ends, (last, next(self._order), request))
        worker.joining.clear()
        if worker.running:
            self._next_boundary(worker, worker.ends[0][0] - worker.steps)

    def _next_boundary(self, worker: DecodeWorker, steps: int) -> None:
        """Something happens to the batch after so many steps, unless something is planned to happen earlier."""
        if not worker.planned or steps < worker.planned:
            worker.planned, worker.plan = steps, worker.plan + 1
            at_s = max(self._now_s, worker.since_s + worker.elapsed_s(steps))
            self._at(at_s, self._boundary, (worker, steps, worker.plan))

    def _started(self, _: None) -> None:
        self._pull_prefill()
        self._pull_decode()

    # --- Pulling ------------------------------------------------------------------------------------------------------

    def _pull_prefill(self) -> None:
        while self._queued:
            request = self._queued[0]
            worker = min(
                (it for it in self._prefill if self._may_compute(it, request)),
                key=lambda it: it.held_tokens,
                default=None,
            )
            if worker is None:
                return
            self._queued.popleft()
            self._books.move(request, State.QUEUED, State.PREFILLING)
            seconds = self._profile.prefill_s(request.prompt_tokens)
            request.source = worker
            worker.computing = request
            worker.held_tokens += request.prompt_tokens
            worker.tokens += request.prompt_tokens
            worker.busy_s += seconds
            self._at(self._now_s + seconds, self._computed, worker)

    def _may_compute(self, worker: PrefillWorker, request: Request) -> bool:
        return (
            worker.computing is None
            and worker.ready_s <= self._now_s
            and prefill_room(worker.held, 0, 0.0, self._admission) > 0
            and worker.held_tokens + request.prompt_tokens <= self._kv_tokens
        )

    def _pull_decode(self) -> None:
        while self._ready:
            request = self._ready[0]
            worker = min(
                (it for it in self._decode if self._may_decode(it, request)),
                key=lambda it: it.reserved,
                default=None,
            )
            if worker is None:
                return
            self._ready.popleft()
            worker.transferring += 1
            worker.reserved += request.reserved_tokens
            self._at(self._now_s + self._profile.transfer_s(request.prompt_tokens), self._fetched, (worker, request))

    def _may_decode(self, worker: DecodeWorker, request: Request) -> bool:
        return (
            worker.ready_s <= self._now_s
            and worker.sequences < self._max_running
            and decode_room(worker.transferring, self._admission) > 0
            and worker.reserved + request.reserved_tokens <= self._kv_tokens
        )

    # --- Scaling ------------------------------------------------------------------------------------------------------

    def _observe(self, end_s: float) -> None:
        load = self._books.load()
        tallies = {it.name: Tally(it.tokens, it.busy_s) for it in self._prefill}
        self._meter = measure(self._meter, load, tallies, self._now_s)
        prefill = PoolSeen(len(self._prefill), sum(it.ready_s <= self._now_s for it in self._prefill))
        ready = sum(it.ready_s <= self._now_s for it in self._decode)
        decode = PoolSeen(len(self._decode), ready, ready * self._kv_tokens)
        sizes = self._scaler.sizes(Observation(load, self._meter.rates, prefill, decode), self._now_s)
        self.changes[0] += sizes[0] != prefill.replicas
        self.changes[1] += sizes[1] != decode.replicas
        self.sizes.append((self._now_s, *sizes))
        self._resize(sizes, self._startup_s)
        if self._now_s + self._period_s <= end_s:
            self._at(self._now_s + self._period_s, self._observe, end_s)

    def _resize(self, sizes: tuple[int, int], startup_s: float) -> None:
        ready_s = self._now_s + startup_s
        while len(self._prefill) < sizes[0]:
            prefill = PrefillWorker(self._profile, self._now_s, ready_s, name=f"p{next(self._order)}")
            self._prefill.append(prefill)
            self.prefill_workers.append(prefill)
        while len(self._decode) < sizes[1]:
            decode = DecodeWorker(self._profile, self._now_s, ready_s)
            self._decode.append(decode)
            self.decode_workers.append(decode)
        self._at(ready_s, self._started, None)
        while len(self._prefill) > sizes[0]:
            self._drain(self._prefill)
        while len(self._decode) > sizes[1]:
            self._drain(self._decode)

    def _drain(self, pool: list[Any]) -> None:
        """The one that holds least, and of these the one that started last: it pulls no more, and goes when empty."""
        victim = min(pool, key=lambda it: (it.state_held, -it.ready_s))
        pool.remove(victim)
        victim.draining = True
        self._leave(victim)

    def _leave(self, worker: PrefillWorker | DecodeWorker) -> None:
        if worker.draining and worker.empty and worker.gone_s is None:
            worker.gone_s = self._now_s


def hours(workers: Sequence[PrefillWorker] | Sequence[DecodeWorker], until_s: float) -> float:
    return math.fsum(it.alive_s(until_s) for it in workers) / 3_600


def _plus(total: Count, request: Request) -> Count:
    return Count(
        total.requests + 1,
        total.prompt_tokens + request.prompt_tokens,
        total.reserved_tokens + request.reserved_tokens,
    )
