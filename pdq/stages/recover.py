"""Jobs that come again, and requests that go back to the prefill queue.

A delivered job may find its record anywhere: its former holder died at any step. And a request goes back to prefill when
its KV is lost, its decode worker died, or a worker leaves before its sequences have ended. Then the record goes to
``queued`` first and the job is published second; whoever is delivered the former job again in between finds ``queued``
and publishes once more, which the broker recognizes by the message id.
"""

import logging
from collections.abc import Sequence

import msgspec

from pdq import failpoints
from pdq.core import errors
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import DecodeJob, PrefillJob, TokenLogprobs, encode
from pdq.ports import Changes, Queue, Record
from pdq.stages.parts import Parts

log = logging.getLogger(__name__)

OWNER_ANSWER_S = 2.0


class Recovery:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # --- jobs that come again -----------------------------------------------------------------------------------------

    async def begun_before(self, job: PrefillJob, key: RecordKey, queue: Queue) -> None:
        """A prefill job was delivered again after its record had moved on from where a prefill begins.

        Raises:
            LeaseHeld: another worker decodes it in place.
            StreamLost, RequestCancelled: as ``sink_lost``.
        """
        record = await self._parts.ledger.read(key)
        if record is None:
            return
        if record.state is State.READY:
            # Its holder may have died before it published the decode job.
            await self.announce(job, record)
        elif record.state is State.FETCHED and not record.digest:
            # Adopted, not fetched: there is no decode job that would find out that the worker has died.
            await self._refuse_while_decoding(record)
            await self.sink_lost(job, record, queue)

    async def claimed_before(self, job: DecodeJob, key: RecordKey) -> None:
        """A decode job was delivered again after its record had moved on from where it can be claimed.

        Raises:
            LeaseHeld: another worker decodes it; or none does any more, and it can be claimed at once.
            StreamLost, RequestCancelled: as ``sink_lost``.
            AttemptsExhausted: too many workers have died of it.
        """
        record = await self._parts.ledger.read(key)
        if record is None or record.state.terminal or record.attempt != job.attempt:
            return
        if record.state is State.QUEUED:
            # Its holder may have died before it published the prefill job.
            known = _arrived(job)
            tokens = known if len(known) >= record.emitted else await self._ask(record, known)
            await self._publish(job.job, record, tokens, Queue.PREFILL)
        elif record.state is State.FETCHED:
            now_ms = await self._refuse_while_decoding(record)
            if kept(record, now_ms):
                await self._offer_again(record)
            else:
                await self.sink_lost(job.job, record, Queue.PREFILL)

    async def catch_up(self, job: PrefillJob, record: Record) -> PrefillJob:
        """``job``, continuing after all tokens that the client has: an older delivery may know fewer of them."""
        if record.emitted <= len(job.output_so_far):
            return job
        return msgspec.structs.replace(job, output_so_far=await self._ask(record, job.output_so_far))

    async def sent(self, job: DecodeJob, record: Record) -> tuple[int, ...]:
        """The output of a ``ready`` record that the client has, or will have without anybody's further doing.

        Raises:
            StreamLost, RequestCancelled: as ``sink_lost``.
        """
        known = max(_known_tokens(job.job, record), job.sent, key=len)
        if record.streaming or record.emitted > len(known):
            return await self._ask(record, known)
        return known

    async def announce(self, job: PrefillJob, record: Record, logprobs: TokenLogprobs | None = None) -> None:
        """Publish the decode job of ``record``'s current attempt."""
        decode_job = DecodeJob(job=job, source=self._parts.worker, attempt=record.attempt, first_logprobs=logprobs)
        await self._parts.jobs.publish(
            Queue.DECODE,
            record.key.model,
            encode(decode_job),
            message_id=f"{record.key.request_id}:decode:{record.attempt}",
            priority=record.priority,
        )

    # --- back to prefill ----------------------------------------------------------------------------------------------

    async def kv_lost(self, job: DecodeJob, record: Record, epoch: int, error: errors.PdqError) -> None:
        """No locator served a ``ready`` record's KV: prefill again, if its policy says so. A stream that had begun is no
        failed handoff: had nobody kept its KV, it would be resumed, too.

        Raises:
            HandoffRejected: the policy is to reject.
            StreamLost: tokens are out, and the policy is not to resume, or nobody knows which.
        """
        if record.policy.on_handoff_failure == "reject" and not record.streaming:
            raise errors.HandoffRejected(str(error)) from error
        tokens = await self.sent(job, record)
        if tokens and record.policy.on_stream_failure == "fail":
            raise errors.StreamLost(f"the KV is lost after {len(tokens)} tokens were sent: {error}") from error
        if not record.streaming:
            # The first token may have died with its source. It is drawn again; who has it drops it.
            tokens = _arrived(job)
        await self.hand_back(job.job, record, epoch, tokens, Queue.PREFILL, reason=error.code)

    async def sink_lost(self, job: PrefillJob, record: Record, queue: Queue) -> None:
        """A ``fetched`` record whose worker's lease has run out: the KV died with it.

        Raises:
            StreamLost: the policy is not to resume, or nobody knows which tokens arrived.
            RequestCancelled: the requester is gone.
        """
        _refuse_to_resume(record)
        tokens = await self._ask(record, job.output_so_far)
        await self.hand_back(job, record, None, tokens, queue, reason="decode_worker_lost")

    async def hand_back(
        self, job: PrefillJob, record: Record, epoch: int | None, tokens: Sequence[int], queue: Queue, reason: str
    ) -> None:
        """To ``queued``, with a prefill job that continues after ``tokens``."""
        note = {"reason": reason, "resumes_at": len(tokens)}
        changes = Changes(emitted=len(tokens), streaming=False)
        if failpoints.armed:
            await failpoints.hit("recovery.before_requeue", record.key.request_id)
        worker = self._parts.worker
        await self._parts.ledger.apply(
            record.key, Event.REQUEUE, epoch=epoch, worker=worker, changes=changes, note=note
        )
        log.info("request %s goes back to prefill (%s) at token %d", record.key.request_id, reason, len(tokens))
        if failpoints.armed:
            await failpoints.hit("recovery.after_requeue", record.key.request_id)
        await self._publish(job, record, tokens, queue)

    # --- back to the decode queue -------------------------------------------------------------------------------------

    async def pass_on(self, job: DecodeJob, record: Record, epoch: int, tokens: Sequence[int]) -> None:
        """The sequence leaves this worker while its KV is kept elsewhere: another one goes on after ``tokens``."""
        note = {"reason": "handed_back", "resumes_at": len(tokens)}
        changes = Changes(emitted=len(tokens), streaming=False)
        await self._parts.ledger.apply(
            record.key, Event.YIELD, epoch=epoch, worker=self._parts.worker, changes=changes, note=note
        )
        await self._parts.jobs.publish(
            Queue.DECODE,
            record.key.model,
            encode(msgspec.structs.replace(job, sent=tuple(tokens))),
            message_id=f"{record.key.request_id}:decode:{record.attempt}:{epoch}",
            priority=record.priority,
        )

    async def _offer_again(self, record: Record) -> None:
        """The worker of a ``fetched`` record has died, its KV is kept: back to ``ready``, for whoever claims next."""
        _refuse_to_resume(record)
        if not _another_try(record):
            raise errors.AttemptsExhausted(
                f"{record.streams_lost + 1} decode workers died in attempt {record.attempt} of {record.key.request_id}"
            )
        await self._parts.ledger.apply(
            record.key,
            Event.YIELD,
            worker=self._parts.worker,
            changes=Changes(streams_lost=record.streams_lost + 1),
            note={"reason": "decode_worker_lost"},
        )
        raise errors.LeaseHeld(f"{record.key.request_id} can be claimed again", remaining_ms=0)

    async def _publish(self, job: PrefillJob, record: Record, tokens: Sequence[int], queue: Queue) -> None:
        await self._parts.jobs.publish(
            queue,
            record.key.model,
            encode(msgspec.structs.replace(job, output_so_far=tuple(tokens))),
            message_id=f"{record.key.request_id}:{queue}:{record.attempt + 1}",
            priority=record.priority,
        )

    async def _ask(self, record: Record, known: Sequence[int]) -> tuple[int, ...]:
        """The tokens that the client has; ``known``, if it does not have all of these yet: they are on their way.

        The answer comes from outside, and goes into a model: it is believed only as far as it can be true.
        """
        answer = await self._parts.bus.ask_output(record.reply_to, record.key.request_id, OWNER_ANSWER_S)
        if answer is None:
            raise errors.StreamLost(f"nobody at {record.reply_to} knows which tokens of the lost stream arrived")
        if not answer.wanted:
            raise errors.RequestCancelled("the requester no longer wants the output")
        tokens, common = answer.tokens, min(len(known), len(answer.tokens))
        vocabulary = self._parts.tokenizer.vocab_size
        if (
            tokens[:common] != tuple(known[:common])
            or len(tokens) > record.max_new_tokens
            or any(token >= vocabulary for token in tokens)
        ):
            raise errors.StreamLost(f"{record.reply_to} says that it has {len(tokens)} tokens which were never sent")
        return max(tuple(known), tokens, key=len)

    async def _refuse_while_decoding(self, record: Record) -> int:
        """The ledger's time, if nobody decodes ``record``."""
        now_ms = await self._parts.ledger.now_ms()
        if record.sink is not None and record.sink.running(now_ms):
            left = record.sink.until_ms - now_ms
            raise errors.LeaseHeld(f"{record.sink.worker} decodes {record.key.request_id}", remaining_ms=left)
        return now_ms


def kept(record: Record, now_ms: int) -> bool:
    """Somebody who is not the sink still has the record's KV: its source, or a tier."""
    alive = record.source is not None and record.source.running(now_ms)
    return bool(record.locators) and (alive or any(locator.outlives for locator in record.locators))


def may_offer_again(record: Record, now_ms: int) -> bool:
    """The worker of a ``fetched`` record has died: another one may go on from the same KV."""
    return kept(record, now_ms) and record.policy.on_stream_failure == "resume" and _another_try(record)


def _another_try(record: Record) -> bool:
    return record.attempt + record.streams_lost < record.policy.max_attempts


def _refuse_to_resume(record: Record) -> None:
    if record.policy.on_stream_failure == "fail":
        raise errors.StreamLost("the decode worker died, and the request's policy is to fail")


def _arrived(job: DecodeJob) -> tuple[int, ...]:
    """What the client has for certain when this job's decoding has not begun: the first token may not have been sent."""
    return max(job.job.output_so_far, job.sent, key=len)


def _known_tokens(job: PrefillJob, record: Record) -> tuple[int, ...]:
    """What the client has been sent when decode has not begun: earlier output, and the prefill side's first token."""
    first = () if record.first_token is None else (record.first_token,)
    return job.output_so_far + first
