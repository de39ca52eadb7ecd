"""Queued requests whose job is nowhere: who wrote the record died before it had published the job.

A queued record comes up for a look long before its deadline, a lease's time after it was queued. Nearly always that
costs one question: a requester that still waits for output either has published the job, or will say itself that it
could not. Only where nobody answers, or nobody wants the output, the queues are read, which keep a job until somebody is
done with it, in a worker's hands, too.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from pdq.core import errors
from pdq.core.handoff import State
from pdq.ports import HandoffLedger, JobQueue, Record, TokenBus
from pdq.stages.endings import Endings
from pdq.stages.stored import requests_with_jobs

log = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
ASKED_AT_ONCE: Final = 256
JOBS_LIMIT: Final = 2_000
"""Jobs of one queue that are read, one by one, for the sake of a look. A longer queue is waited out."""


class LostJobs:
    def __init__(self, ledger: HandoffLedger, jobs: JobQueue, bus: TokenBus, endings: Endings) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._bus = bus
        self._endings = endings

    async def look(self, model: str, queued: Sequence[Record]) -> None:
        """End those requests that nobody will ever work on. The others are done with until their deadline; or, if
        nothing could be found out, until the next look."""
        settled, doubtful = await self._ask(queued)
        if doubtful:
            with_job = await requests_with_jobs(self._jobs, model, await self._ledger.salt(), JOBS_LIMIT)
            if with_job is None:
                log.info(
                    "%d requests of %s have no requester; its queues are too long to be read", len(doubtful), model
                )
            else:
                settled += [record for record in doubtful if record.key.request_id in with_job]
                await self._end([record for record in doubtful if record.key.request_id not in with_job])
        for record in settled:
            await self._ledger.reap(record.key)

    async def _ask(self, queued: Sequence[Record]) -> tuple[list[Record], list[Record]]:
        """Those whose requester waits for them, and the rest."""
        wanted: list[Record] = []
        rest: list[Record] = []
        for start in range(0, len(queued), ASKED_AT_ONCE):
            batch = queued[start : start + ASKED_AT_ONCE]
            answers = await asyncio.gather(
                *(self._bus.ask_output(record.reply_to, record.key.request_id, ANSWER_S) for record in batch)
            )
            for record, answer in zip(batch, answers, strict=True):
                (wanted if answer is not None and answer.wanted else rest).append(record)
        return wanted, rest

    async def _end(self, lost: Sequence[Record]) -> None:
        # A worker that began one in the meantime has raised its epoch, and acknowledged the job if it was quick.
        now = await self._ledger.read_many([record.key for record in lost])
        for before, record in zip(lost, now, strict=True):
            if record is not None and record.state is State.QUEUED and record.epoch == before.epoch:
                gone = errors.JobLost("its job is in no queue, and nobody who could publish it answers")
                await self._endings.unhappy(record.key, gone)
