"""Token frames and control messages over core NATS: at most once, no acknowledgements, one subject per receiver.

A frame is published without waiting. While the broker is away, frames wait in the connection's buffer; what does not
fit is dropped and counted, and the receiver asks for it again when it notices the gap.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from msgspec import Struct
from nats.aio.msg import Msg

from pdq import failpoints
from pdq.adapters.nats.connection import Connection, NatsSubscription, NoAnswer, status
from pdq.core import names
from pdq.core.errors import InvalidMessage, Unavailable
from pdq.core.messages import (
    MAX_MESSAGE_BYTES,
    AccountAnswer,
    AccountQuestion,
    Control,
    OutputAnswer,
    OutputQuestion,
    StatusAnswer,
    StatusQuestion,
    TokenFrame,
    decode,
    encode,
)
from pdq.core.stream import halves

ASK_AGAIN_S: Final = 0.05

_CONTROL: Final[Any] = Control
_STATUS_GROUP: Final = "pdq-status"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class NatsBus:
    """See ``pdq.ports.TokenBus``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.junk = 0
        """Messages that did not parse as what their subject carries."""
        self.dropped = 0
        """Frames that could not be sent: the broker was away and the buffer full."""

    @property
    def slow_consumer_drops(self) -> int:
        """Messages that arrived faster than this process took them."""
        return self._connection.slow_consumer_drops

    async def send(self, reply_to: str, frame: TokenFrame) -> None:
        if failpoints.armed and await failpoints.hit("bus.send"):
            return
        data = encode(frame)
        if len(data) > min(self._connection.max_payload, MAX_MESSAGE_BYTES):
            parts = halves(frame)
            if not parts:
                raise InvalidMessage(f"a frame of {len(data)} bytes cannot be split below the broker's limit")
            for part in parts:
                await self.send(reply_to, part)
            return
        try:
            await self._connection.publish(reply_to, data)
        except Unavailable:
            self.dropped += 1

    async def receive(
        self,
        subject: str,
        on_frame: Callable[[TokenFrame], None],
        answer: Callable[[str], OutputAnswer] | None = None,
    ) -> NatsSubscription:
        def handle(message: Msg) -> None:
            try:
                if not message.reply:
                    on_frame(decode(message.data, TokenFrame))
                else:
                    question = decode(message.data, OutputQuestion)
                    if answer is not None:
                        self._reply(message, answer(question.request_id))
            except InvalidMessage as error:
                self._count_junk(subject, error)

        return await self._connection.subscribe(subject, handle)

    async def ask_output(self, reply_to: str, request_id: str, timeout_s: float) -> OutputAnswer | None:
        if failpoints.armed and await failpoints.hit("bus.ask", request_id):
            return None
        return await self._ask(reply_to, OutputQuestion(request_id), OutputAnswer, timeout_s)

    async def ask_account(self, worker: str, timeout_s: float) -> AccountAnswer | None:
        return await self._ask(names.account_subject(worker), AccountQuestion(), AccountAnswer, timeout_s)

    async def answer_account(self, worker: str, answer: Callable[[], AccountAnswer]) -> NatsSubscription:
        subject = names.account_subject(worker)

        def handle(message: Msg) -> None:
            try:
                decode(message.data, AccountQuestion)
            except InvalidMessage as error:
                self._count_junk(subject, error)
            else:
                self._reply(message, answer())

        return await self._connection.subscribe(subject, handle)

    async def ask_status(self, question: StatusQuestion, timeout_s: float) -> StatusAnswer | None:
        return await self._ask(names.STATUS_SUBJECT, question, StatusAnswer, timeout_s)

    async def answer_status(self, answer: Callable[[StatusQuestion], Awaitable[StatusAnswer]]) -> NatsSubscription:
        async def handle(message: Msg) -> None:
            try:
                question = decode(message.data, StatusQuestion)
            except InvalidMessage as error:
                self._count_junk(names.STATUS_SUBJECT, error)
                return
            try:
                self._reply(message, await answer(question))
            except Unavailable as error:  # no answer: the producer asks again
                _log.info("cannot say what became of job %d: %s", question.sequence, error)

        return await self._connection.subscribe_each(names.STATUS_SUBJECT, handle, group=_STATUS_GROUP)

    async def control(self, subject: str, message: Control) -> None:
        if failpoints.armed and await failpoints.hit("bus.control"):
            return
        await self._connection.publish(subject, encode(message))

    async def on_control(self, subject: str, handler: Callable[[Control], None]) -> NatsSubscription:
        def handle(message: Msg) -> None:
            try:
                command: Control = decode(message.data, _CONTROL)
            except InvalidMessage as error:
                self._count_junk(subject, error)
            else:
                handler(command)

        return await self._connection.subscribe(subject, handle)

    async def _ask(self, subject: str, question: Struct, kind: type[T], timeout_s: float) -> T | None:
        """None only if the broker is there and nobody answered: a worker gives a request up on None.

        Who is asked may be just connecting again (after a restart of the broker) and not be there for a moment, so
        "nobody listens" is not believed before the time is up.

        Raises:
            Unavailable: the broker is away.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        data = encode(question)
        while (left_s := deadline - loop.time()) > 0:
            try:
                reply = await self._connection.request(subject, data, timeout_s=left_s)
            except NoAnswer:
                break
            if status(reply) != 503:
                try:
                    return decode(reply.data, kind)
                except InvalidMessage as error:
                    self._count_junk(subject, error)
                    return None
            await asyncio.sleep(min(ASK_AGAIN_S, left_s))
        await self._connection.settled()  # it is the other side that does not answer, not the broker
        return None

    def _reply(self, question: Msg, answer: Struct) -> None:
        """Whoever asks names the subject of the answer, and may have fewer rights than who answers."""
        if names.publishable(question.reply):
            self._connection.post(question.reply, encode(answer))
        else:
            self._count_junk(question.subject, InvalidMessage(f"{question.reply!r} is no subject for an answer"))

    def _count_junk(self, subject: str, error: InvalidMessage) -> None:
        self.junk += 1
        _log.debug("dropped a message on %s: %s", subject, error)
