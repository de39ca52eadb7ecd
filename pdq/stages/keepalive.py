"""Heartbeats of one worker: leases, deliveries in progress, and its entry in the registry.

One batched renewal per period, however many requests are held. A lease that turns out lost is reported to its holder
once, and never renewed back. Nothing here computes, so compute that blocks its own thread starves nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from pdq import failpoints
from pdq.core.errors import PdqError
from pdq.core.handoff import Side
from pdq.core.lease import Hold, renewal_period_s
from pdq.core.settings import LeaseSettings, QueueSettings
from pdq.ports import Delivery, HandoffLedger, WorkerInfo, WorkerRegistry
from pdq.runtime import Trouble

log = logging.getLogger(__name__)

OnLost = Callable[[Hold], None]


class Keepalive:
    def __init__(
        self,
        ledger: HandoffLedger,
        registry: WorkerRegistry,
        lease: LeaseSettings,
        queue: QueueSettings,
        info: Callable[[], WorkerInfo],
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._lease = lease
        self._queue = queue
        self._info = info
        self._holds: dict[Hold, OnLost] = {}
        self._deliveries: set[Delivery] = set()

    def hold(self, hold: Hold, on_lost: OnLost) -> None:
        """Renew until ``drop``, or until it is lost."""
        self._holds[hold] = on_lost

    def drop(self, hold: Hold, on_lost: OnLost) -> bool:
        """Stop renewing, unless somebody else took the hold over with a callback of their own; False if it was lost."""
        mine = self._holds.get(hold) is on_lost
        if mine:
            del self._holds[hold]
        return mine

    def move(self, old: Hold, new: Hold) -> None:
        """The same holder goes on under ``new`` (its source lease has become a sink lease)."""
        if on_lost := self._holds.pop(old, None):
            self._holds[new] = on_lost

    @contextlib.contextmanager
    def holding(self, hold: Hold, on_lost: OnLost) -> Iterator[None]:
        self.hold(hold, on_lost)
        try:
            yield
        finally:
            for side in Side:
                self.drop(msgspec.structs.replace(hold, side=side), on_lost)

    @contextlib.contextmanager
    def in_progress(self, delivery: Delivery) -> Iterator[None]:
        self._deliveries.add(delivery)
        try:
            yield
        finally:
            self._deliveries.discard(delivery)

    async def announce(self) -> None:
        """Tell the registry now, without waiting for the next period."""
        if failpoints.armed and await failpoints.hit("keepalive.announce"):
            return
        await self._registry.announce(self._info(), self._lease.ttl_ms)

    async def run(self) -> None:
        """Until cancelled."""
        period = renewal_period_s(self._lease.ttl_ms)
        async with asyncio.TaskGroup() as group:
            at_the_ledger = Trouble(log, "the heartbeat")  # one for both: they have one server
            group.create_task(_every(period, self._renew, at_the_ledger))
            group.create_task(_every(period, self.announce, at_the_ledger))
            at_the_broker = Trouble(log, "the heartbeat of jobs in hand")
            group.create_task(_every(self._queue.ack_wait_s / 3, self._say_in_progress, at_the_broker))

    async def _renew(self) -> None:
        holds = list(self._holds)
        if not holds:
            return
        if failpoints.armed and await failpoints.hit("keepalive.renew"):
            return
        for lost in await self._ledger.renew(holds, self._lease.ttl_ms):
            if on_lost := self._holds.pop(lost, None):
                on_lost(lost)

    async def _say_in_progress(self) -> None:
        for delivery in list(self._deliveries):
            if failpoints.armed and await failpoints.hit("keepalive.in_progress"):
                continue
            if delivery in self._deliveries:
                await delivery.in_progress()


async def _every(period_s: float, beat: Callable[[], Awaitable[None]], trouble: Trouble) -> None:
    """Call ``beat`` each period; a server that is away is no reason to stop trying, only to try sooner."""
    failing = False
    while True:
        await asyncio.sleep(period_s)
        try:
            await beat()
            if failing:  # a beat that never failed may have had nothing to ask for
                trouble.works()
            failing = False
        except PdqError as error:
            trouble.fails(error)
            failing = True
            await asyncio.sleep(min(period_s / 4, 1.0))
            with contextlib.suppress(PdqError):
                await beat()
