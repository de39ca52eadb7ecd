"""A prefill worker's handling of one job: compute and offer chunk by chunk, ready, first token, decode job.

The job is acknowledged when the decode job is stored, not before: a worker that dies at any step leaves a job that is
delivered again, and a record that says how far it came.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdq import failpoints
from pdq.core import errors
from pdq.core.handoff import Event, Retain, Side
from pdq.core.layout import manifest_digest
from pdq.core.lease import Hold
from pdq.core.messages import PrefillJob, TokenLogprobs
from pdq.ports import (
    Buffer,
    Changes,
    Delivery,
    Drawn,
    Grant,
    HandoffRef,
    Locator,
    PrefillEngine,
    PrefillRun,
    PromptWork,
    Queue,
    Record,
)
from pdq.stages.accept import Accept, prompt_work
from pdq.stages.conduct import Conductor
from pdq.stages.finish import Finisher
from pdq.stages.offers import Held, Offers
from pdq.stages.parts import Parts
from pdq.stages.recover import Recovery
from pdq.stages.room import Room
from pdq.stages.text import entry, first_token_ms, logprobs_of, output_of
from pdq.stages.work import Work


@dataclass
class Attempt:
    """One attempt at one request's prefill, while this worker computes it."""

    job: PrefillJob
    grant: Grant
    work: PromptWork
    run: PrefillRun
    hashes: list[str] = field(default_factory=list)
    chunks: list[Sequence[Buffer]] = field(default_factory=list)
    locators: tuple[Locator, ...] = ()
    announced: bool = False
    held: bool = False
    granted: float = field(kw_only=True)
    """When the lease was granted, and when computing began (``time.monotonic``)."""
    started: float = field(default_factory=time.monotonic)

    @property
    def record(self) -> Record:
        return self.grant.record

    @property
    def ref(self) -> HandoffRef:
        return HandoffRef(self.record.key, self.grant.epoch, self.record.secret)


class PrefillStage:
    def __init__(self, parts: Parts, engine: PrefillEngine, conductor: Conductor, offers: Offers, room: Room) -> None:
        self._parts = parts
        self._engine = engine
        self._conductor = conductor
        self._offers = offers
        self._room = room
        self._accept = Accept(parts)
        self._finisher = Finisher(parts)
        self._recovery = Recovery(parts)

    async def handle(self, delivery: Delivery) -> None:
        job, key = await self._accept.job(delivery, Queue.PREFILL)

        async def body(grant: Grant, _: Work) -> None:
            await self._attempt(job, grant)

        async def give_back(grant: Grant) -> bool:
            await self._parts.ledger.apply(key, Event.REQUEUE, epoch=grant.epoch, worker=self._parts.worker)
            return False

        try:
            await self._conductor.conduct(key, Event.BEGIN, body, give_back)
        except errors.RecordNotFound as error:
            await self._accept.refuse(delivery, error)
            raise
        except errors.IllegalTransition:
            await self._conductor.settle(key, self._recovery.begun_before(job, key, Queue.PREFILL))

    async def _attempt(self, job: PrefillJob, grant: Grant) -> None:
        granted = time.monotonic()
        if failpoints.armed:
            await failpoints.hit("prefill.begun", grant.record.key.request_id)
        job = await self._recovery.catch_up(job, grant.record)
        if job.output_so_far and await self._finisher.finish_early(job, grant.record, grant.epoch):
            return
        work = prompt_work(job, grant.record)
        run = await self._room.take(lambda: self._engine.admit(work))
        attempt = Attempt(job, grant, work, run, granted=granted)
        self._parts.account.now(grant, "computing", run, run.plan.total)
        try:
            if failpoints.armed:
                await failpoints.hit("prefill.admitted", grant.record.key.request_id)
            with self._parts.busy.computing():
                await self._compute(attempt)
            await self._hand_over(attempt)
        finally:
            if not attempt.held:
                await self._offers.release(attempt.ref, run)

    async def _compute(self, attempt: Attempt) -> None:
        """Every chunk of the prompt, offered as soon as it is finished."""
        order = self._parts.settings.handoff.order
        request_id = attempt.record.key.request_id
        if order == "on_start":
            await self._announce(attempt)
        async for index, chunk in attempt.run.chunks():
            if failpoints.armed:
                await failpoints.hit("prefill.chunk", request_id)
            digest, locators = await self._offers.offer(attempt.ref, attempt.run.plan, index, chunk)
            # A way that failed for one chunk is no way to the whole.
            attempt.locators = tuple(it for it in locators if not index or it in attempt.locators)
            attempt.hashes.append(digest)
            attempt.chunks.append(chunk)
            if failpoints.armed:
                await failpoints.hit("prefill.offered", request_id)
            if index == 0 and order != "on_complete":
                changes = self._description(attempt)
                await self._parts.ledger.update(attempt.record.key, Side.SOURCE, attempt.grant.epoch, changes)
                if order == "on_first_chunk":
                    await self._announce(attempt)

    async def _hand_over(self, attempt: Attempt) -> None:
        """The prompt is computed: ready, first token, decode job. Or done, if the first token ends the request."""
        parts, record, first = self._parts, attempt.record, attempt.run.first
        output = output_of(parts.tokenizer, attempt.work.sampling, record, attempt.job.output_so_far)
        if first is None:
            await self._ready(attempt, None, len(output.tokens))
            await self._announce(attempt)
            return
        seq = len(output.tokens)
        piece, finish = output.push(first.token)
        logprobs = logprobs_of(parts.tokenizer, attempt.work.sampling, first)
        if finish is None:
            await self._ready(attempt, first, seq + 1)
            await parts.outbox.send(record.reply_to, (entry(record, seq, first.token, piece, logprobs),))
            if failpoints.armed:
                await failpoints.hit("prefill.after_first_token", record.key.request_id)
            await self._announce(attempt, logprobs)
            return
        await parts.outbox.send(record.reply_to, (entry(record, seq, first.token, piece, logprobs),))
        await self._finisher.finish(record, attempt.grant.epoch, output, self._note(attempt) | {"tokens": 1})

    async def _ready(self, attempt: Attempt, first: Drawn | None, emitted: int) -> None:
        """From here on the KV is held until somebody has fetched it, or nobody wants it any more."""
        if failpoints.armed:
            await failpoints.hit("prefill.before_ready", attempt.record.key.request_id)
        plan = attempt.run.plan
        changes = Changes(
            locators=attempt.locators,
            layout=self._engine.contract.layout,
            fingerprint=self._engine.contract.fingerprint.digest,
            digest=manifest_digest(list(plan.lengths), attempt.hashes),
            first_token=first.token if first is not None else None,
            emitted=emitted,
        )
        await self._parts.ledger.apply(
            attempt.record.key,
            Event.READY,
            epoch=attempt.grant.epoch,
            worker=self._parts.worker,
            changes=changes,
            note=self._note(attempt),
        )
        hold = Hold(attempt.record.key, Side.SOURCE, attempt.grant.epoch)
        retained = Retain(attempt.record.policy.retain) is not Retain.FETCHED
        self._offers.keep(Held(attempt.ref, attempt.run, hold, attempt.chunks, attempt.locators, retained))
        attempt.held = True
        self._parts.account.now(attempt.grant, "finishing")
        if failpoints.armed:
            await failpoints.hit("prefill.after_ready", attempt.record.key.request_id)

    def _description(self, attempt: Attempt) -> Changes:
        """What a sink needs to begin fetching before the prompt is complete."""
        contract = self._engine.contract
        return Changes(locators=attempt.locators, layout=contract.layout, fingerprint=contract.fingerprint.digest)

    def _note(self, attempt: Attempt) -> dict[str, Any]:
        note = {
            "prefill_ms": round((time.monotonic() - attempt.started) * 1000, 3),
            "prompt_tokens": len(attempt.work.tokens),
            "bytes": attempt.run.plan.total,
            "chunks": len(attempt.run.plan.lengths),
        }
        if attempt.run.first is not None:
            note["first_token_ms"] = first_token_ms(attempt.grant, attempt.granted)
        return note

    async def _announce(self, attempt: Attempt, logprobs: TokenLogprobs | None = None) -> None:
        """Publish the decode job; once per attempt, however often this is called."""
        request_id = attempt.record.key.request_id
        if not attempt.announced:
            attempt.announced = True
            if failpoints.armed:
                await failpoints.hit("prefill.before_announce", request_id)
            await self._recovery.announce(attempt.job, attempt.record, logprobs)
            if failpoints.armed:
                await failpoints.hit("prefill.after_announce", request_id)
