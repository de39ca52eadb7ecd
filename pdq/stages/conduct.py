"""The frame around every job that a worker handles under a lease.

    acquire ─▶ deadline, heartbeat, cancellable ─▶ body ─▶ what the error means for the request

The body only does its work and raises; here an error becomes the request's fate (in the ledger, with its terminal
event), and what is raised on becomes the job's fate (``pdq.core.delivery``).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from pdq.core import errors
from pdq.core.handoff import RULES, Event
from pdq.core.lease import Hold, RecordKey
from pdq.ports import Grant
from pdq.stages.endings import Endings
from pdq.stages.keepalive import Keepalive
from pdq.stages.parts import Parts
from pdq.stages.work import Work

log = logging.getLogger(__name__)

Body = Callable[[Grant, Work], Coroutine[Any, Any, None]]
GiveBack = Callable[[Grant], Awaitable[bool]]

NOT_OURS: Final = (
    errors.RecordEnded,
    errors.RecordNotFound,
    errors.StaleEpoch,
    errors.IllegalTransition,
)
"""The request has ended or somebody else has it: free what is held, say nothing."""


class Conductor:
    def __init__(self, parts: Parts, keepalive: Keepalive) -> None:
        self._parts = parts
        self._keepalive = keepalive
        self.endings = Endings(parts.ledger, parts.bus, parts.outbox, parts.worker)
        self._working: dict[str, Work] = {}
        self.taken = 0
        """Leases acquired since the start."""

    def __len__(self) -> int:
        return len(self._working)

    def interrupt(self, request_id: str, reason: errors.PdqError) -> None:
        """If this worker is at it, it stops at its next await."""
        if work := self._working.get(request_id):
            work.interrupt(reason)

    async def conduct(self, key: RecordKey, event: Event, body: Body, give_back: GiveBack) -> None:
        """Take the lease that ``event`` claims and run ``body`` under it.

        ``give_back`` is called when the body ends early for a reason that another try may not share: it puts the record
        where the next delivery of the job can take it up, or says True if it has published another job instead.
        """
        side = RULES[event].claims
        assert side is not None
        lease = self._parts.settings.lease
        try:
            grant = await self._parts.ledger.acquire(key, event, self._parts.worker, lease.ttl_ms)
        except (errors.DeadlineExceeded, errors.AttemptsExhausted) as error:
            await self.endings.unhappy(key, error)
            return
        except errors.RecordEnded:
            await self.endings.repeat(key)
            raise
        self.taken += 1
        with Work() as work:
            work.set_deadline(grant.record.deadline_ms - grant.now_ms)
            self._working[key.request_id] = work

            def on_lost(hold: Hold) -> None:
                work.interrupt(errors.StaleEpoch(f"lease {hold.side} of {key.request_id} is lost"))

            hold = Hold(key, side, grant.epoch)
            try:
                with self._parts.account.under(hold), self._keepalive.holding(hold, on_lost):
                    await self._under(grant, work.run(body(grant, work)), give_back)
            finally:
                if self._working.get(key.request_id) is work:
                    del self._working[key.request_id]

    async def settle(self, key: RecordKey, body: Awaitable[None]) -> None:
        """Run ``body`` without a lease, and end the request for an error that no retry can help."""
        try:
            await body
        except NOT_OURS:
            raise
        except errors.PdqError as error:
            if error.retryable:
                raise
            await self.endings.unhappy(key, error)
        except Exception as error:
            # A defect of ours: the request must not hang for it, and the job is kept for whoever mends it. Where it
            # comes from is logged with the job's rejection.
            await self.endings.unhappy(key, errors.PdqError(f"{type(error).__name__}: {error}"))
            raise

    async def _under(self, grant: Grant, attempt: Awaitable[None], give_back: GiveBack) -> None:
        try:
            await self.settle(grant.record.key, attempt)
        except asyncio.CancelledError:
            if not await self._give_back(grant, give_back):
                raise
        except errors.PdqError as error:
            if not error.retryable or not await self._give_back(grant, give_back):
                raise

    async def _give_back(self, grant: Grant, give_back: GiveBack) -> bool:
        try:
            return await give_back(grant)
        except NOT_OURS as error:
            log.debug("nothing to give back of %s: %s", grant.record.key.request_id, error)
        except errors.PdqError as error:
            log.warning("cannot give %s back, its lease will run out: %s", grant.record.key.request_id, error)
        return False
