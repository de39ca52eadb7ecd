"""What the autoscaler exports for Prometheus, from its last decision. KEDA or an HPA can scale by the same figures.

Only the one that decides exports decisions: a follower's would be old, and a maximum over all would be wrong.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdq.core.errors import InvalidSettings
from pdq.core.pacing import Cause
from pdq.core.settings import ScalingSettings
from pdq.ports import Pool, PoolReport, ScalingReport

log = logging.getLogger(__name__)

_POOL: Final = ("model", "pool")


class Metrics(Collector):
    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry: Final = CollectorRegistry()
        self._model: Final = model
        self._clock = clock
        self._leads = False
        self._last: tuple[ScalingReport, float] | None = None
        self._decisions: Counter[tuple[Pool, Cause]] = Counter()
        self.registry.register(self)

    def leads(self, leads: bool) -> None:
        self._leads = leads

    def decided(self, report: ScalingReport, now_s: float) -> None:
        self._last = report, now_s
        self._decisions.update((pool, said.cause) for pool, said in report.pools.items())

    @contextmanager
    def served(self, limits: ScalingSettings) -> Iterator[None]:
        """By a thread of its own, until the block ends.

        Raises:
            InvalidSettings: the address cannot be used.
        """
        host, port = limits.metrics_host, limits.metrics_port
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise InvalidSettings(
                f"the autoscaler's metrics cannot be served on {host}:{port} ({error}): "
                "set PDQ_SCALING_METRICS_HOST and PDQ_SCALING_METRICS_PORT, 0 for a free port"
            ) from error
        log.info("metrics of the autoscaler: http://%s:%d/metrics", host, server.server_port)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def collect(self) -> Iterator[Metric]:
        leader = GaugeMetricFamily("pdq_autoscaler_leader", "1: this one decides", labels=["model"])
        leader.add_metric([self._model], float(self._leads))
        yield leader
        decisions = CounterMetricFamily("pdq_autoscaler_decisions", "Decisions", labels=[*_POOL, "cause"])
        for (pool, cause), count in self._decisions.items():
            decisions.add_metric([self._model, pool.value, cause.value], count)
        yield decisions
        if self._leads and self._last is not None:
            yield from self._of(*self._last)

    def _of(self, report: ScalingReport, at_s: float) -> Iterator[Metric]:
        age = GaugeMetricFamily(
            "pdq_autoscaler_last_decision_age_seconds", "Time since the last decision", labels=["model"]
        )
        age.add_metric([self._model], self._clock() - at_s)
        yield age
        yield self._each("desired", "Workers that were decided", report, lambda said: said.decided)
        yield self._each("replicas", "Workers that shall run, before that", report, lambda said: said.replicas)
        yield self._each("ready", "Workers that are ready", report, lambda said: said.ready)
        yield self._each("fixed", "What an operator has fixed", report, lambda said: said.manual)
        yield self._each("trouble", "1: not carried out", report, lambda said: bool(said.trouble))
        cause = GaugeMetricFamily("pdq_autoscaler_cause", "1: of the last decision", labels=[*_POOL, "cause"])
        inputs = GaugeMetricFamily("pdq_autoscaler_input", "What it was decided from", labels=[*_POOL, "input"])
        for pool, said in report.pools.items():
            cause.add_metric([self._model, pool.value, said.cause.value], 1)
            for name, value in said.inputs.items():
                inputs.add_metric([self._model, pool.value, name], value)
        yield cause
        yield inputs

    def _each(
        self, name: str, text: str, report: ScalingReport, figure: Callable[[PoolReport], float | None]
    ) -> Metric:
        """What is not known has no sample: it is not zero."""
        family = GaugeMetricFamily(f"pdq_autoscaler_{name}", text, labels=_POOL)
        for pool, said in report.pools.items():
            if (value := figure(said)) is not None:
                family.add_metric([self._model, pool.value], value)
        return family
