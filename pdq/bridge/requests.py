"""The requests in flight: one token subscription for the whole process, and what every accepted request can rely on.

*It ends.* By the end in its token frames; if those stay silent, by its record, which is the truth about its state; if its
client goes away, by a cancellation that outlives the task which noticed.

*It is whole.* A gap is asked for again from the worker that showed it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from pdq.bridge.metrics import Metrics
from pdq.bridge.reply import Reply
from pdq.core import errors, names
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import Cancel, End, Failure, OutputAnswer, Resend, TokenEntry, TokenFrame
from pdq.core.stream import Assembler
from pdq.ports import Changes, HandoffLedger, Record, Subscription, TokenBus
from pdq.runtime import Trouble
from pdq.stages.endings import ended_by, recorded_end

log = logging.getLogger(__name__)

END_TRIES: Final = 4
"""How often the worker that ended a request is asked for tokens that did not arrive."""
SWEEP_S: Final = 0.5
CANCEL_TRIES: Final = 6
BRIDGE: Final = "bridge"
"""The worker name in the log entries of records that the bridge ends."""
GOING: Final = "the bridge is shutting down"


class Stream:
    """One accepted request, from its record's creation to its end."""

    __slots__ = (
        "aborted",
        "asked_for_end",
        "assembler",
        "first_at",
        "key",
        "mode",
        "opened_at",
        "reply",
        "seen_at",
        "submitted",
        "worker",
    )

    def __init__(self, key: RecordKey, mode: str, reply: Reply, now: float) -> None:
        self.key = key
        self.mode = mode
        self.reply = reply
        self.assembler = Assembler()
        self.worker = ""
        """Who sent the last entry: the one to ask for what is missing."""
        self.opened_at = self.seen_at = now
        self.first_at = 0.0
        self.submitted = False
        """Record and job are out."""
        self.aborted = False
        self.asked_for_end = 0

    @property
    def ended(self) -> bool:
        return self.assembler.ended


class InFlight:
    def __init__(
        self,
        *,
        owner: str,
        ledger: HandoffLedger,
        bus: TokenBus,
        metrics: Metrics,
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.reply_to = names.reply_subject(owner)
        self._ledger = ledger
        self._bus = bus
        self._metrics = metrics
        self._silence_s = silence_s
        self._clock = clock
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subscription: Subscription | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen first: an entry must never come before there is someone to hear it."""
        self._subscription = await self._bus.receive(self.reply_to, self.on_frame, self.answer)
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        """Cancel what is still in flight, finish what was promised (cancellations), stop listening."""
        self.abort()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        if self._subscription is not None:
            await self._subscription.close()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, key: RecordKey, mode: str, reply: Reply, opened_at: float) -> Stream:
        stream = self._streams[key.request_id] = Stream(key, mode, reply, opened_at)
        self._metrics.in_flight += 1
        return stream

    # --- From the bus -------------------------------------------------------------------------------------------------

    def on_frame(self, frame: TokenFrame) -> None:
        self._metrics.frames += 1
        now, streams = self._clock(), self._streams
        for entry in frame.entries:
            stream = streams.get(entry.request_id)
            if stream is None:
                self._metrics.strays += 1
                continue
            stream.worker = frame.worker
            self._take(stream, entry, now)

    def answer(self, request_id: str) -> OutputAnswer:
        """To a worker that resumes the request: the tokens that its client has."""
        stream = self._streams.get(request_id)
        if stream is None:
            return OutputAnswer(request_id, wanted=False)
        return OutputAnswer(request_id, wanted=True, tokens=tuple(stream.assembler.tokens))

    def _take(self, stream: Stream, entry: TokenEntry, now: float) -> None:
        assembler = stream.assembler
        delivered = assembler.accept(entry)
        if delivered:  # a gap that no answer fills is a silence, too
            stream.seen_at = now
            if not stream.first_at and delivered[0].tokens:
                stream.first_at = now
            try:
                stream.reply.deliver(delivered)
            except Exception:  # one client's connection must not take the other streams of the frame with it
                log.exception("request %s cannot be answered", stream.key.request_id)
                self.cancel(stream, "the answer could not be written")
                return
        if assembler.ended:
            self._forget(stream, delivered[-1].end, now)
        elif not delivered and assembler.gap:
            self._ask_again(stream, now)

    def _ask_again(self, stream: Stream, now: float) -> None:
        seq = stream.assembler.ask_again(now)
        if seq is None:
            return
        self._metrics.gaps += 1
        self._resend(stream, seq)

    def _resend(self, stream: Stream, seq: int) -> None:
        self._metrics.resends += 1
        message = Resend(stream.key.request_id, seq, self.reply_to)
        self._keep(self._tell(names.worker_subject(stream.worker), message))

    async def _tell(self, subject: str, message: Resend) -> None:
        """The sweep asks again, so one that is lost is not an error."""
        with contextlib.suppress(errors.Unavailable):
            await self._bus.control(subject, message)

    def _forget(self, stream: Stream, end: End | None, now: float) -> None:
        if self._streams.pop(stream.key.request_id, None) is None:
            return
        self._metrics.in_flight -= 1
        self._metrics.ended(
            stream.key.model,
            stream.mode,
            end.state if end else "cancelled",
            prompt_tokens=end.usage.prompt_tokens if end and end.usage else 0,
            output_tokens=stream.assembler.next_seq,
            to_first_s=stream.first_at - stream.opened_at if stream.first_at else None,
            to_last_s=now - stream.first_at,
        )

    # --- Ends that come from here -------------------------------------------------------------------------------------

    def cancel(self, stream: Stream, why: str) -> None:
        """The client does not want it any more. What follows from that goes on without the caller."""
        if self._streams.get(stream.key.request_id) is stream:
            self._forget(stream, None, self._clock())
            self._keep(self._end_record(stream.key, Event.CANCEL, errors.RequestCancelled(why)))

    def fail(self, stream: Stream, error: errors.PdqError) -> None:
        """The request may have been recorded, but its job could not be published."""
        self._forget(stream, End(state="failed"), self._clock())
        self._keep(self._end_record(stream.key, Event.FAIL, error))

    def submitted(self, stream: Stream) -> None:
        """Record and job are out. A stream that was aborted meanwhile had no record to end then: it has one now."""
        stream.submitted = True
        stream.seen_at = self._clock()
        if stream.aborted:
            self._keep(self._end_record(stream.key, Event.CANCEL, errors.RequestCancelled(GOING)))

    def abort(self) -> None:
        """The bridge goes: end every stream now, with an error that the client sees."""
        for stream in list(self._streams.values()):
            stream.aborted = True
            end = End(state="cancelled", error=Failure(errors.Unavailable.code, GOING, retryable=True))
            self._take(stream, self._entry(stream, end), self._clock())
            if stream.submitted:
                self._keep(self._end_record(stream.key, Event.CANCEL, errors.RequestCancelled(GOING)))

    async def _end_record(self, key: RecordKey, event: Event, error: errors.PdqError) -> None:
        """Write the end, then tell the workers. If the ledger stays away, the deadline ends the record."""
        changes = Changes(ended_code=error.code, ended_message=str(error))
        for attempt in range(CANCEL_TRIES):
            try:
                await self._ledger.apply(key, event, worker=BRIDGE, changes=changes)
                break
            except errors.LedgerRefusal:  # it has ended already, or was never written
                return
            except errors.Unavailable as unavailable:
                log.warning("request %s cannot be ended now: %s", key.request_id, unavailable)
                await asyncio.sleep(0.1 * 2**attempt)
        try:
            await self._bus.control(names.CANCEL_SUBJECT, Cancel((key.request_id,)))
        except errors.Unavailable as unavailable:  # workers notice at their next lease renewal
            log.warning("workers cannot be told that request %s has ended: %s", key.request_id, unavailable)

    # --- Silence ------------------------------------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        trouble = Trouble(log, "comparing silent streams with their records")
        while True:
            await asyncio.sleep(min(SWEEP_S, self._silence_s / 2))
            try:
                await self.sweep()
                trouble.works()
            except errors.Unavailable as error:
                trouble.fails(error)
            except Exception:  # without its sweep the bridge would keep none of its promises
                log.exception("a sweep failed")

    async def sweep(self) -> None:
        """Ask again for gaps; compare streams that have been silent for too long with their records."""
        now = self._clock()
        silent = []
        for stream in self._streams.values():
            if stream.assembler.gap:
                self._ask_again(stream, now)
            if stream.submitted and now - stream.seen_at >= self._silence_s:
                silent.append(stream)
        if not silent:
            return
        records = await self._ledger.read_many([stream.key for stream in silent])
        for stream, record in zip(silent, records, strict=True):
            if not stream.ended and stream.key.request_id in self._streams:
                await self._compare(stream, record)

    async def _compare(self, stream: Stream, record: Record | None) -> None:
        stream.seen_at = self._clock()
        if record is not None and not record.state.terminal:
            return
        if record is not None and record.state is State.DONE and stream.asked_for_end < _tries(stream, record):
            # It went well, and only its last frames are lost or late: the worker that ended it still has them.
            stream.asked_for_end += 1
            stream.worker = await ended_by(self._ledger, stream.key) or stream.worker
            if stream.worker and not stream.ended:
                self._resend(stream, stream.assembler.next_seq)
            return
        self._metrics.silences += 1
        self._take(stream, self._entry(stream, _end_of(record, stream.assembler.next_seq)), self._clock())

    def _entry(self, stream: Stream, end: End) -> TokenEntry:
        return TokenEntry(stream.key.request_id, stream.assembler.next_seq, end=end)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tries(stream: Stream, record: Record) -> int:
    """For the mere end once: the record says as much."""
    return END_TRIES if stream.assembler.next_seq < record.emitted else 1


def _end_of(record: Record | None, delivered: int) -> End:
    """The end as its record tells it, for a stream that got ``delivered`` tokens."""
    if record is not None:
        return recorded_end(record, delivered)
    lost = Failure(errors.StreamLost.code, "the request's record is gone, and no token came for a long time")
    return End(state="failed", error=lost)
