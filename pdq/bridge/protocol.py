"""uvicorn's HTTP protocol with bounds, in bytes and in time, on all that is not body: URL, headers, trailers. uvicorn
itself has none: it keeps whatever a client goes on to send, for as long as the client likes.

The parser hands a header over when it is complete. So what it has been fed without handing anything over is bounded too.
"""

import asyncio
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdq.bridge import refusal
from pdq.core.errors import InvalidRequest

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a URL, and the names and values of all headers and trailers, together."""


HEAD_S: Final = 30.0
"""From a connection's first moment, or a request's first byte, to the end of the headers."""


class BoundedProtocol(HttpToolsProtocol):
    _head = 0
    """Bytes of the current request that count."""
    _silent = 0
    """Bytes fed to the parser since it last handed something over."""
    _spoke = False
    _too_slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._too_slow is None:
            self._too_slow = self.loop.call_later(HEAD_S, self.transport.close)

    def _head_is_there(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def data_received(self, data: bytes) -> None:
        self._spoke = False
        super().data_received(data)
        self._silent = 0 if self._spoke else self._silent + len(data)
        if self._silent > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        self._head = 0
        self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._spoke = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if self._head > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        else:
            self._refuse(refusal.NotHttp(msg))

    def _count(self, size: int) -> None:
        self._spoke = True
        self._head += size
        if self._head > MAX_HEAD_BYTES:
            raise _too_large()  # ends the parsing; `send_400_response` follows

    def _refuse(self, error: InvalidRequest) -> None:
        """There is no request that could be answered, so the connection is, and ends."""
        reply = refusal.refusal(error)
        head = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\ncontent-length: {len(reply.body)}\r\n"
        fields = b"".join(b"%b: %b\r\n" % header for header in reply.headers)
        self.transport.write(head.encode() + fields + b"connection: close\r\n\r\n" + reply.body)
        self.transport.close()


def _too_large() -> refusal.HeadTooLarge:
    return refusal.HeadTooLarge(f"URL and headers are longer than the {MAX_HEAD_BYTES} bytes that are taken at most")
