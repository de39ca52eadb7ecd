"""One request's way back to its client: token entries in, HTTP out, without a task that waits in between.

A frame serves many streams at once. Waking a task per stream and frame would cost more than writing the bytes, so
entries are rendered right where the frame arrives, and written once in the same turn of the loop, together with those of
other frames that came in that turn: a write is a system call, which costs more than all the rest.

ASGI's ``send`` is a coroutine only because a slow client may make it wait; as long as it does not, it is run to its end on
the spot. Once it would wait, messages queue up behind a task of their own, and no other stream notices.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from typing import Any, Final, Protocol

from pdq.bridge import refusal
from pdq.bridge.sse import Chunks, Whole, error_event
from pdq.core.messages import TokenEntry

Message = MutableMapping[str, Any]
Send = Callable[[Message], Coroutine[Any, Any, None]]

EVENT_STREAM: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Channel:
    """The HTTP response of one request. ``headers`` go with every answer."""

    __slots__ = ("_backlog", "_busy", "_headers", "_loop", "_send", "started")

    def __init__(self, send: Send, headers: refusal.Headers) -> None:
        self._send = send
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[Message] = deque()
        self._busy = False
        """Somebody will send what is in the backlog: this turn of the loop, or a task that waits for the client."""
        self.started = False

    def start(self, status: int, headers: refusal.Headers) -> None:
        self.started = True
        self._put({"type": "http.response.start", "status": status, "headers": [*self._headers, *headers]})

    def write(self, body: bytes, *, more: bool) -> None:
        self._put({"type": "http.response.body", "body": body, "more_body": more})

    def answer(self, reply: refusal.Reply) -> None:
        """A complete answer at once."""
        self.start(reply.status, [*reply.headers, (b"content-length", b"%d" % len(reply.body))])
        self.write(reply.body, more=False)

    def _put(self, message: Message) -> None:
        self._backlog.append(message)
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        while self._backlog:
            message = self._next()
            if not _done_without_waiting(self._send(message)):
                self._backlog.appendleft(message)
                _keep(self._loop.create_task(self._send_backlog()))
                return
        self._busy = False

    async def _send_backlog(self) -> None:
        while self._backlog:
            await self._send(self._next())
        self._busy = False

    def _next(self) -> Message:
        """The first message that waits; bodies as one."""
        message = self._backlog.popleft()
        if message["type"] == "http.response.body" and self._backlog:
            bodies = [message, *self._backlog]
            self._backlog.clear()
            body = b"".join([part["body"] for part in bodies])
            message = {**message, "body": body, "more_body": bodies[-1]["more_body"]}
        return message


_waiting: Final[set[asyncio.Task[None]]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    """The loop itself holds tasks only weakly."""
    _waiting.add(task)
    task.add_done_callback(_waiting.discard)


def _done_without_waiting(sending: Coroutine[Any, Any, None]) -> bool:
    """Run ``sending`` if it can finish at once; otherwise undo it: a server waits before it writes, never after."""
    try:
        sending.send(None)
    except StopIteration:
        return True
    sending.close()
    return False


class Reply(Protocol):
    """What one request's entries become."""

    def deliver(self, entries: Sequence[TokenEntry]) -> None:
        """Entries in order, each once; the last of all has the end."""


class StreamReply:
    """Server-sent events. The response begins with the first entry, so that a failure before it still has a status."""

    __slots__ = ("_channel", "_chunks")

    def __init__(self, channel: Channel, chunks: Chunks) -> None:
        self._channel = channel
        self._chunks = chunks

    def deliver(self, entries: Sequence[TokenEntry]) -> None:
        channel, chunks = self._channel, self._chunks
        end = entries[-1].end
        if end is None and channel.started and len(entries) == 1:  # nearly always
            if body := chunks.text(entries[0]):
                channel.write(body, more=True)
            return
        failed = end is not None and end.state != "done"
        parts = [chunks.text(entry) for entry in entries]
        if not channel.started:
            if failed and not any(parts):
                assert end is not None
                channel.answer(refusal.failure(end))
                return
            channel.start(200, EVENT_STREAM)
            parts.insert(0, chunks.opening())
        if end is not None:
            parts.append(error_event(refusal.failure(end).body) if failed else chunks.end(end))
        if body := b"".join(parts):
            channel.write(body, more=end is None)


class WholeReply:
    """One JSON document, when all is there."""

    __slots__ = ("_channel", "_whole")

    def __init__(self, channel: Channel, whole: Whole) -> None:
        self._channel = channel
        self._whole = whole

    def deliver(self, entries: Sequence[TokenEntry]) -> None:
        for entry in entries:
            self._whole.add(entry)
        end = entries[-1].end
        if end is None:
            return
        if end.state == "done":
            self._channel.answer(refusal.Reply(200, self._whole.end(end), [refusal.JSON]))
        else:
            self._channel.answer(refusal.failure(end))
