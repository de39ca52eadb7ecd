"""From a delivered ``PrefillJob`` to a request with a record, an id, token ids and limits.

The bridge has done all of this before it published. A producer that publishes by itself has not: its job gets an id that
is a function of the message's place in the stream, so that a redelivery finds the record that the first delivery made.
It also meets the same gate. What that refuses ends here: its requester is told, and the job is gone.
"""

import asyncio
import contextlib
import logging
import math
from typing import Final, Literal

import msgspec
import xxhash

from pdq.core import names
from pdq.core.admission import Request
from pdq.core.errors import BadInput, ContextTooLong, InvalidMessage, InvalidRequest, PdqError, Refused, TurnedAway
from pdq.core.ids import derive_request_id, mint_secret
from pdq.core.lease import RecordKey
from pdq.core.messages import End, Failure, PrefillJob, TokenEntry, TokenFrame, decode
from pdq.ports import Delivery, NewRecord, PromptWork, Queue, Record
from pdq.stages.parts import Parts

log = logging.getLogger(__name__)

LONG_TEXT: Final = 20_000
"""Characters; tokenizing more than this would hold the loop for more than a few milliseconds."""


class _Addressed(msgspec.Struct):
    reply_to: str
    client_id: str = ""


class Accept:
    def __init__(self, parts: Parts, mode: Literal["disaggregated", "aggregated"] = "disaggregated") -> None:
        self._parts = parts
        self._mode = mode
        self._salt = ""

    async def job(self, delivery: Delivery, queue: Queue) -> tuple[PrefillJob, RecordKey]:
        """The complete job, with a record behind it.

        Raises:
            InvalidMessage: not a PrefillJob, or for another model.
            InvalidRequest: what it asks for cannot be served.
            TurnedAway: too much is here already.

        In all cases the requester is told, if the job says who that is.
        """
        try:
            return await self._complete(delivery, queue)
        except BadInput as error:
            await self.refuse(delivery, error)
            raise

    async def _complete(self, delivery: Delivery, queue: Queue) -> tuple[PrefillJob, RecordKey]:
        job = decode(delivery.data, PrefillJob)
        if job.model != self._parts.model:
            raise InvalidMessage(f"job for model {job.model!r} on the queue of {self._parts.model!r}")
        if job.request_id is not None:
            if job.prompt_token_ids is None:
                raise InvalidMessage("a job with a request_id must carry prompt_token_ids")
            return job, RecordKey(job.model, job.request_id)
        return await self._from_producer(job, delivery, queue)

    async def _from_producer(self, job: PrefillJob, delivery: Delivery, queue: Queue) -> tuple[PrefillJob, RecordKey]:
        if not names.publishable(job.reply_to):
            raise InvalidMessage(f"reply_to {job.reply_to!r} is a subject of pdq's own or of the broker's")
        if job.output_so_far:
            raise InvalidMessage("output_so_far is for pdq's own workers; leave it out")
        tokens = await self._tokens(job)
        settings = self._parts.settings
        max_new = self._max_new_tokens(len(tokens), job.sampling.max_tokens)
        self._salt = self._salt or await self._parts.ledger.salt()
        request_id = derive_request_id(delivery.published_ms, self._salt, queue.value, job.model, delivery.sequence)
        key = RecordKey(job.model, request_id)
        waited_ms = max(0, await self._parts.ledger.now_ms() - delivery.published_ms)
        timeout_ms = min(job.timeout_ms or settings.handoff.default_timeout_ms, settings.handoff.max_timeout_ms)
        left_ms = timeout_ms - waited_ms
        record = NewRecord(
            key=key,
            reply_to=job.reply_to,
            prompt_tokens=len(tokens),
            max_new_tokens=max_new,
            timeout_ms=max(1, left_ms),
            secret=mint_secret(),
            policy=job.policy.over(settings.policy),
            mode=self._mode,
            tenant=job.tenant,
            priority=job.priority,
            client_id=job.client_id,
            job=names.place(queue.stream, delivery.sequence),
        )
        # What is late already is let in, and expires: that says more than a refusal.
        await self._enter(delivery, record, left_ms / 1000 if left_ms > 0 else math.inf)
        complete = msgspec.structs.replace(
            job, request_id=request_id, prompt_token_ids=tuple(tokens), prompt=None, messages=None
        )
        return complete, key

    async def _enter(self, delivery: Delivery, record: NewRecord, left_s: float) -> None:
        """Write the record, if the gate lets it in or has done so before: a request that has one is not judged again."""
        request = Request(
            record.prompt_tokens, record.max_new_tokens, record.priority, record.tenant, left_s, queues=False
        )
        try:
            async with self._parts.gate.entering(record.key.model, request):
                await self._parts.ledger.enqueue(record)
        except Refused as refused:
            if not refused.reason:
                raise  # nobody judged: the ledger is away, and the job comes again
            if await self._parts.ledger.read(record.key) is not None:
                return
            log.info("job %d of %r turned away: %s", delivery.sequence, record.tenant, refused)
            again_s = math.ceil(refused.retry_after_s)
            await self._tell(delivery, refused, f"{refused}; try again in about {again_s} s")
            raise TurnedAway(str(refused)) from refused

    async def _tokens(self, job: PrefillJob) -> list[int]:
        tokenizer = self._parts.tokenizer
        if job.prompt_token_ids is not None:
            tokens = list(job.prompt_token_ids)
            if tokens and max(tokens) >= tokenizer.vocab_size:
                raise InvalidRequest(
                    f"token id {max(tokens)} is outside the vocabulary of {tokenizer.vocab_size}",
                    field="prompt_token_ids",
                )
        else:
            chat = job.messages is not None
            text = tokenizer.render(job.messages) if job.messages is not None else job.prompt or ""
            if len(text) > LONG_TEXT:
                tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=not chat)
            else:
                tokens = tokenizer.encode(text, add_special_tokens=not chat)
        if not tokens:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        return tokens

    def _max_new_tokens(self, prompt: int, wanted: int | None) -> int:
        """The output this request may have; the bridge applies the same rule before it publishes."""
        left = self._parts.max_context - prompt
        if left < 1 or (wanted or 1) > left:
            raise ContextTooLong(
                f"prompt of {prompt} tokens and max_tokens {wanted or 1} exceed the model's context of "
                f"{self._parts.max_context} tokens",
                field="max_tokens" if left >= 1 else "prompt",
            )
        return wanted or min(left, self._parts.settings.engine.max_output_tokens)

    async def refuse(self, delivery: Delivery, error: PdqError) -> None:
        """Tell the requester of a job without a record, if the job says who that is."""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, PdqError):
            await self._tell(delivery, error, str(error))

    async def _tell(self, delivery: Delivery, error: PdqError, message: str) -> None:
        addressed = msgspec.json.decode(delivery.data, type=_Addressed)
        if names.publishable(addressed.reply_to):
            end = End(state="failed", error=Failure(code=error.code, message=message, retryable=error.retryable))
            entry = TokenEntry(request_id="", seq=0, end=end, client_id=addressed.client_id)
            await self._parts.bus.send(addressed.reply_to, TokenFrame(worker=self._parts.worker, entries=(entry,)))


def prompt_work(job: PrefillJob, record: Record) -> PromptWork:
    """What the engine is asked for: the prompt, what the client already has of the output, and what may follow."""
    assert job.prompt_token_ids is not None
    assert job.request_id is not None
    sampling = job.sampling
    if sampling.seed is None:
        seed = xxhash.xxh3_64_intdigest(job.request_id.encode()) >> 1
        sampling = msgspec.structs.replace(sampling, seed=seed)
    return PromptWork(
        request_id=job.request_id,
        tokens=job.prompt_token_ids + job.output_so_far,
        resumed=len(job.output_so_far),
        sampling=sampling,
        max_new_tokens=record.max_new_tokens - len(job.output_so_far),
    )
