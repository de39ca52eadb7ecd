"""What the bridge counts, in a registry of its own. Per frame that is one addition; everything else is per request."""

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdq.core.admission import Reason
from pdq.core.names import PRIORITIES
from pdq.core.routing import ROUTES

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

disable_created_metrics()  # they would be a second series for each of ours, which no alert and no dashboard reads


class _Bound(NamedTuple):
    """The series of one model, mode and outcome: looking them up by label costs more than counting."""

    requests: Counter
    prompt_tokens: Counter
    output_tokens: Counter
    ttft: Histogram
    itl: Histogram


class Metrics(Collector):
    """``frames``, ``gaps``, ``resends``, ``strays`` and ``in_flight`` are plain numbers, read when somebody scrapes.

    What refuses or routes requests is there from the beginning, as zeros for each of ``models``: a rate that begins with
    the first refusal would not show it.
    """

    def __init__(self, models: Collection[str]) -> None:
        self.registry = CollectorRegistry()
        self.frames = self.gaps = self.resends = self.silences = self.strays = self.in_flight = 0
        self.requests = Counter(
            "pdq_bridge_requests",
            "Accepted requests by how they ended",
            ["model", "mode", "outcome"],
            registry=self.registry,
        )
        self.refusals = Counter(
            "pdq_bridge_refusals", "Requests that were not accepted, by error code", ["code"], registry=self.registry
        )
        self.admission_refusals = Counter(
            "pdq_bridge_admission_refusals",
            "Requests that admission refused, by what was short",
            ["model", "class", "reason"],
            registry=self.registry,
        )
        self.routed = Counter(
            "pdq_bridge_routed",
            "Accepted requests by where they run, and why",
            ["model", "mode", "reason"],
            registry=self.registry,
        )
        self.wait = Histogram(
            "pdq_bridge_admission_wait_seconds",
            "Estimated wait for prefill of accepted requests, as far as it was measured",
            ["model"],
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        for model in models:
            self.wait.labels(model)
            for route in ROUTES:
                self.routed.labels(model, route.mode, route.reason.value)
            for priority in PRIORITIES:
                for reason in Reason:
                    self.admission_refusals.labels(model, priority, reason.value)
        self.prompt_tokens = Counter(
            "pdq_bridge_prompt_tokens", "Prompt tokens of ended requests", ["model"], registry=self.registry
        )
        self.output_tokens = Counter(
            "pdq_bridge_output_tokens", "Output tokens of ended requests", ["model"], registry=self.registry
        )
        self.ttft = Histogram(
            "pdq_bridge_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            ["model"],
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "pdq_bridge_inter_token_seconds",
            "Mean time between two tokens of a request",
            ["model"],
            buckets=ITL_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)
        self._bound: dict[tuple[str, str, str], _Bound] = {}

    def ended(
        self,
        model: str,
        mode: str,
        outcome: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        to_first_s: float | None,
        to_last_s: float,
    ) -> None:
        """One accepted request has ended: times are from arrival to its first token, and from there to its last."""
        bound = self._bound.get((model, mode, outcome))
        if bound is None:
            bound = self._bound[model, mode, outcome] = _Bound(
                self.requests.labels(model, mode, outcome),
                self.prompt_tokens.labels(model),
                self.output_tokens.labels(model),
                self.ttft.labels(model),
                self.itl.labels(model),
            )
        bound.requests.inc()
        bound.prompt_tokens.inc(prompt_tokens)
        bound.output_tokens.inc(output_tokens)
        if to_first_s is not None:
            bound.ttft.observe(to_first_s)
            if output_tokens > 1:
                bound.itl.observe(to_last_s / (output_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pdq_bridge_in_flight", "Requests that wait for their end", value=self.in_flight)
        for name, text, value in (
            ("frames", "Token frames received", self.frames),
            ("gaps", "Times a stream was found to lack tokens", self.gaps),
            ("resends", "Requests to a worker to send tokens again", self.resends),
            ("silences", "Streams that ended by their record, not by a frame", self.silences),
            ("stray_entries", "Entries for requests that are not, or no longer, wanted here", self.strays),
        ):
            yield CounterMetricFamily(f"pdq_bridge_{name}", text, value=value)

    def render(self) -> bytes:
        return generate_latest(self.registry)
