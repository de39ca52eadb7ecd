"""The gate before both pools: what ``pdq.core.admission`` and ``pdq.core.routing`` say of a request, from live numbers.

Bridges ask it before they write a record, and workers for a job that a producer published by itself. It reads the
ledger's counters once for all who come within some tens of milliseconds, and adds whom it has let in since: a burst
that is shorter than a reading is old meets the same limits as any other.
"""

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdq.core import errors, routing
from pdq.core.admission import Admitted, Capacity, Code, Refused, Request, admit, queue_wait_s
from pdq.core.load import Count, Load, Meter, Tally, entered, measure
from pdq.core.messages import Priority
from pdq.core.settings import Settings
from pdq.ports import HandoffLedger, Pool, WorkerInfo
from pdq.stages.census import Census
from pdq.stages.kept import Kept

FRESH_S: Final = 0.03

_ERRORS: Final[Mapping[Code, type[errors.Refused]]] = {
    "overloaded": errors.Overloaded,
    "tenant_limit": errors.TenantLimit,
    "unavailable": errors.Unavailable,
}


class Gate:
    def __init__(
        self,
        ledger: HandoffLedger,
        census: Census,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._census = census
        self._settings = settings
        self._clock = clock
        self._views: dict[str, Kept[_View]] = {}

    async def route(self, model: str, prompt_tokens: int, priority: Priority) -> routing.Route:
        """Where the request shall run.

        Raises:
            Unavailable: ledger or registry do not answer.
        """
        handoff = self._settings.handoff
        view = await self._look(model)
        # With many tenants the estimate costs more than all else here.
        wait_s = (
            queue_wait_s(view.load, view.capacity, self._settings.admission, priority)
            if handoff.mode == "auto"
            else None
        )
        return routing.route(prompt_tokens, wait_s, view.capacity, handoff)

    @contextlib.asynccontextmanager
    async def entering(self, model: str, request: Request) -> AsyncIterator[Admitted]:
        """Let ``request`` in, and count it until the ledger does: its record is to be written inside the block. The
        request's ``deadline_s`` counts from now.

        Raises:
            Overloaded, TenantLimit, Unavailable: it is refused, with ``reason`` and ``retry_after_s``.
            Unavailable: without a reason: ledger or registry do not answer.
        """
        view = await self._look(model)
        outcome = admit(view.load, view.capacity, self._settings.admission, request, now_s=0.0)
        if isinstance(outcome, Refused):
            raise _ERRORS[outcome.code](outcome.why, retry_after_s=outcome.retry_after_s, reason=outcome.reason.value)
        entry = view.let_in(request)
        try:
            yield outcome
        finally:
            entry.over = True

    async def _look(self, model: str) -> "_View":
        kept = self._views.get(model)
        if kept is None:
            read = functools.partial(self._read, _View(model))
            kept = self._views[model] = Kept(read, FRESH_S, self._clock)
        return await kept.get()

    async def _read(self, view: "_View") -> "_View":
        # Whose block was over before the reading began is in it, or has no record.
        seen = {entry for entry in view.entries if entry.over}
        now_s = self._clock()
        load = await self._ledger.load(view.model)
        workers = [it for it in await self._census.workers() if it.model == view.model and it.state == "ready"]
        prefill = self._prefill_pool(workers)
        view.meter = measure(view.meter, load, {it.worker: _tally(it) for it in prefill}, now_s)
        decode = [it for it in workers if it.pool is Pool.DECODE]
        view.capacity = Capacity(
            prefill_workers=len(prefill),
            decode_workers=len(decode),
            decode_kv_tokens=sum(map(_kv_tokens, decode)),
            can_start=self._settings.admission.without_workers == "wait",
            takes_whole=self._settings.handoff.mode == "aggregated",
            rates=view.meter.rates,
        )
        view.load = load
        view.entries = [entry for entry in view.entries if entry not in seen]
        for entry in view.entries:
            view.count(entry.request)
        return view

    def _prefill_pool(self, workers: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
        """Those that take jobs from the prefill queue."""
        if self._settings.handoff.mode == "aggregated":
            return [it for it in workers if it.aggregated]
        return [it for it in workers if it.pool is Pool.PREFILL]


@dataclass(eq=False, slots=True)
class _Entry:
    """A request that was let in."""

    request: Request
    over: bool = False
    """Its record is written, or will not be."""


class _View:
    """What a gate knows of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.meter = Meter()
        self.capacity = Capacity(prefill_workers=0, decode_workers=0, decode_kv_tokens=0, can_start=False)
        self.load = Load({}, {}, {})
        """The last reading, and ``entries``."""
        self.entries: list[_Entry] = []

    def let_in(self, request: Request) -> _Entry:
        entry = _Entry(request)
        self.entries.append(entry)
        self.count(request)
        return entry

    def count(self, request: Request) -> None:
        count = Count(1, request.prompt_tokens, request.reserved_tokens)
        self.load = entered(self.load, request.priority, request.tenant, count, whole=not request.queues)


def _kv_tokens(info: WorkerInfo) -> int:
    held = info.occupancy
    return (held.total_blocks - held.quarantined_blocks) * info.contract.layout.block_size


def _tally(info: WorkerInfo) -> Tally:
    """A decode worker's tokens are mostly output: they say nothing of its prefill."""
    if info.pool is Pool.DECODE:
        return Tally(0, 0.0)
    return Tally(info.occupancy.tokens, info.occupancy.busy_s)
