"""One model whose pools an autoscaler sizes, in memory, on a steered clock. Workers are there once they are asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from prometheus_client import generate_latest

from pdq.adapters.memory import MemoryBoard, MemoryLedger, MemoryRegistry
from pdq.autoscale.loop import Autoscaler
from pdq.autoscale.metrics import Metrics
from pdq.autoscale.observe import Helm
from pdq.autoscale.policies import FollowLoad, Policy
from pdq.core.errors import Unavailable
from pdq.core.lease import RecordKey
from pdq.core.messages import Policy as RequestPolicy
from pdq.core.settings import LeaseSettings, ScalingSettings
from pdq.ports import Actuator, NewRecord, Occupancy, Pool, ScalingReport
from tests.conformance.test_registry import info

MODEL = "m"
LIMITS = ScalingSettings(
    period_s=1.0,
    prefill_wait_target_s=1.0,
    prefill_wait_activation_s=2.0,
    out_window_s=0.0,
    out_cooldown_s=0.0,
    in_window_s=20.0,
    in_cooldown_s=0.0,
    idle_s=30.0,
    startup_s=2.0,
    ready_within_s=10.0,
)
TO_ZERO = replace(LIMITS, prefill_min=0, decode_min=0)


@dataclass
class Levers:
    """An actuator whose workers are there as soon as they are asked for, unless it is ``broken`` or ``slow``."""

    registry: MemoryRegistry
    workers: dict[str, Pool] = field(default_factory=dict)
    calls: list[tuple[Pool, int, Sequence[str]]] = field(default_factory=list)
    broken: set[Pool] = field(default_factory=set)
    blind: bool = False
    said: Mapping[Pool, str] = field(default_factory=dict)
    name: str = "levers"
    started: int = 0

    async def sizes(self) -> Mapping[Pool, int]:
        if self.blind:
            raise Unavailable("the actuator does not answer")
        return {pool: list(self.workers.values()).count(pool) for pool in Pool}

    async def scale(self, pool: Pool, replicas: int, leaving_first: Sequence[str]) -> None:
        self.calls.append((pool, replicas, leaving_first))
        if pool in self.broken:
            raise Unavailable(f"no more {pool} workers: quota exceeded")
        mine = [worker for worker in self.workers if self.workers[worker] is pool]
        for _ in range(replicas - len(mine)):
            self.started += 1
            self.workers[f"{pool}-{self.started}"] = pool
        for worker in [it for it in leaving_first if it in mine][: max(0, len(mine) - replicas)]:
            del self.workers[worker]
            await self.registry.withdraw(worker)

    async def trouble(self, pool: Pool) -> str:
        return self.said.get(pool, "")


class World:
    """One model's servers and pools, and a clock that moves when it is told to."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.now_s = 1_000.0
        self.ledger = MemoryLedger(LeaseSettings(), clock=self.wall_ms)
        self.registry = MemoryRegistry(clock=self.wall_ms)
        self.board = MemoryBoard(clock=self.wall_ms)
        self.levers = Levers(self.registry)
        self.levers.workers = {f"prefill-a{n}": Pool.PREFILL for n in range(prefill)}
        self.levers.workers |= {f"decode-a{n}": Pool.DECODE for n in range(decode)}
        self.metrics = Metrics(MODEL, clock=lambda: self.now_s)
        self.computed = 0
        self.requests = 0
        self.asleep: set[str] = set()

    def wall_ms(self) -> int:
        return int(1000 * self.now_s)

    def autoscaler(
        self,
        policy: Policy | None = None,
        *,
        who: str = "one",
        limits: ScalingSettings = LIMITS,
        actuator: Actuator | None = None,
        board: Helm | None = None,
    ) -> Autoscaler:
        return Autoscaler(
            model=MODEL,
            who=who,
            ledger=self.ledger,
            registry=self.registry,
            board=board or self.board,
            actuator=actuator or self.levers,
            policy=policy or FollowLoad(limits),
            limits=limits,
            metrics=self.metrics if who == "one" else Metrics(MODEL),
            clock=lambda: self.now_s,
            wall_ms=self.wall_ms,
        )

    async def accept(self, requests: int, prompt_tokens: int = 1_000) -> None:
        for _ in range(requests):
            self.requests += 1
            key = RecordKey(MODEL, f"r{self.requests}")
            await self.ledger.enqueue(NewRecord(key, "pdq.tokens.t", prompt_tokens, 10, 10**9, "s", RequestPolicy()))

    async def announce(self) -> None:
        """Every worker speaks: a prefill worker computes 1,000 tokens a second."""
        self.computed += 1_000
        for worker, pool in self.levers.workers.items():
            if worker not in self.asleep:
                now = Occupancy(64, 64, 0, 0, tokens=self.computed, busy_s=self.computed / 1_000)
                await self.registry.announce(replace(info(worker, MODEL, pool), occupancy=now), 5_000)

    async def rounds(self, autoscaler: Autoscaler, count: int) -> ScalingReport | None:
        """So many periods; the last report."""
        report = None
        for _ in range(count):
            self.now_s += 1.0
            await self.announce()
            report = await autoscaler.once()
        return report

    def exported(self) -> dict[str, float]:
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return {name: float(value) for name, value in (it.rsplit(" ", 1) for it in lines if not it.startswith("#"))}
