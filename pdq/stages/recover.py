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
            LeaseHeld: another worker decodes it.
            StreamLost, RequestCancelled: as ``sink_lost``.
        """
        record = await self._parts.ledger.read(key)
        if record is None or record.state.terminal or record.attempt != job.attempt:
            return
        if record.state is State.QUEUED:
            # Its holder may have died before it published the prefill job.
            known = _known_tokens(job.job, record)
            tokens = known if len(known) >= record.emitted else await self._ask(record)
            await self._publish(job.job, record, tokens, Queue.PREFILL)
        elif record.state is State.FETCHED:
            await self._refuse_while_decoding(record)
            await self.sink_lost(job.job, record, Queue.PREFILL)

    async def catch_up(self, job: PrefillJob, record: Record) -> PrefillJob:
        """``job``, continuing after all tokens that the client has: an older delivery may know fewer of them."""
        if record.emitted <= len(job.output_so_far):
            return job
        return msgspec.structs.replace(job, output_so_far=tuple(await self._ask(record)))

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

    async def kv_lost(self, job: PrefillJob, record: Record, epoch: int, error: errors.PdqError) -> None:
        """No locator served a ``ready`` record's KV: prefill again, if its policy says so.

        Raises:
            HandoffRejected: the policy is to reject.
            StreamLost: the first token is out, and the policy is not to resume.
        """
        if record.policy.on_handoff_failure == "reject":
            raise errors.HandoffRejected(str(error)) from error
        tokens = _known_tokens(job, record)
        if tokens and record.policy.on_stream_failure == "fail":
            raise errors.StreamLost(f"the KV is lost after {len(tokens)} tokens were sent: {error}") from error
        await self.hand_back(job, record, epoch, tokens, Queue.PREFILL, reason=error.code)

    async def sink_lost(self, job: PrefillJob, record: Record, queue: Queue) -> None:
        """A ``fetched`` record whose worker's lease has run out: the KV died with it.

        Raises:
            StreamLost: the policy is not to resume, or nobody knows which tokens arrived.
            RequestCancelled: the requester is gone.
        """
        if record.policy.on_stream_failure == "fail":
            raise errors.StreamLost("the decode worker died, and the request's policy is to fail")
        tokens = await self._ask(record)
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
        await self._publish(job, record, tokens, queue)

    async def _publish(self, job: PrefillJob, record: Record, tokens: Sequence[int], queue: Queue) -> None:
        await self._parts.jobs.publish(
            queue,
            record.key.model,
            encode(msgspec.structs.replace(job, output_so_far=tuple(tokens))),
            message_id=f"{record.key.request_id}:{queue}:{record.attempt + 1}",
            priority=record.priority,
        )

    async def _ask(self, record: Record) -> Sequence[int]:
        """The tokens that the client has."""
        answer = await self._parts.bus.ask_output(record.reply_to, record.key.request_id, OWNER_ANSWER_S)
        if failpoints.armed:
            await failpoints.hit("recovery.after_requeue", record.key.request_id)
        if answer is None:
            raise errors.StreamLost(f"nobody at {record.reply_to} knows which tokens of the lost stream arrived")
        if not answer.wanted:
            raise errors.RequestCancelled("the requester no longer wants the output")
        return answer.tokens

    async def _refuse_while_decoding(self, record: Record) -> None:
        now_ms = await self._parts.ledger.now_ms()
        if record.sink is not None and record.sink.running(now_ms):
            left = record.sink.until_ms - now_ms
            raise errors.LeaseHeld(f"{record.sink.worker} decodes {record.key.request_id}", remaining_ms=left)


def _known_tokens(job: PrefillJob, record: Record) -> tuple[int, ...]:
    """What the client has been sent when decode has not begun: earlier output, and the prefill side's first token."""
    first = () if record.first_token is None else (record.first_token,)
    return job.output_so_far + first
