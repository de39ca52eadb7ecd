"""Tokens and control in one process: a verified fake of the bus (``tests/conformance/test_bus.py``).

Messages are encoded and decoded as on the wire, so that what works here parses there, and are handed over in a later
turn of the loop, as a network would.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from msgspec import Struct

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

Handler = Callable[[bytes], None]
Answerer = Callable[[bytes], Awaitable[Struct]]
T = TypeVar("T")
_CONTROL: Final[Any] = Control


class MemoryBus:
    """See ``pdq.ports.TokenBus``."""

    def __init__(self, max_payload: int = MAX_MESSAGE_BYTES) -> None:
        self.junk = 0
        self._max_payload = max_payload
        self._handlers: dict[str, list[Handler]] = {}
        self._answerers: dict[str, list[Answerer]] = {}

    async def send(self, reply_to: str, frame: TokenFrame) -> None:
        data = encode(frame)
        if len(data) <= self._max_payload:
            self.publish(reply_to, data)
            return
        parts = halves(frame)
        if parts is None:
            raise InvalidMessage(f"a frame of {len(data)} bytes cannot be split below the limit of {self._max_payload}")
        for part in parts:
            await self.send(reply_to, part)

    async def receive(
        self,
        subject: str,
        on_frame: Callable[[TokenFrame], None],
        answer: Callable[[str], OutputAnswer] | None = None,
    ) -> "MemorySubscription":
        def handle(data: bytes) -> None:
            on_frame(decode(data, TokenFrame))

        subscription = self._subscribe(subject, handle)
        if answer is not None:

            async def reply(data: bytes) -> OutputAnswer:
                return answer(decode(data, OutputQuestion).request_id)

            subscription.also(self._answer(subject, reply))
        return subscription

    async def ask_output(self, reply_to: str, request_id: str, timeout_s: float) -> OutputAnswer | None:
        return await self._ask(reply_to, OutputQuestion(request_id), OutputAnswer, timeout_s)

    async def ask_account(self, worker: str, timeout_s: float) -> AccountAnswer | None:
        return await self._ask(names.account_subject(worker), AccountQuestion(), AccountAnswer, timeout_s)

    async def answer_account(self, worker: str, answer: Callable[[], AccountAnswer]) -> "MemorySubscription":
        async def reply(data: bytes) -> AccountAnswer:
            decode(data, AccountQuestion)
            return answer()

        return MemorySubscription(self._answer(names.account_subject(worker), reply))

    async def ask_status(self, question: StatusQuestion, timeout_s: float) -> StatusAnswer | None:
        return await self._ask(names.STATUS_SUBJECT, question, StatusAnswer, timeout_s)

    async def answer_status(self, answer: Callable[[StatusQuestion], Awaitable[StatusAnswer]]) -> "MemorySubscription":
        async def reply(data: bytes) -> StatusAnswer:
            return await answer(decode(data, StatusQuestion))

        return MemorySubscription(self._answer(names.STATUS_SUBJECT, reply))

    async def control(self, subject: str, message: Control) -> None:
        self.publish(subject, encode(message))

    async def on_control(self, subject: str, handler: Callable[[Control], None]) -> "MemorySubscription":
        def handle(data: bytes) -> None:
            command: Control = decode(data, _CONTROL)
            handler(command)

        return self._subscribe(subject, handle)

    def publish(self, subject: str, data: bytes) -> None:
        """Any bytes to whoever listens there."""
        for handler in self._handlers.get(subject, ()):
            asyncio.get_running_loop().call_soon(self._hand_over, subject, handler, data)

    def _answer(self, subject: str, answer: Answerer) -> Callable[[], None]:
        """Answer questions on ``subject``; returns how to stop that."""
        self._answerers.setdefault(subject, []).append(answer)
        return lambda: self._answerers[subject].remove(answer)

    async def _ask(self, subject: str, question: Struct, kind: type[T], timeout_s: float) -> T | None:
        await asyncio.sleep(0)
        with contextlib.suppress(Unavailable):
            for answer in self._answerers.get(subject, ()):
                return decode(encode(await answer(encode(question))), kind)
        await asyncio.sleep(timeout_s)
        return None

    def _hand_over(self, subject: str, handler: Handler, data: bytes) -> None:
        if handler not in self._handlers.get(subject, ()):
            return
        try:
            handler(data)
        except InvalidMessage:
            self.junk += 1

    def _subscribe(self, subject: str, handler: Handler) -> "MemorySubscription":
        self._handlers.setdefault(subject, []).append(handler)
        return MemorySubscription(lambda: self._handlers[subject].remove(handler))


class MemorySubscription:
    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = [undo]

    def also(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    async def close(self) -> None:
        while self._undo:
            self._undo.pop()()
