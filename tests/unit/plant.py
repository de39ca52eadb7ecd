"""Two pools as a fluid, for closed loops with the scaling policy on a simulated clock: no noise, no randomness.

Requests flow from a queue through prefill workers of a fixed speed, wait as handoffs, and decode for a fixed time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdq.core.handoff import State
from pdq.core.load import Count, Load, Meter, Tally, measure
from pdq.core.pacing import Cause
from pdq.core.scaling import Decision, Memory, Observation, PoolSeen, decide
from pdq.core.settings import ScalingSettings

SPEED = 1_000.0
"""Prompt tokens per second of one prefill worker."""
KV_TOKENS = 100_000
SEATS = 64
"""Sequences that one decode worker takes at most."""


@dataclass
class Workers:
    started: list[float]
    startup_s: float
    broken: int = 0
    """So many of the next ones that start never become ready."""
    manual: int | None = None

    def ready(self, now_s: float) -> int:
        return sum(now_s - at >= self.startup_s for at in self.started)

    def resize(self, replicas: int, now_s: float) -> None:
        while len(self.started) > replicas:
            self.started.remove(min(self.started))
        while len(self.started) < replicas:
            self.started.append(float("inf") if self.broken else now_s)
            self.broken -= bool(self.broken)


@dataclass
class Plant:
    limits: ScalingSettings
    prefill: int = 1
    decode: int = 1
    startup_s: float = 20.0
    prompt_tokens: int = 500
    output_tokens: int = 500
    decode_s: float = 10.0
    offered: Callable[[float], float] = lambda now_s: 0.0
    """Requests per second at this time."""
    window: int = 16
    blind: Callable[[float], bool] = lambda now_s: False
    """Whether the counters cannot be read at this time."""

    now_s: float = 0.0
    queued: float = 0.0
    ready: float = 0.0
    decoding: float = 0.0
    accepted: float = 0.0
    ended: float = 0.0
    computed: float = 0.0
    busy_s: float = 0.0
    memory: Memory = field(default_factory=Memory)
    meter: Meter = field(default_factory=Meter)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pools = (
            Workers([-1e9] * self.prefill, self.startup_s),
            Workers([-1e9] * self.decode, self.startup_s),
        )

    def run(self, seconds: float) -> "Plant":
        for _ in range(int(seconds)):
            if self.now_s % self.limits.period_s == 0:
                self._decide()
            self._flow()
            self.now_s += 1.0
        return self

    def sizes(self, since_s: float = 0.0) -> list[tuple[int | None, int | None]]:
        return [(it.prefill.replicas, it.decode.replicas) for at, it in self.decisions if at >= since_s]

    def causes(self) -> set[tuple[Cause, Cause]]:
        return {(it.prefill.cause, it.decode.cause) for _, it in self.decisions}

    @property
    def size(self) -> tuple[int | None, int | None]:
        return self.sizes()[-1]

    @property
    def wait_s(self) -> float:
        return self.queued * self.prompt_tokens / SPEED / max(1, len(self.pools[0].started))

    def _flow(self) -> None:
        prefill, decode = (pool.ready(self.now_s) for pool in self.pools)
        arriving = self.offered(self.now_s)
        self.queued += arriving
        self.accepted += arriving
        computed = min(self.queued, prefill * SPEED / self.prompt_tokens, max(0.0, prefill * self.window - self.ready))
        self.queued -= computed
        self.ready += computed
        self.computed += computed * self.prompt_tokens
        self.busy_s += computed * self.prompt_tokens / SPEED
        taken = min(self.ready, max(0.0, decode * SEATS - self.decoding))
        self.ready -= taken
        self.decoding += taken
        ended = self.decoding / self.decode_s if self.decoding > 0.1 else self.decoding
        self.decoding -= ended
        self.ended += ended

    def _decide(self) -> None:
        load = None if self.blind(self.now_s) else self._load()
        if load is not None:
            tallies = {"all": Tally(int(self.computed), self.busy_s)}
            self.meter = measure(self.meter, load, tallies, self.now_s)
        prefill, decode = self.pools
        seen = Observation(load, self.meter.rates, self._seen(prefill), self._seen(decode, KV_TOKENS))
        decision = decide(seen, self.limits, self.memory, self.now_s)
        self.memory = decision.memory
        self.decisions.append((self.now_s, decision))
        for pool, said in ((prefill, decision.prefill), (decode, decision.decode)):
            if said.replicas is not None:
                pool.resize(said.replicas, self.now_s)

    def _seen(self, pool: Workers, kv_tokens: int = 0) -> PoolSeen:
        ready = pool.ready(self.now_s)
        return PoolSeen(len(pool.started), ready, ready * kv_tokens, pool.manual)

    def _load(self) -> Load:
        counts = {State.QUEUED: self.queued, State.READY: self.ready, State.FETCHED: self.decoding}
        whole = {state: self._count(requests) for state, requests in counts.items()}
        return Load(
            requests={state: count.requests for state, count in whole.items()},
            prompt_tokens={state: count.prompt_tokens for state, count in whole.items()},
            reserved_tokens={state: count.reserved_tokens for state, count in whole.items()},
            accepted=self._count(self.accepted),
            ended=self._count(self.ended),
        )

    def _count(self, requests: float) -> Count:
        reserved = requests * (self.prompt_tokens + self.output_tokens)
        return Count(round(requests), round(requests * self.prompt_tokens), round(reserved))
