"""Observe, decide, apply: once every period, for one model, by whoever leads.

Several processes may run this loop for one model; the board lets one of them decide at a time. The others go on
measuring, so that whoever takes over knows the rates. A decision is carried out for each pool by itself: an actuator that
fails for one is reported and asked again, and keeps neither the loop nor the other pool from going on.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from pdq.autoscale.metrics import Metrics
from pdq.autoscale.observe import Helm, Observer, Sight, missed_least_first
from pdq.autoscale.policies import Policy
from pdq.core.errors import PdqError
from pdq.core.scaling import Decision, PoolDecision, PoolSeen
from pdq.core.settings import ScalingSettings
from pdq.ports import Actuator, HandoffLedger, Pool, PoolReport, ScalingReport, WorkerRegistry

log = logging.getLogger(__name__)

LEASE_PERIODS: Final = 3
"""A leader that has not spoken for so many periods is taken for dead, and its report for old."""
LEASE_MIN_S: Final = 5.0


class Autoscaler:
    def __init__(
        self,
        *,
        model: str,
        who: str,
        ledger: HandoffLedger,
        registry: WorkerRegistry,
        board: Helm,
        actuator: Actuator,
        policy: Policy,
        limits: ScalingSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._model: Final = model
        self._who: Final = who
        self._board = board
        self._actuator = actuator
        self._policy = policy
        self._observer = Observer(model, ledger, registry, board, actuator)
        self._metrics = metrics
        self._period_s: Final = limits.period_s
        self._lease_s: Final = max(LEASE_MIN_S, LEASE_PERIODS * limits.period_s)
        self._clock = clock
        self._wall_ms = wall_ms
        self._leads: bool | None = None
        """None: nobody was asked yet, or nobody answered."""
        self._unread = ""
        self._last: dict[Pool, PoolReport] = {}
        self._changed_ms: dict[Pool, int] = {}

    async def run(self) -> None:
        """Until cancelled; then somebody else may lead at once."""
        try:
            while True:
                started_s = self._clock()
                await self.once()
                await asyncio.sleep(max(0.0, started_s + self._period_s - self._clock()))
        finally:
            await self._resign()

    async def once(self) -> ScalingReport | None:
        """One round; what was decided, or None: somebody else decides."""
        asked_s = self._clock()
        leads = await self._lead()
        sight = await self._observer.observe(self._clock())
        self._tell_unread(sight.unread)
        if not leads or self._clock() - asked_s >= self._lease_s:
            return None
        decision = self._policy.decide(sight.observation, self._clock())
        report = ScalingReport(
            at_ms=self._wall_ms(),
            by=self._who,
            actuator=self._actuator.name,
            automatic=self._policy.automatic,
            period_ms=int(1000 * self._period_s),
            pools={pool: await self._carry_out(pool, decision, sight) for pool in Pool},
            rates=sight.observation.rates,
        )
        self._metrics.decided(report, self._clock())
        try:
            await self._board.report(self._model, report, int(1000 * self._lease_s))
        except PdqError as error:
            log.warning("the decision could not be written to the board: %s", error)
        return report

    # --- apply --------------------------------------------------------------------------------------------------------

    async def _carry_out(self, pool: Pool, decision: Decision, sight: Sight) -> PoolReport:
        said: PoolDecision = getattr(decision, pool.value)
        seen: PoolSeen | None = getattr(sight.observation, pool.value)
        change = seen is not None and said.replicas is not None and said.replicas != seen.replicas
        trouble = ""
        try:
            if change and said.replicas is not None:
                await self._actuator.scale(pool, said.replicas, missed_least_first(pool, sight.workers))
                self._changed_ms[pool] = self._wall_ms()
            trouble = await self._actuator.trouble(pool)
        except PdqError as error:
            trouble = str(error)
        why = said.why if seen is not None else f"{said.why} ({sight.unread})"
        report = PoolReport(
            replicas=seen.replicas if seen is not None else None,
            ready=seen.ready if seen is not None else None,
            decided=said.replicas,
            cause=said.cause,
            why=why,
            inputs=said.inputs,
            manual=seen.manual if seen is not None else None,
            changed_ms=self._changed_ms.get(pool),
            trouble=trouble,
        )
        self._tell(pool, report)
        return report

    def _tell(self, pool: Pool, report: PoolReport) -> None:
        """A line worth reading when something changes; the rest is there for whoever looks for it."""
        before = self._last.get(pool)
        self._last[pool] = report
        news = before is None or (before.decided, before.cause) != (report.decided, report.cause)
        inputs = " ".join(f"{name}={value:g}" for name, value in report.inputs.items())
        log.log(
            logging.INFO if news else logging.DEBUG,
            "%s %s -> %s, %s: %s [%s]",
            *(pool, _size(report.replicas), _size(report.decided), report.cause, report.why, inputs),
        )
        if report.trouble != (before.trouble if before is not None else ""):
            log.warning("%s: %s", pool, report.trouble or "no trouble any more")

    def _tell_unread(self, unread: str) -> None:
        if unread != self._unread:
            log.log(logging.WARNING if unread else logging.INFO, "could not be read: %s", unread or "nothing any more")
        self._unread = unread

    # --- who decides --------------------------------------------------------------------------------------------------

    async def _lead(self) -> bool:
        try:
            leads: bool | None = await self._board.lead(self._model, self._who, int(1000 * self._lease_s))
        except PdqError as error:
            leads = None
            if self._leads is not None:
                log.warning("the board does not say who decides for %s, so nothing is decided: %s", self._model, error)
        if leads is not None and leads is not self._leads:
            if leads:
                log.info("decides for %s as %s (%s)", self._model, self._who, self._actuator.name)
            else:
                log.info("follows: another one decides for %s", self._model)
        self._leads = leads
        self._metrics.leads(leads is True)
        return leads is True

    async def _resign(self) -> None:
        self._metrics.leads(False)
        try:
            await self._board.resign(self._model, self._who)
        except PdqError as error:
            log.warning("could not resign, the next one waits for %.0f s: %s", self._lease_s, error)


def _size(replicas: int | None) -> str:
    return "?" if replicas is None else str(replicas)
