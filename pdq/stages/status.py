"""What has become of a job: the answer to a producer that hears nothing.

Frames travel at most once, and a producer that lost all of them (it was disconnected, or the broker was restarted just
then) has no request id to ask a worker by. What it has is the broker's acknowledgement of its job: the place of that in
its stream leads to the record, and the record to whoever can send again what is missing.
"""

import msgspec

from pdq.core import names
from pdq.core.handoff import State
from pdq.core.ids import derive_request_id, minted_ms
from pdq.core.lease import RecordKey
from pdq.core.messages import Resend, StatusAnswer, StatusQuestion
from pdq.ports import HandoffLedger, JobQueue, Queue, Record, StoredJob, TokenBus, WorkerRegistry
from pdq.stages.endings import Endings, ended_by


class _Published(msgspec.Struct):
    reply_to: str
    model: str
    request_id: str | None = None


class Status:
    def __init__(
        self, ledger: HandoffLedger, jobs: JobQueue, bus: TokenBus, registry: WorkerRegistry, endings: Endings
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._bus = bus
        self._registry = registry
        self._endings = endings
        self._salt = ""

    async def answer(self, question: StatusQuestion) -> StatusAnswer:
        """The state, after whoever has it was told to send what the producer lacks.

        Raises:
            Unavailable: ledger or broker does not answer.
        """
        queue = next((queue for queue in Queue if queue.stream == question.stream), None)
        if queue is None:
            return StatusAnswer("unknown")
        # The queue first: a worker writes the record before it is done with the job.
        job = await self._jobs.find(queue, question.sequence)
        if job is None:
            record = await self._done_with(queue, question)
        elif _is_of(job, question):
            record = await self._ledger.read(await self._key(queue, question.model, job))
        else:
            return StatusAnswer("unknown")
        if record is None or record.reply_to != question.reply_to:
            return StatusAnswer("unknown" if job is None else "waiting")
        await self._send_again(record, question.next_seq)
        return StatusAnswer(record.state.value, record.key.request_id)

    async def _done_with(self, queue: Queue, question: StatusQuestion) -> Record | None:
        """The request of a job that has left its queue. A stream that was lost and made anew counts from 1 again: what
        lay at the same place before is another's."""
        record = await self._ledger.of_job(question.model, names.place(question.stream, question.sequence))
        if record is None or minted_ms(record.key.request_id) < await self._jobs.created_ms(queue):
            return None
        return record

    async def _key(self, queue: Queue, model: str, job: StoredJob) -> RecordKey:
        self._salt = self._salt or await self._ledger.salt()
        return RecordKey(model, derive_request_id(job.published_ms, self._salt, queue.value, model, job.sequence))

    async def _send_again(self, record: Record, next_seq: int) -> None:
        holder = await self._holder(record)
        if holder:
            resend = Resend(record.key.request_id, next_seq, record.reply_to)
            await self._bus.control(names.worker_subject(holder), resend)
        elif record.state.terminal:
            await self._endings.again(record, next_seq)

    async def _holder(self, record: Record) -> str:
        """The worker that has what was sent of a request that runs or went well. Before a bad end, no token is missed."""
        if not record.state.terminal:
            lease = record.sink or record.source
            return lease.worker if lease is not None else ""
        if record.state is not State.DONE:
            return ""
        worker = await ended_by(self._ledger, record.key)
        live = {info.worker for info in await self._registry.workers(record.key.model)}
        return worker if worker in live else ""


def _is_of(job: StoredJob, question: StatusQuestion) -> bool:
    """Nobody learns of another's job, nor of those that pdq's own programs have published."""
    try:
        published = msgspec.json.decode(job.data, type=_Published)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    mine = (published.model, published.reply_to) == (question.model, question.reply_to)
    return mine and published.request_id is None
