"""The job queues: three work-queue streams, one durable pull consumer per (queue, model, priority), a dead-letter stream.

Work-queue retention keeps a job until it is acknowledged, however many workers fail on it; ``discard: new`` refuses
what is over the limit instead of dropping what was accepted. Consumers are per priority because a stream is first in,
first out: only a consumer of its own lets an interactive job overtake 500 batch jobs.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from pdq import failpoints
from pdq.adapters.nats.connection import HEADER_ROOM, Connection, NatsSubscription, status
from pdq.adapters.nats.jetstream import (
    CONSUMER_NOT_FOUND,
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    SUBJECTS,
    Answer,
    ApiRefused,
    ask,
    ensure_stream,
    refusal_of_publish,
    stream_configs,
)
from pdq.adapters.nats.mailbox import NAK, Mailbox
from pdq.core import names
from pdq.core.errors import InvalidMessage, Unavailable
from pdq.core.messages import Priority
from pdq.core.settings import QueueSettings
from pdq.ports import Delivery, Queue, StoredJob

PUBLISH_S: Final = 5.0
MAX_ACK_PENDING: Final = 100_000
"""Every job that is being decoded anywhere is unacknowledged."""
MAX_WAITING: Final = 8_192
DETAIL_BYTES: Final = 512

_ACK: Final = b"+ACK"
_IN_PROGRESS: Final = b"+WPI"
_TERM: Final = b"+TERM"


class _Acknowledgement(Answer):
    seq: int = 0


_acknowledgements: Final = msgspec.json.Decoder(_Acknowledgement)


class NatsDelivery:
    """See ``pdq.ports.Delivery``. Its facts are in the reply subject that the broker gave the message."""

    __slots__ = ("_message", "_model", "_owner", "_queue", "deliveries", "published_ms", "sequence")

    def __init__(self, owner: "NatsQueue", queue: Queue, model: str, message: Msg) -> None:
        self._owner = owner
        self._queue = queue
        self._model = model
        self._message = message
        # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<time ns>.<pending>;
        # newer brokers put <domain>.<account> before the stream, and a random token at the end.
        parts = message.reply.split(".")
        at = 4 if len(parts) == 9 else 6
        self.deliveries = int(parts[at])
        self.sequence = int(parts[at + 1])
        self.published_ms = int(parts[at + 3]) // 1_000_000

    @property
    def data(self) -> bytes:
        return self._message.data

    async def ack(self) -> None:
        await self._owner.connection.publish(self._message.reply, _ACK)

    async def retry(self, delay_s: float) -> None:
        delay = b' {"delay":%d}' % int(delay_s * 1e9) if delay_s > 0 else b""
        await self._owner.connection.publish(self._message.reply, NAK + delay)

    async def in_progress(self) -> None:
        await self._owner.connection.publish(self._message.reply, _IN_PROGRESS)

    async def reject(self, code: str, detail: str) -> None:
        subject = self._message.subject
        await self._owner.dead_letter(self._queue, self._model, self.sequence, subject, self.data, code, detail)
        await self._owner.connection.publish(self._message.reply, _TERM)


class NatsQueue:
    """See ``pdq.ports.JobQueue``. Call ``ensure_streams`` once before use."""

    def __init__(self, connection: Connection, settings: QueueSettings) -> None:
        self.connection = connection
        self._settings = settings
        self._mailboxes: dict[tuple[Queue, str], Mailbox] = {}

    async def ensure_streams(self) -> None:
        """Create the streams, or bring existing ones to the settings. Idempotent.

        Raises:
            InvalidSettings: an existing stream cannot be changed to what the settings say.
            Unavailable: JetStream does not answer.
        """
        for config in stream_configs(self._settings):
            await ensure_stream(self.connection, config)

    async def publish(
        self,
        queue: Queue,
        model: str,
        data: bytes,
        *,
        message_id: str | None = None,
        priority: Priority = "interactive",
        ttl_s: float | None = None,
    ) -> int:
        headers: dict[str, str] = {}
        if message_id is not None:
            headers[names.HEADER_MSG_ID] = message_id
        if ttl_s is not None:
            headers[names.HEADER_TTL] = str(max(1, math.ceil(ttl_s)))
        room = self.connection.max_payload - HEADER_ROOM  # so that it can be dead-lettered, too
        if len(data) > room:
            raise InvalidMessage(f"a job of {len(data)} bytes is over the broker's limit of {room}")
        if failpoints.armed:
            await failpoints.hit("queue.publish")
        sequence = await self._store(queue.stream, _subject(queue, model, priority), data, headers)
        if failpoints.armed:
            await failpoints.hit("queue.published")
        return sequence

    async def pull(
        self,
        queue: Queue,
        model: str,
        *,
        limit: int,
        wait_s: float,
        order: Sequence[Priority] = names.PRIORITIES,
    ) -> Sequence[Delivery]:
        if limit < 1:
            return []
        if failpoints.armed:
            await failpoints.hit("queue.pull")
        mailbox = self._mailboxes.get((queue, model))
        if mailbox is None:
            mailbox = self._mailboxes[queue, model] = self._mailbox(queue, model)
        return [NatsDelivery(self, queue, model, message) for message in await mailbox.pull(limit, wait_s, order)]

    async def depth(self, queue: Queue, model: str) -> tuple[int, int]:
        waiting = unacknowledged = 0
        for priority in names.PRIORITIES:
            try:
                verb = f"CONSUMER.INFO.{queue.stream}.{names.consumer(model, priority)}"
                info: dict[str, Any] = await ask(self.connection, verb)
                waiting += info["num_pending"]
                unacknowledged += info["num_ack_pending"]
            except ApiRefused as error:
                if error.fault.err_code != CONSUMER_NOT_FOUND:
                    raise Unavailable(f"cannot read the depth of {queue}: {error}") from error
                waiting += await self._stored(queue.stream, _subject(queue, model, priority))
        return waiting, unacknowledged

    async def stored(self, queue: Queue, model: str, limit: int) -> Sequence[StoredJob] | None:
        found: list[StoredJob] = []
        for priority in names.PRIORITIES:
            subject, at = _subject(queue, model, priority), 1
            if len(found) + await self._stored(queue.stream, subject) > limit:
                return None
            while (job := await self._next(queue.stream, subject, at)) is not None:
                found.append(job)
                at = job.sequence + 1
        return found

    async def find(self, queue: Queue, sequence: int) -> StoredJob | None:
        found = await self._get(queue.stream, {"seq": sequence})
        return None if found is None else found.job()

    async def created_ms(self, queue: Queue) -> int:
        try:
            info: dict[str, Any] = await ask(self.connection, f"STREAM.INFO.{queue.stream}")
        except ApiRefused as error:
            raise Unavailable(f"cannot say since when there is {queue.stream}: {error}") from error
        return _unix_ms(info["created"])

    async def dead(self, model: str) -> int:
        return await self._stored(names.DEAD_STREAM, names.dead_subject("*", model))

    async def watch_exhausted(self, on_exhausted: Callable[[Queue, bytes], Awaitable[None]]) -> NatsSubscription:
        """The broker announces a job that it will not deliver again only once, to whoever listens: one of the watchers."""
        queues = {queue.stream: queue for queue in Queue}

        async def announced(message: Msg) -> None:
            notice = msgspec.json.decode(message.data, type=_Exhausted)
            queue = queues[notice.stream]
            if job := await self._bury(queue, notice):
                await on_exhausted(queue, job)

        subject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
        watches = [
            await self.connection.subscribe_each(f"{subject}.{stream}.*", announced, group="pdq-exhausted")
            for stream in queues
        ]

        async def close() -> None:
            for watch in watches:
                await watch.close()

        return NatsSubscription(close)

    async def dead_letter(
        self, queue: Queue, model: str, sequence: int, subject: str, data: bytes, code: str, detail: str
    ) -> None:
        """Keep a job that will not be done, with the reason; a second call for the same job changes nothing."""
        headers = {
            names.HEADER_MSG_ID: f"{queue}:{sequence}",
            names.HEADER_DEAD_REASON: code,
            names.HEADER_DEAD_DETAIL: detail.encode()[:DETAIL_BYTES].decode(errors="ignore"),
            names.HEADER_DEAD_SUBJECT: subject,
        }
        room = self.connection.max_payload - HEADER_ROOM
        await self._store(names.DEAD_STREAM, names.dead_subject(queue, model), data[:room], headers)

    # --- Inside ---

    async def _store(self, stream: str, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Its sequence; of one that was there already, that one's."""
        reply = await self.connection.request(subject, data, timeout_s=PUBLISH_S, headers=headers or None)
        if status(reply) == 503:  # no stream takes it: the broker came back without its data
            await self.ensure_streams()
            reply = await self.connection.request(subject, data, timeout_s=PUBLISH_S, headers=headers or None)
        if status(reply) == 503:
            raise Unavailable(f"no stream of NATS at {self.connection.where} takes {subject}")
        try:
            stored = _acknowledgements.decode(reply.data)
        except msgspec.DecodeError as error:
            raise Unavailable(f"something other than JetStream answered on {subject}") from error
        if stored.error is not None:
            raise refusal_of_publish(stored.error, stream)
        return stored.seq

    def _mailbox(self, queue: Queue, model: str) -> Mailbox:
        async def create() -> None:
            for priority in names.PRIORITIES:
                await self._create_consumer(queue, model, priority)

        consumers: dict[Priority, str] = {each: names.consumer(model, each) for each in names.PRIORITIES}
        return Mailbox(self.connection, queue.stream, consumers, create)

    async def _create_consumer(self, queue: Queue, model: str, priority: str) -> None:
        stream, name, subject = queue.stream, names.consumer(model, priority), _subject(queue, model, priority)
        config = {
            "name": name,
            "durable_name": name,
            "filter_subject": subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self._settings.ack_wait_s * 1e9),
            "max_deliver": self._settings.max_deliver,
            "max_ack_pending": MAX_ACK_PENDING,
            "max_waiting": MAX_WAITING,
        }
        request = {"stream_name": stream, "config": config}
        verb = f"CONSUMER.CREATE.{stream}.{name}.{subject}"
        try:
            try:
                await ask(self.connection, verb, request)
            except ApiRefused as error:
                if error.fault.err_code != STREAM_NOT_FOUND:
                    raise
                await self.ensure_streams()
                await ask(self.connection, verb, request)
        except ApiRefused as error:
            raise Unavailable(f"cannot set up consumer {name} of {stream}: {error.fault.description}") from error

    async def _stored(self, stream: str, subject: str) -> int:
        try:
            info: dict[str, Any] = await ask(self.connection, f"STREAM.INFO.{stream}", {"subjects_filter": subject})
        except ApiRefused as error:
            raise Unavailable(f"cannot count what is in {stream}: {error}") from error
        subjects: dict[str, int] = info["state"].get("subjects") or {}
        return sum(subjects.values())

    async def _next(self, stream: str, subject: str, at: int) -> StoredJob | None:
        """The first message of ``subject`` from sequence ``at`` on."""
        found = await self._get(stream, {"seq": at, "next_by_subj": subject})
        return None if found is None else found.job()

    async def _get(self, stream: str, which: dict[str, Any]) -> "_Stored | None":
        try:
            return (await ask(self.connection, f"STREAM.MSG.GET.{stream}", which, _Found)).message
        except ApiRefused as error:
            if error.fault.err_code == MESSAGE_NOT_FOUND:
                return None
            raise Unavailable(f"cannot read what is in {stream}: {error}") from error

    async def _bury(self, queue: Queue, notice: "_Exhausted") -> bytes | None:
        """Move an exhausted job to the dead letters; its bytes, or None if it is gone already."""
        stream, sequence = queue.stream, notice.stream_seq
        job = await self._get(stream, {"seq": sequence})
        if job is None:
            return None
        detail = f"delivered {notice.deliveries} times without an acknowledgement"
        await self.dead_letter(
            queue, names.model_of(job.subject), sequence, job.subject, job.data, "max_deliveries", detail
        )
        try:
            await ask(self.connection, f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
        except ApiRefused as error:
            if error.fault.err_code == MESSAGE_NOT_FOUND:
                return None
            raise Unavailable(f"cannot bury message {sequence} of {stream}: {error}") from error
        return job.data


class _Exhausted(Struct):
    """The broker's advisory."""

    stream: str
    stream_seq: int
    deliveries: int


class _Stored(Struct):
    subject: str
    seq: int
    time: str
    data: bytes = b""  # base64 on the wire

    def job(self) -> StoredJob:
        return StoredJob(self.seq, _unix_ms(self.time), self.data)


class _Found(Struct):
    message: _Stored


def _unix_ms(time: str) -> int:
    """Whole milliseconds of a broker's timestamp, cut off as in a delivery's reply subject."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * 1000 + int(fraction[:3].ljust(3, "0"))


@lru_cache(maxsize=1024)
def _subject(queue: Queue, model: str, priority: str) -> str:
    return SUBJECTS[queue](model, priority)
