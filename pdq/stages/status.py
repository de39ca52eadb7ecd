"""What has become of a job: the answer to a producer that hears nothing.

Frames travel at most once, and a producer that lost all of them (it was disconnected, or the broker was restarted just
then) has no request id to ask a worker by. What it has is the broker's acknowledgement of its job: the place of that in
its stream leads to the record, and the record to whoever can send again what is missing.
"""

from pdq.core import names
from pdq.core.handoff import State
from pdq.core.messages import Resend, StatusAnswer, StatusQuestion
from pdq.ports import HandoffLedger, JobQueue, Queue, Record, TokenBus, WorkerRegistry
from pdq.stages.endings import Endings, ended_by


class Status:
    def __init__(
        self, ledger: HandoffLedger, jobs: JobQueue, bus: TokenBus, registry: WorkerRegistry, endings: Endings
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._bus = bus
        self._registry = registry
        self._endings = endings

    async def answer(self, question: StatusQuestion) -> StatusAnswer:
        """The state, after whoever has it was told to send what the producer lacks.

        Raises:
            Unavailable: ledger or broker does not answer.
        """
        record = await self._find(question)
        if record is None and await self._waits(question):
            return StatusAnswer("waiting")
        # A worker writes the record before it is done with the job: one that is gone by now may have got one meanwhile.
        record = record or await self._find(question)
        if record is None or record.reply_to != question.reply_to:
            return StatusAnswer("unknown")
        await self._send_again(record, question.next_seq)
        return StatusAnswer(record.state.value, record.key.request_id)

    async def _find(self, question: StatusQuestion) -> Record | None:
        return await self._ledger.of_job(question.model, names.place(question.stream, question.sequence))

    async def _waits(self, question: StatusQuestion) -> bool:
        queue = next((queue for queue in Queue if queue.stream == question.stream), None)
        return queue is not None and await self._jobs.find(queue, question.sequence) is not None

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
