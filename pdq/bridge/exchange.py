"""One HTTP request and the channel back: its headers, its body within bounds, and the client that may go away."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from pdq.bridge import refusal, sse
from pdq.bridge.caller import Key
from pdq.bridge.reply import Channel, Send
from pdq.core.ids import mint_request_id
from pdq.core.names import HEADER_CLIENT_REQUEST_ID, HEADER_REQUEST_ID

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

CLIENT_ID_LENGTH: Final = 256
DISCARD_BYTES: Final = 64 * 1024 * 1024
DISCARD_S: Final = 10.0
BODY_S: Final = 60.0
"""How long a client may take to send a body."""

_REQUEST_ID: Final = HEADER_REQUEST_ID.encode()
_CLIENT_REQUEST_ID: Final = HEADER_CLIENT_REQUEST_ID.encode()


class ClientGone(Exception):
    """Nobody is left to answer."""


class Exchange:
    """One HTTP request and the channel back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = mint_request_id(time.time_ns() // 1_000_000)
        self.receive = receive
        answer_headers = [(_REQUEST_ID, self.request_id.encode())]
        self.key: Key | None = None
        """The API key that was shown."""
        self.client_id = ""
        if theirs := self.headers.get(_REQUEST_ID):
            self.client_id = "".join(c for c in theirs.decode("latin-1") if c.isprintable())[:CLIENT_ID_LENGTH]
            answer_headers.append((_CLIENT_REQUEST_ID, self.client_id.encode("latin-1")))
        self.channel = Channel(send, answer_headers)

    async def body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            BodyTooLarge: over ``limit``, as announced or as read.
            TooSlow: it took too long.
            ClientGone: before it was complete.
        """
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            if b"expect" not in self.headers:
                await self._discard()
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_S):
                return await self._whole_body(limit)
        except TimeoutError:
            raise refusal.TooSlow(f"the request's body did not come within {BODY_S:.0f} s") from None

    async def _whole_body(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            part, more = await self._read()
            size += len(part)
            if size > limit:
                if more:
                    await self._discard()
                raise _too_large(limit)
            parts.append(part)
            if not more:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read(self) -> tuple[bytes, bool]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), bool(message.get("more_body"))

    async def _discard(self) -> None:
        """Read the rest of a body that is refused, within reason: most clients look for the answer only after they have
        sent all, and closing a connection with unread bytes destroys the answer."""
        left, more = DISCARD_BYTES, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while more and left > 0:
                    part, more = await self._read()
                    left -= len(part)

    async def over(self) -> None:
        """Until the answer is complete, or the client has gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def json(self, status: int, content: Any) -> None:
        self.channel.answer(refusal.Reply(status, sse.json_bytes(content), [refusal.JSON]))


def _too_large(limit: int) -> refusal.BodyTooLarge:
    return refusal.BodyTooLarge(f"the body is longer than the {limit} bytes that this server takes at most")
