"""The reaper: speaks for the dead, and for requests whose time is over.

It visits only records of which something has run out, and queued ones once for a look at whether anybody will ever work
on them (``lost``): its cost grows with expiries and not with live requests.
Several may run: every step is one atomic event, and who comes second changes nothing.
"""

import asyncio
import contextlib
import logging
from typing import Final

from pdq import failpoints
from pdq.core import errors
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import DecodeJob, PrefillJob, decode
from pdq.core.settings import LeaseSettings
from pdq.ports import Changes, HandoffLedger, JobQueue, Queue, Record, TokenBus
from pdq.runtime import Trouble
from pdq.stages.conduct import NOT_OURS
from pdq.stages.endings import Endings
from pdq.stages.lost import LostJobs
from pdq.stages.recover import may_offer_again

log = logging.getLogger(__name__)

BATCH: Final = 256
NAME: Final = "reaper"


class Reaper:
    def __init__(
        self, ledger: HandoffLedger, jobs: JobQueue, bus: TokenBus, endings: Endings, settings: LeaseSettings
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._endings = endings
        self._lost = LostJobs(ledger, jobs, bus, endings)
        self._period_s = settings.reaper_period_ms / 1000

    async def run(self) -> None:
        """Until cancelled."""
        watch = await self._jobs.watch_exhausted(self._exhausted)
        trouble = Trouble(log, "a reaper's round")
        try:
            while True:
                try:
                    await self.round()
                    trouble.works()
                except errors.PdqError as error:
                    trouble.fails(error)
                await asyncio.sleep(self._period_s)
        finally:
            with contextlib.suppress(errors.PdqError):
                await watch.close()

    async def round(self) -> int:
        """Visit everything that has run out by now; how many records that were."""
        if failpoints.armed:
            await failpoints.hit("reaper.round")
        visited = 0
        for model in await self._ledger.models():
            queued: list[Record] = []
            while due := await self._ledger.due(model, BATCH):
                now_ms = await self._ledger.now_ms()
                for record in due:
                    await self._visit(record, now_ms)
                queued += [record for record in due if _waits(record, now_ms)]
                visited += len(due)
            await self._lost.look(model, queued)
        return visited

    async def _visit(self, record: Record, now_ms: int) -> None:
        key = record.key
        try:
            if failpoints.armed:
                await failpoints.hit("reaper.visit", key.request_id)
            if _waits(record, now_ms):
                # Until it is settled: this reaper may die, too.
                await self._ledger.reap(key, look_again=True)
            elif record.deadline_ms <= now_ms:
                await self._endings.unhappy(key, errors.DeadlineExceeded("the request's deadline has passed"))
            elif record.state is State.PREFILLING and _ran_out(record, Event.REQUEUE, now_ms):
                # Its job is unacknowledged and will be delivered again.
                await self._put_back(record, Event.REQUEUE)
            elif record.state is State.READY and _ran_out(record, Event.YIELD, now_ms):
                await self._put_back(record, Event.YIELD)
            elif (
                record.state is State.FETCHED
                and _ran_out(record, Event.YIELD, now_ms)
                and may_offer_again(record, now_ms)
            ):
                await self._put_back(record, Event.YIELD, Changes(streams_lost=record.streams_lost + 1))
            else:
                await self._ledger.reap(key)
        except (*NOT_OURS, errors.LeaseHeld) as error:
            log.debug("%s moved on by itself: %s", key.request_id, error)

    async def _put_back(self, record: Record, event: Event, changes: Changes | None = None) -> None:
        lease = record.source if event is Event.REQUEUE else record.sink
        holder = lease.worker if lease else "nobody"
        note = {"reason": "lease_ran_out", "holder": holder}
        await self._ledger.apply(record.key, event, worker=NAME, changes=changes, note=note)
        log.warning("request %s: the lease of %s ran out in %s", record.key.request_id, holder, record.state)

    async def _exhausted(self, queue: Queue, data: bytes) -> None:
        """The broker gave a job up. It is in the dead letters already; its request must not wait for the deadline."""
        try:
            job = decode(data, DecodeJob).job if queue is Queue.DECODE else decode(data, PrefillJob)
        except errors.InvalidMessage:
            return
        if job.request_id is not None:
            gone = errors.AttemptsExhausted(f"the {queue} job was delivered too often without being finished")
            await self._endings.unhappy(RecordKey(job.model, job.request_id), gone)


def _waits(record: Record, now_ms: int) -> bool:
    return record.state is State.QUEUED and now_ms < record.deadline_ms


def _ran_out(record: Record, event: Event, now_ms: int) -> bool:
    """Has the lease on which the state rests run out?"""
    lease = record.source if event is Event.REQUEUE else record.sink
    return not lease.running(now_ms) if lease is not None else event is Event.REQUEUE
