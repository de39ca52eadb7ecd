"""The Valkey ledger against a model written from the contract, under any order of actors, crashes and clock steps.

The model knows nothing of ``TRANSITIONS`` or ``RULES``: it spells the contract out once more, by hand, so that a slip in
the tables, in Lua or in the counters shows as a difference. A crashed worker is one that never acts again; a slow one
acts with an epoch that others have overtaken: both are in what Hypothesis draws.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis

from pdq.adapters.processes import Server
from pdq.adapters.redis import RedisLedger, connect
from pdq.core.errors import PdqError
from pdq.core.handoff import LIVE, Event, Side, State
from pdq.core.lease import Hold, RecordKey
from pdq.core.load import Count, total
from pdq.core.messages import Policy, Priority
from pdq.core.settings import LeaseSettings, RedisSettings
from pdq.ports import Changes, NewRecord

TTL = 300
LOOK = 700
"""After so long in ``queued`` the reaper shall look."""
CLOCK_KEY = "pdq:test:clock"
STEERED = f"local function clock() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"

SOURCES = ("p1", "p2")
SINKS = ("d1", "d2")
REQUESTS = ("r1", "r2")
CLASSES: dict[str, Priority] = {"r1": "interactive", "r2": "batch"}
TENANTS = {"r1": "a:b", "r2": ""}
ENDS = (Event.FINISH, Event.FAIL, Event.CANCEL, Event.EXPIRE)
OTHER_EVENTS = [event for event in Event if event not in (Event.BEGIN, Event.CLAIM, *ENDS)]


@dataclass
class Model:
    """One record, as the contract describes it. A lease is (worker, epoch, until)."""

    deadline: int
    max_attempts: int
    retain: str
    prompt: int
    state: str = "queued"
    attempt: int = 0
    epoch: int = 0
    source: tuple[str, int, int] | None = None
    sink: tuple[str, int, int] | None = None
    emitted: int = 0
    look: int | None = None
    log: list[str] = field(default_factory=lambda: ["enqueue"])

    @property
    def live(self) -> bool:
        return self.state in ("queued", "prefilling", "ready", "fetched")

    @property
    def count(self) -> Count:
        return Count(1, self.prompt, self.prompt + 7)

    def expiry(self) -> int:
        return min([self.deadline, *(lease[2] for lease in (self.source, self.sink) if lease)])

    def due(self) -> int:
        return self.expiry() if self.look is None or self.state != "queued" else min(self.expiry(), self.look)

    def resting(self) -> tuple[str, int, int] | None:
        return {"prefilling": self.source, "ready": self.sink, "fetched": self.sink}.get(self.state)

    def act(self, event: str, worker: str, epoch: int | None, now: int) -> bool:
        """Whether the contract allows it; if so, it has happened."""
        allowed = self.live and self._allowed(event, epoch, now)
        if allowed:
            self._happen(event, worker, now)
            self.log.append(event)
        return allowed

    def _allowed(self, event: str, epoch: int | None, now: int) -> bool:
        in_time = now < self.deadline
        source, sink = _is(self.source, epoch, now), _is(self.sink, epoch, now)
        rests = self.resting()
        holder = _is(rests, epoch, now) if epoch is not None else not (rests and now < rests[2])
        match event:
            case "begin":
                free = not (self.source and now < self.source[2])
                return in_time and free and self.state in ("queued", "prefilling") and self.attempt < self.max_attempts
            case "claim":
                free = not (self.sink and now < self.sink[2])
                return in_time and free and self.state in ("prefilling", "ready")
            case "ready" | "adopt":
                return in_time and source and self.state == "prefilling"
            case "fetched":
                return in_time and sink and self.state == "ready"
            case "finish":
                return holder and self.state in ("prefilling", "fetched")
            case "requeue":
                return in_time and holder and self.state in ("prefilling", "ready", "fetched")
            case "yield":
                return in_time and holder and self.state in ("ready", "fetched")
            case "fail" | "cancel":
                return epoch is None or source or sink
            case "expire":
                return not in_time and (epoch is None or source or sink)
        raise AssertionError(event)

    def _happen(self, event: str, worker: str, now: int) -> None:
        match event:
            case "begin":
                self.attempt += 1
                self.epoch += 1
                self.state, self.source, self.sink = "prefilling", (worker, self.epoch, now + TTL), None
            case "claim":
                self.epoch += 1
                self.sink = (worker, self.epoch, now + TTL)
            case "ready":
                self.state = "ready"
            case "adopt":
                self.state, self.sink, self.source = "fetched", self.source, None
            case "fetched":
                self.state = "fetched"
                if self.retain == "fetched":
                    self.source = None
            case "yield":
                self.state, self.sink = "ready", None
            case "requeue":
                self.state, self.source, self.sink, self.look = "queued", None, None, now + LOOK
            case _:
                ends = {"finish": "done", "fail": "failed", "cancel": "cancelled", "expire": "expired"}
                self.state, self.source, self.sink = ends[event], None, None


def _is(lease: tuple[str, int, int] | None, epoch: int | None, now: int) -> bool:
    return lease is not None and lease[1] == epoch and now < lease[2]


requests = st.sampled_from(REQUESTS)
HOLDER = "the holder"
"""Stands for whoever holds the lease in question: the authors that matter most shall come often."""
actors = st.sampled_from((HOLDER, *SOURCES, *SINKS, ""))
sides = st.sampled_from(Side)


class Storm(RuleBasedStateMachine):
    """Two requests, two sources, two sinks, and whoever else comes."""

    runner: asyncio.Runner
    client: Redis
    ledger: RedisLedger
    models = count()

    @initialize(max_attempts=st.integers(1, 4))
    def start(self, max_attempts: int) -> None:
        number = next(self.models)
        self.model = f"storm {number}"
        retain: Any = ("fetched", "done")[number % 2]
        self.now = 1_000_000
        self.records: dict[str, Model] = {}
        self.epochs: dict[tuple[str, str], int] = {}
        self.seen: dict[str, int] = {}
        self.step(0)
        for name, timeout in zip(REQUESTS, (1_000, 5_000), strict=True):
            prompt = timeout // 100
            new = NewRecord(
                *(self.key(name), "r", prompt, 7, timeout, "s", Policy(max_attempts=max_attempts, retain=retain)),
                tenant=TENANTS[name],
                priority=CLASSES[name],
            )
            self.run(self.ledger.enqueue(new))
            self.records[name] = Model(self.now + timeout, max_attempts, retain, prompt, look=self.now + LOOK)

    def run(self, coroutine: Any) -> Any:
        """The result, or the refusal."""
        try:
            return self.runner.run(coroutine)
        except PdqError as refused:
            return refused

    def key(self, request: str) -> RecordKey:
        return RecordKey(self.model, request)

    def side(self, request: str, side: Side) -> tuple[str, int, int] | None:
        return self.records[request].source if side is Side.SOURCE else self.records[request].sink

    @rule(request=requests, worker=st.sampled_from(SOURCES))
    def begin(self, request: str, worker: str) -> None:
        self.take(Event.BEGIN, request, worker)

    @rule(request=requests, worker=st.sampled_from(SINKS))
    def claim(self, request: str, worker: str) -> None:
        self.take(Event.CLAIM, request, worker)

    @rule(
        request=requests,
        source=st.sampled_from(SOURCES),
        sink=st.sampled_from(SINKS),
        adopt=st.booleans(),
        steps=st.integers(1, 4),
    )
    def proceed(self, request: str, source: str, sink: str, adopt: bool, steps: int) -> None:
        """The next steps of a request that nobody disturbs: without them, few storms would get far."""
        record = self.records[request]
        for _ in range(steps):
            match record.state:
                case "queued":
                    self.take(Event.BEGIN, request, source)
                case "prefilling":
                    self.act(request, HOLDER, Event.ADOPT if adopt else Event.READY)
                case "ready" if record.sink:
                    self.act(request, HOLDER, Event.FETCHED)
                case "ready":
                    self.take(Event.CLAIM, request, sink)

    def take(self, event: Event, request: str, worker: str) -> None:
        outcome = self.run(self.ledger.acquire(self.key(request), event, worker, TTL))
        allowed = self.records[request].act(event.value, worker, None, self.now)
        assert isinstance(outcome, PdqError) != allowed, outcome
        if allowed:
            assert outcome.now_ms == self.now
            self.epochs[request, worker] = outcome.epoch

    @rule(request=requests, event=st.sampled_from([*OTHER_EVENTS, Event.FINISH]))
    def holder_acts(self, request: str, event: Event) -> None:
        self.act(request, HOLDER, event)

    @rule(request=requests, event=st.sampled_from([*OTHER_EVENTS, Event.EXPIRE]))
    def anyone_acts(self, request: str, event: Event) -> None:
        self.act(request, "", event)

    @rule(request=requests, worker=actors, event=st.sampled_from([*OTHER_EVENTS, *ENDS]))
    def someone_acts(self, request: str, worker: str, event: Event) -> None:
        self.act(request, worker, event)

    def act(self, request: str, worker: str, event: Event) -> None:
        """With the epoch that this worker got last, however old; nobody in particular names none."""
        if worker == HOLDER:
            worker = (self.records[request].resting() or ("", 0, 0))[0]
        epoch = self.epochs.get((request, worker), 0) if worker else None
        outcome = self.run(self.ledger.apply(self.key(request), event, epoch=epoch, worker=worker))
        allowed = self.records[request].act(event.value, worker, epoch, self.now)
        assert isinstance(outcome, PdqError) != allowed, outcome

    @rule(request=requests, worker=actors, side=sides, emitted=st.integers(0, 9), release=st.booleans())
    def touch(self, request: str, worker: str, side: Side, emitted: int, release: bool) -> None:
        lease = self.side(request, side)
        epoch = lease[1] if lease and worker == HOLDER else self.epochs.get((request, worker), 0)
        call = (
            self.ledger.release(self.key(request), side, epoch)
            if release
            else self.ledger.update(self.key(request), side, epoch, Changes(emitted=emitted))
        )
        outcome = self.run(call)
        allowed = _is(self.side(request, side), epoch, self.now)
        assert isinstance(outcome, PdqError) != allowed
        if allowed and release:
            setattr(self.records[request], side.value, None)
        elif allowed:
            self.records[request].emitted = emitted

    @rule(side=sides)
    def renew(self, side: Side) -> None:
        """Everyone, with every epoch that they still believe in."""
        holds = [Hold(self.key(request), side, epoch) for (request, _), epoch in self.epochs.items()]
        lost = self.run(self.ledger.renew(holds, TTL))
        for hold in holds:
            lease = self.side(hold.key.request_id, side)
            kept = _is(lease, hold.epoch, self.now)
            assert (hold in lost) != kept
            if kept and lease:
                setattr(self.records[hold.key.request_id], side.value, (lease[0], lease[1], self.now + TTL))

    @rule(request=requests, again=st.booleans())
    def reap(self, request: str, again: bool) -> None:
        self.run(self.ledger.reap(self.key(request), look_again=again))
        record = self.records[request]
        record.look = self.now + LOOK if again else None
        record.source = record.source if record.source and self.now < record.source[2] else None
        record.sink = record.sink if record.sink and self.now < record.sink[2] else None

    @rule(request=requests, off=st.sampled_from([-1, 0, 1]))
    def lapse(self, request: str, off: int) -> None:
        """Time passes until just before, at, or just after the moment when something of this request runs out."""
        self.step(max(0, self.records[request].due() + off - self.now))

    @rule(ms=st.sampled_from([1, 100, TTL, 1_000]))
    def step(self, ms: int) -> None:
        self.now += ms
        self.run(self.client.set(CLOCK_KEY, self.now))

    async def look(self) -> tuple[Any, Any, Any, Any, Any]:
        """All that can be asked, in one go."""
        keys = [self.key(name) for name in REQUESTS]
        logs = asyncio.gather(*[self.ledger.history(key) for key in keys])
        load, due = self.ledger.load(self.model), self.ledger.due(self.model, 10)
        return await asyncio.gather(self.ledger.read_many(keys), logs, load, due, self.ledger.live(self.model))

    @invariant()
    def the_ledger_is_what_the_contract_says(self) -> None:
        stored, logs, load, due, live = self.run(self.look())
        for name, record, log in zip(REQUESTS, stored, logs, strict=True):
            model = self.records[name]
            leases = [lease and (lease.worker, lease.epoch, lease.until_ms) for lease in (record.source, record.sink)]
            assert leases == [model.source, model.sink]
            assert (record.state, record.attempt, record.epoch) == (model.state, model.attempt, model.epoch)
            assert record.emitted == model.emitted
            assert record.epoch >= self.seen.get(name, 0)
            self.seen[name] = record.epoch
            assert [entry.event for entry in log] == model.log
            assert sum(entry.state.terminal for entry in log) == (not model.live)
        for state in LIVE:
            there = [record for record in self.records.values() if record.state == state]
            assert load.requests[state] == len(there)
            assert load.prompt_tokens[state] == sum(record.prompt for record in there)
            assert load.reserved_tokens[state] == sum(record.prompt + 7 for record in there)
        there = [(CLASSES[name], TENANTS[name], record) for name, record in self.records.items()]
        assert load.tenants == {tenant: record.count for _, tenant, record in there if record.live}
        assert load.queued == {of: {who: record.count} for of, who, record in there if record.state == "queued"}
        assert load.accepted == total(record.count for _, _, record in there)
        assert load.ended == total(record.count for _, _, record in there if not record.live)
        late = {name for name, record in self.records.items() if record.live and record.due() <= self.now}
        assert {record.key.request_id for record in due} == late
        assert {record.key.request_id for record in live} == {n for n, record in self.records.items() if record.live}


def test_no_storm_makes_the_ledger_and_the_contract_disagree(valkey: Server) -> None:
    with asyncio.Runner() as runner:
        client = runner.run(connect(RedisSettings(url=valkey.url)))
        ledger = RedisLedger(client, LeaseSettings(ttl_ms=LOOK), clock=STEERED)
        machine = type("Storm", (Storm,), {"runner": runner, "client": client, "ledger": ledger})
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    max_examples=100,
                    stateful_step_count=40,
                    deadline=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(ledger.close())
            runner.run(client.aclose())


def test_the_model_itself_can_reach_every_state() -> None:
    def walk(*events: str) -> str:
        model, epochs = Model(1_000, 3, "fetched", 1), {"source": 0, "sink": 0}
        for event in events:
            epoch = {"begin": None, "claim": None, "ready": epochs["source"], "expire": None}.get(event, epochs["sink"])
            assert model.act(event, "w", epoch, 1_000 if event == "expire" else 1)
            epochs = {side: getattr(model, side)[1] if getattr(model, side) else 0 for side in epochs}
        return model.state

    assert walk("begin", "claim", "ready", "fetched", "finish") == State.DONE
    assert walk("begin", "ready", "claim", "yield", "claim", "fetched", "requeue") == State.QUEUED
    assert walk("begin", "expire") == State.EXPIRED
    assert walk("begin", "claim", "fail") == State.FAILED
    with pytest.raises(AssertionError):
        walk("claim")
