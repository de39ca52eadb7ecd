"""A decode worker's handling of one job: claim, reserve, fetch, verify, decode, finish.

The job stays unacknowledged (with heartbeats) until the request has ended, so that the death of the worker at any step
brings it to another one.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdq import failpoints
from pdq.core import errors, names
from pdq.core.handoff import Event, Retain, Side, State
from pdq.core.layout import KvLayout
from pdq.core.lease import Lease, RecordKey
from pdq.core.messages import Cancel, Control, DecodeJob, Release, decode
from pdq.core.output import Output
from pdq.ports import (
    Changes,
    ChunkPlan,
    DecodeEngine,
    DecodeSeat,
    Delivery,
    Drawn,
    Grant,
    HandoffRef,
    PromptWork,
    Queue,
    Record,
)
from pdq.stages.accept import prompt_work
from pdq.stages.batch import Batch
from pdq.stages.conduct import Conductor
from pdq.stages.fetch import Fetcher, Landed
from pdq.stages.finish import Finisher
from pdq.stages.parts import Parts
from pdq.stages.recover import Recovery, kept
from pdq.stages.room import Room
from pdq.stages.text import entry, output_of
from pdq.stages.work import Work

log = logging.getLogger(__name__)

PATIENCE_S: Final = 1.0
"""A job whose sequence does not fit here goes to another worker after this."""
Enough = Callable[[Record], bool]

POLL_S: Final = (0.002, 0.05)
"""Shortest and longest pause between looks at a record whose prefill still runs."""


@dataclass
class Taken:
    """One decode job in this worker's hands. ``record`` and ``output`` are set once its KV is ours: from then on the
    sequence is handed back together with its tokens."""

    job: DecodeJob
    record: Record | None = None
    output: Output | None = None
    spoiled: bool = False
    """The engine gave the sequence up: the same KV may lead there again."""


class DecodeStage:
    def __init__(
        self, parts: Parts, engine: DecodeEngine, conductor: Conductor, fetcher: Fetcher, batch: Batch, room: Room
    ) -> None:
        self._parts = parts
        self._engine = engine
        self._conductor = conductor
        self._fetcher = fetcher
        self._batch = batch
        self._room = room
        self._recovery = Recovery(parts)
        self._finisher = Finisher(parts)
        self.landed = 0
        """Of the jobs in hand, those whose KV is complete here."""

    async def handle(self, delivery: Delivery) -> None:
        job = decode(delivery.data, DecodeJob)
        if job.job.request_id is None or job.job.prompt_token_ids is None or job.job.model != self._parts.model:
            raise errors.InvalidMessage("a decode job needs request_id, prompt_token_ids and this queue's model")
        key = RecordKey(job.job.model, job.job.request_id)
        taken = Taken(job)

        async def body(grant: Grant, _: Work) -> None:
            await self._serve(taken, grant)

        async def give_back(grant: Grant) -> bool:
            return await self._give_back(taken, grant)

        try:
            await self._conductor.conduct(key, Event.CLAIM, body, give_back)
        except errors.IllegalTransition:
            await self._conductor.settle(key, self._recovery.claimed_before(job, key))

    async def _serve(self, taken: Taken, grant: Grant) -> None:
        record = grant.record
        if failpoints.armed:
            await failpoints.hit("decode.claimed", record.key.request_id)
        if record.attempt != taken.job.attempt:
            # The job of an attempt that was overtaken; its successor has a job of its own.
            await self._parts.ledger.release(record.key, Side.SINK, grant.epoch)
            return
        work = prompt_work(taken.job.job, record)
        try:
            landed = await self._land(work, grant)
        except errors.TransferFailed as error:
            now = await self._parts.ledger.read(record.key)
            if now is None or now.state is not State.READY:
                raise  # its prefill still runs: nothing is lost, and the next try may find it complete
            await self._recovery.kv_lost(taken.job, now, grant.epoch, error)
            return
        self.landed += 1
        self._room.changed()
        try:
            known = await self._recovery.sent(taken.job, landed.record)
            source = landed.record.source
            await self._take_over(grant, landed)
            await self._decode(taken, work, grant, landed, known)
        finally:
            self.landed -= 1
            landed.seat.leave()
        await self._let_all_go(landed.record, source)

    async def _land(self, work: PromptWork, grant: Grant) -> Landed:
        """The whole KV, verified, in a seat of our own."""
        record = await self._until(grant.record, lambda it: it.layout is not None)
        layout = self._compatible(record)
        plan = ChunkPlan(tuple(layout.chunk_lengths(len(work.tokens))))

        async def reserve() -> DecodeSeat:
            seat = await self._room.take(lambda: self._engine.reserve(work, layout), PATIENCE_S)
            self._parts.account.now(grant, "fetching", seat, plan.total)
            return seat

        async def ready() -> Record:
            return await self._until(record, lambda it: it.state is State.READY)

        async def again() -> Record:
            current = await self._parts.ledger.read(record.key)
            return await self._until(current or record, lambda it: it.state is State.READY)

        return await self._fetcher.land(record, grant.now_ms, plan, reserve, ready, again)

    async def _take_over(self, grant: Grant, landed: Landed) -> None:
        """The record says that the KV is here, and the source may let go, unless it is to keep it longer."""
        key, source = landed.record.key, landed.record.source
        if failpoints.armed:
            await failpoints.hit("decode.before_fetched", key.request_id)
        landed.record = await self._parts.ledger.apply(
            key,
            Event.FETCHED,
            epoch=grant.epoch,
            worker=self._parts.worker,
            changes=Changes(streaming=True),
            note=landed.note(),
        )
        if failpoints.armed:
            await failpoints.hit("decode.after_fetched", key.request_id)
        if source is not None and landed.record.source is None:
            if failpoints.armed and await failpoints.hit("decode.release", key.request_id):
                return
            await self._release(landed.record, source)

    async def _decode(
        self, taken: Taken, work: PromptWork, grant: Grant, landed: Landed, known: tuple[int, ...]
    ) -> None:
        """From behind ``known``, the output that is out already, to the end."""
        record, job = landed.record, taken.job
        output = output_of(self._parts.tokenizer, work.sampling, record, known[: work.resumed])
        for token in known[work.resumed :]:
            if output.finish is not None:
                break
            seq = len(output.tokens)
            piece, _ = output.push(token)
            if seq == work.resumed and token == record.first_token:
                # Sent by the prefill side; known here so that it can be sent again.
                self._parts.outbox.remember(entry(record, seq, token, piece, job.first_logprobs))
        taken.record, taken.output = record, output
        self._parts.account.now(grant, "decoding", landed.seat, landed.fetched.bytes)
        started, before = time.monotonic(), len(output.tokens)
        if output.finish is None:
            await self._continue(taken, work, landed, output)
        note = {
            "decode_ms": round((time.monotonic() - started) * 1000, 3),
            "tokens": len(output.tokens) - before,
        }
        await self._finisher.finish(record, grant.epoch, output, note)

    async def _continue(self, taken: Taken, work: PromptWork, landed: Landed, output: Output) -> None:
        record, replay = landed.record, output.tokens[work.resumed :]
        first = Drawn(replay.pop(0)) if record.first_token is not None else None
        began = asyncio.Event()
        releasing = asyncio.ensure_future(self._release_at(began, record))
        try:
            await self._batch.decode(record, work.sampling, landed.seat, output, first, replay, began)
        except errors.EngineFailed:
            taken.spoiled = True
            raise
        finally:
            releasing.cancel()

    # --- what the source may let go of --------------------------------------------------------------------------------

    async def _release_at(self, began: asyncio.Event, record: Record) -> None:
        if record.source is not None and Retain(record.policy.retain) is Retain.FIRST_TOKEN:
            await began.wait()
            await self._release(record, record.source)

    async def _release(self, record: Record, source: Lease) -> None:
        """A source that does not hear it finds its lease gone at the next renewal, at the latest when the request ends."""
        await self._tell(source, Release((record.key.request_id,)))

    async def _let_all_go(self, record: Record, source: Lease | None) -> None:
        """The request is done: nobody needs what source and tiers still keep of it. What is not heard ends by itself."""
        tiers = [locator for locator in record.locators if locator.outlives]
        if source is not None and (tiers or Retain(record.policy.retain) is not Retain.FETCHED):
            await self._tell(source, Cancel((record.key.request_id,)))
        elif source is None:
            for locator in tiers:
                if transport := self._parts.transports.get(locator.transport):
                    await transport.release(HandoffRef(record.key, locator.epoch, record.secret))

    async def _tell(self, source: Lease, message: Control) -> None:
        try:
            await self._parts.bus.control(names.worker_subject(source.worker), message)
        except errors.Unavailable as error:
            log.warning("%s is not told to let go: %s", source.worker, error)

    async def _give_back(self, taken: Taken, grant: Grant) -> bool:
        if taken.output is None or taken.record is None:
            await self._parts.ledger.release(grant.record.key, Side.SINK, grant.epoch)
            return False
        tokens, ledger = taken.output.tokens, self._parts.ledger
        current = await ledger.read(grant.record.key)
        if current is not None and not taken.spoiled and kept(current, await ledger.now_ms()):
            await self._recovery.pass_on(taken.job, current, grant.epoch, tokens)
        else:
            await self._recovery.hand_back(
                taken.job.job, taken.record, grant.epoch, tokens, Queue.PREFILL, reason="handed_back"
            )
        return True

    def _compatible(self, record: Record) -> KvLayout:
        ours = self._engine.contract.fingerprint.digest
        if record.fingerprint != ours:
            raise errors.IncompatibleContract(
                f"KV was made by model {record.fingerprint}, this worker runs {ours}: "
                "run both pools with the same weights, tokenizer and dtype"
            )
        assert record.layout is not None
        return record.layout

    async def _until(self, record: Record, enough: Enough) -> Record:
        """The record, once ``enough``; it may be now, or when the prefill that still runs has come that far.

        Raises:
            StaleEpoch: the attempt is over.
        """
        pause, longest = POLL_S
        attempt = record.attempt
        while not enough(record):
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, longest)
            current = await self._parts.ledger.read(record.key)
            if current is None or current.attempt != attempt or current.state not in (State.PREFILLING, State.READY):
                raise errors.StaleEpoch(f"attempt {attempt} of {record.key.request_id} is over")
            record = current
        return record
