"""What the bridge reports of the system behind it: queues, records, workers of the models that it serves.

Read when somebody scrapes, at most once a second, and never waited for longer than ``TIMEOUT_S``. All bridges report the
same, so take the ``max`` over them, not the sum. What could not be read is missing, never repeated from before: an alert
must not look at numbers of an hour ago. ``pdq_readings_ok`` says which of the two it is.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdq.core import names
from pdq.core.errors import PdqError
from pdq.core.handoff import State
from pdq.core.load import total
from pdq.ports import HandoffLedger, JobQueue, Load, Pool, Queue, Record, WorkerInfo, WorkerRegistry

FRESH_S: Final = 1.0
TIMEOUT_S: Final = 2.0
OVERDUE_LIMIT: Final = 100
"""Overdue records are read whole to be counted, and past this many the number tells nothing new."""
WORKER_STATES: Final = ("ready", "draining")


@dataclass(frozen=True)
class _Reading:
    workers: Sequence[WorkerInfo]
    depths: Mapping[tuple[str, Queue], tuple[int, int]]
    dead: Mapping[str, int]
    loads: Mapping[str, Load]
    overdue: Mapping[str, int]


class Readings(Collector):
    """``refresh``, then scrape."""

    def __init__(
        self,
        models: Collection[str],
        queue: JobQueue,
        ledger: HandoffLedger,
        registry: WorkerRegistry,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._queue = queue
        self._ledger = ledger
        self._registry = registry
        self._clock = clock
        self._last: _Reading | None = None
        self._read_at: float | None = None
        self._lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Read anew if the last reading, good or bad, is older than ``FRESH_S``. Raises nothing."""
        async with self._lock:
            if self._read_at is not None and self._clock() - self._read_at < FRESH_S:
                return
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    self._last = await self._read()
            except (PdqError, TimeoutError):
                self._last = None
            self._read_at = self._clock()

    async def _read(self) -> _Reading:
        places = [(model, queue) for model in self._models for queue in Queue]
        workers, depths, dead, loads, due, now_ms = await asyncio.gather(
            self._registry.workers(),
            asyncio.gather(*(self._queue.depth(queue, model) for model, queue in places)),
            asyncio.gather(*(self._queue.dead(model) for model in self._models)),
            asyncio.gather(*(self._ledger.load(model) for model in self._models)),
            asyncio.gather(*(self._ledger.due(model, OVERDUE_LIMIT) for model in self._models)),
            self._ledger.now_ms(),
        )
        return _Reading(
            workers=[info for info in workers if info.model in self._models],
            depths=dict(zip(places, depths, strict=True)),
            dead=dict(zip(self._models, dead, strict=True)),
            loads=dict(zip(self._models, loads, strict=True)),
            overdue={
                model: sum(_overdue(record, now_ms) for record in records)
                for model, records in zip(self._models, due, strict=True)
            },
        )

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pdq_readings_ok", "1 if this bridge could read queues, records and workers", value=self._last is not None
        )
        if self._last is not None:
            yield from self._of_queues(self._last)
            yield from self._of_requests(self._last)
            yield from self._of_workers(self._last)

    def _of_queues(self, reading: _Reading) -> Iterator[Metric]:
        labels = ["model", "queue"]
        waiting = GaugeMetricFamily("pdq_queue_waiting", "Jobs that no worker has taken", labels=labels)
        taken = GaugeMetricFamily("pdq_queue_taken", "Jobs that a worker has taken and not finished", labels=labels)
        for place, depth in reading.depths.items():
            waiting.add_metric(place, depth[0])
            taken.add_metric(place, depth[1])
        yield waiting
        yield taken
        dead = GaugeMetricFamily("pdq_dead_letters", "Jobs that were given up and are kept", labels=["model"])
        for model, count in reading.dead.items():
            dead.add_metric((model,), count)
        yield dead

    def _of_requests(self, reading: _Reading) -> Iterator[Metric]:
        labels = ["model", "state"]
        requests = GaugeMetricFamily("pdq_requests", "Requests that have not ended", labels=labels)
        prompts = GaugeMetricFamily("pdq_requests_prompt_tokens", "Their prompt tokens", labels=labels)
        reserved = GaugeMetricFamily(
            "pdq_requests_reserved_tokens", "Their prompt tokens and all output they may still produce", labels=labels
        )
        overdue = GaugeMetricFamily(
            "pdq_requests_overdue",
            f"Requests (up to {OVERDUE_LIMIT}) of which a lease or the deadline ran out, and no reaper has acted on it",
            labels=["model"],
        )
        labels = ["model", "class"]
        queued = GaugeMetricFamily("pdq_queued_requests", "Requests that wait for prefill", labels=labels)
        queued_prompts = GaugeMetricFamily("pdq_queued_prompt_tokens", "Their prompt tokens", labels=labels)
        for model, load in reading.loads.items():
            for state, count in load.requests.items():
                requests.add_metric((model, state.value), count)
            for state, tokens in load.prompt_tokens.items():
                prompts.add_metric((model, state.value), tokens)
            for state, tokens in load.reserved_tokens.items():
                reserved.add_metric((model, state.value), tokens)
            overdue.add_metric((model,), reading.overdue[model])
            for priority in names.PRIORITIES:
                waiting = total(load.queued.get(priority, {}).values())
                queued.add_metric((model, priority), waiting.requests)
                queued_prompts.add_metric((model, priority), waiting.prompt_tokens)
        yield requests
        yield prompts
        yield reserved
        yield overdue
        yield queued
        yield queued_prompts

    def _of_workers(self, reading: _Reading) -> Iterator[Metric]:
        pools = [(model, pool) for model in self._models for pool in Pool]
        count = Counter((info.model, info.pool, info.state) for info in reading.workers)
        workers = GaugeMetricFamily("pdq_workers", "Live workers", labels=["model", "pool", "state"])
        for model, pool in pools:
            for state in WORKER_STATES:
                workers.add_metric((model, pool.value, state), count[model, pool, state])
        yield workers
        for name, text, field in (
            ("kv_blocks", "KV blocks of a pool's workers", "total_blocks"),
            ("kv_blocks_free", "KV blocks of a pool's workers that nothing occupies", "free_blocks"),
            ("workers_running", "Requests that a pool's workers compute", "running"),
            ("workers_held", "Handoffs whose KV a pool's workers hold for someone to fetch", "held"),
        ):
            total: Counter[tuple[str, Pool]] = Counter()
            for info in reading.workers:
                total[info.model, info.pool] += getattr(info.occupancy, field)
            gauge = GaugeMetricFamily(f"pdq_{name}", text, labels=["model", "pool"])
            for model, pool in pools:
                gauge.add_metric((model, pool.value), total[model, pool])
            yield gauge
        tokens = CounterMetricFamily(
            "pdq_worker_tokens",
            "Tokens computed since the worker started: prompt tokens in prefill, output tokens in decode",
            labels=["model", "pool", "worker"],
        )
        for info in reading.workers:
            tokens.add_metric((info.model, info.pool.value, info.worker), info.occupancy.tokens)
        yield tokens


def _overdue(record: Record, now_ms: int) -> bool:
    """A queued record whose deadline has not passed is due only for a look."""
    return record.state is not State.QUEUED or record.deadline_ms <= now_ms
