"""Aggregated: one worker prefills and decodes a request in the same blocks, and nothing is transferred.

It is the baseline that disaggregation is compared with, and the way that short prompts may go.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

from pdq import failpoints
from pdq.core import errors
from pdq.core.handoff import Event, Side
from pdq.core.lease import Hold
from pdq.core.messages import PrefillJob
from pdq.core.output import Output
from pdq.ports import Changes, DecodeEngine, Delivery, Drawn, Grant, PrefillEngine, PrefillRun, PromptWork, Queue
from pdq.stages.accept import Accept, prompt_work
from pdq.stages.batch import Batch
from pdq.stages.conduct import Conductor
from pdq.stages.finish import Finisher
from pdq.stages.keepalive import Keepalive
from pdq.stages.parts import Parts
from pdq.stages.recover import Recovery
from pdq.stages.room import Room
from pdq.stages.text import entry, first_token_ms, logprobs_of, output_of
from pdq.stages.work import Work


class WholeEngine(PrefillEngine, DecodeEngine, Protocol):
    """Both sides over one pool of blocks."""


@dataclass
class Taken:
    """One whole request in this worker's hands."""

    job: PrefillJob
    output: Output | None = None
    adopted: bool = False


class LocalStage:
    def __init__(
        self,
        parts: Parts,
        engine: WholeEngine,
        conductor: Conductor,
        batch: Batch,
        room: Room,
        queue: Queue,
        keepalive: Keepalive,
    ) -> None:
        self._parts = parts
        self._keepalive = keepalive
        self._engine = engine
        self._conductor = conductor
        self._batch = batch
        self._room = room
        self._queue = queue
        self._accept = Accept(parts, mode="aggregated")
        self._finisher = Finisher(parts)
        self._recovery = Recovery(parts)
        self.computed = 0
        """Requests in hand whose prompt is computed."""

    async def handle(self, delivery: Delivery) -> None:
        job, key = await self._accept.job(delivery, self._queue)
        taken = Taken(job)

        async def body(grant: Grant, work: Work) -> None:
            await self._serve(taken, grant)

        async def give_back(grant: Grant) -> bool:
            return await self._give_back(taken, grant)

        try:
            await self._conductor.conduct(key, Event.BEGIN, body, give_back)
        except errors.RecordNotFound as error:
            await self._accept.refuse(delivery, error)
            raise
        except errors.IllegalTransition:
            await self._conductor.settle(key, self._recovery.begun_before(job, key, self._queue))

    async def _serve(self, taken: Taken, grant: Grant) -> None:
        granted = time.monotonic()
        taken.job = await self._recovery.catch_up(taken.job, grant.record)
        if taken.job.output_so_far and await self._finisher.finish_early(taken.job, grant.record, grant.epoch):
            return
        work = prompt_work(taken.job, grant.record)
        run = await self._room.take(lambda: self._engine.admit(work, output=True))
        self._parts.account.now(grant, "computing", run, run.plan.total)
        try:
            started = time.monotonic()
            with self._parts.busy.computing():
                async for _ in run.chunks():
                    pass
            note = {
                "prefill_ms": round((time.monotonic() - started) * 1000, 3),
                "prompt_tokens": len(work.tokens),
                "first_token_ms": first_token_ms(grant, granted),
            }
            self.computed += 1
            self._room.changed()
            try:
                await self._continue(taken, work, grant, run, note)
            finally:
                self.computed -= 1
        finally:
            run.release()

    async def _continue(
        self, taken: Taken, work: PromptWork, grant: Grant, run: PrefillRun, note: dict[str, Any]
    ) -> None:
        """From the first token to the last."""
        record, tokenizer, epoch = grant.record, self._parts.tokenizer, grant.epoch
        output = taken.output = output_of(tokenizer, work.sampling, record, taken.job.output_so_far)
        first, seq = run.first, len(output.tokens)
        if first is not None:
            piece, finish = output.push(first.token)
            sent = entry(record, seq, first.token, piece, logprobs_of(tokenizer, work.sampling, first))
            if finish is not None:
                await self._parts.outbox.send(record.reply_to, (sent,))
                await self._finisher.finish(record, epoch, output, note | {"tokens": 1})
                return
        if failpoints.armed:
            await failpoints.hit("local.before_adopt", record.key.request_id)
        await self._adopt(taken, grant, first, note)
        if failpoints.armed:
            await failpoints.hit("local.after_adopt", record.key.request_id)
        if first is not None:
            await self._parts.outbox.send(record.reply_to, (sent,))
        started, before = time.monotonic(), len(output.tokens)
        seat = self._engine.adopt(run, work)
        self._parts.account.now(grant, "decoding", seat, run.plan.total)
        await self._batch.decode(record, work.sampling, seat, output, first)
        decode_note = {
            "decode_ms": round((time.monotonic() - started) * 1000, 3),
            "tokens": len(output.tokens) - before,
        }
        await self._finisher.finish(record, epoch, output, decode_note)

    async def _adopt(self, taken: Taken, grant: Grant, first: Drawn | None, note: dict[str, Any]) -> None:
        """The source lease becomes the sink lease, under the same epoch."""
        assert taken.output is not None
        key = grant.record.key
        changes = Changes(
            first_token=first.token if first is not None else None,
            emitted=len(taken.output.tokens),
            fingerprint=self._engine.contract.fingerprint.digest,
        )
        await self._parts.ledger.apply(
            key, Event.ADOPT, epoch=grant.epoch, worker=self._parts.worker, changes=changes, note=note
        )
        taken.adopted = True
        self._parts.account.adopted(grant)
        self._keepalive.move(Hold(key, Side.SOURCE, grant.epoch), Hold(key, Side.SINK, grant.epoch))

    async def _give_back(self, taken: Taken, grant: Grant) -> bool:
        if not taken.adopted or taken.output is None:
            await self._parts.ledger.apply(
                grant.record.key, Event.REQUEUE, epoch=grant.epoch, worker=self._parts.worker
            )
            return False
        tokens = taken.output.tokens
        await self._recovery.hand_back(taken.job, grant.record, grant.epoch, tokens, self._queue, reason="handed_back")
        return True
