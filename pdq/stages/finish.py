"""The good end: all tokens are out, the terminal transition, then the end alone."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from pdq import failpoints
from pdq.core import errors
from pdq.core.handoff import Event
from pdq.core.messages import PrefillJob
from pdq.core.output import Output
from pdq.ports import Changes, Record
from pdq.stages.parts import Parts
from pdq.stages.text import end_alone, output_of

log = logging.getLogger(__name__)

AWAY_PAUSE_S = 0.2


class Finisher:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def finish_early(self, job: PrefillJob, record: Record, epoch: int) -> bool:
        """The client has the whole output already, and only the end was lost: send that. False if more is to come."""
        output = output_of(self._parts.tokenizer, job.sampling, record, job.output_so_far)
        if output.finish is not None:
            await self.finish(record, epoch, output, {"tokens": 0})
        return output.finish is not None

    async def finish(self, record: Record, epoch: int, output: Output, note: Mapping[str, Any]) -> None:
        """Send the end of ``output`` if the request is still ours to end. A ledger that is away is waited for: the
        output is complete, and only the ledger can say whether somebody else has ended the request meanwhile."""
        finish, last = output.finish, end_alone(record, output)
        assert finish is not None
        said = last.end if finish.tail or finish.stop_reason is not None else None
        changes = Changes(ended_code=finish.reason, emitted=len(output.tokens), end=said)
        note = {**note, "finish_reason": finish.reason}
        if failpoints.armed:
            await failpoints.hit("finish.before", record.key.request_id)
        while True:
            try:
                await self._parts.ledger.apply(
                    record.key, Event.FINISH, epoch=epoch, worker=self._parts.worker, changes=changes, note=note
                )
                break
            except errors.Unavailable as error:
                log.warning("ledger away at the end of %s, waiting: %s", record.key.request_id, error)
                await asyncio.sleep(AWAY_PAUSE_S)
            except errors.LedgerRefusal:
                self._parts.outbox.forget(record.key.request_id)
                raise
        if failpoints.armed and await failpoints.hit("finish.after", record.key.request_id):
            return
        await self._parts.outbox.send(record.reply_to, (last,))
