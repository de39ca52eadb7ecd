"""One connection to NATS: reconnects for ever, reports each change once, and answers requests cheaply.

nats-py's own ``request`` draws random bytes and makes a task-backed timeout per call. Everything that waits for one answer
here (publish acknowledgements, API calls, questions) shares one wildcard inbox instead; its last token is a counter.

While the broker is away, requests fail at once with ``Unavailable`` and those in flight fail when the connection is
lost. Plain publishes (acknowledgements of jobs, token frames) are buffered up to ``PENDING_BYTES`` and go out when the
broker is back. TCP_NODELAY is set by asyncio and by uvloop on every TCP transport.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import nats.errors
from nats.aio.msg import Msg

from pdq.adapters.nats import access
from pdq.adapters.nats.client import PatientClient, SentAway, next_server, worth_telling
from pdq.core.errors import InvalidMessage, Unavailable
from pdq.core.settings import NatsSettings

PENDING_BYTES: Final = 8 * 1024 * 1024
SLOW_CONSUMER_MESSAGES: Final = 1_000_000
SLOW_CONSUMER_BYTES: Final = 256 * 1024 * 1024
DRAIN_S: Final = 5.0
SETTLE_S: Final = 5.0
HEADER_ROOM: Final = 2048
"""The broker counts headers as payload, and closes the connection of a client that sends too much."""

PING_S: Final = 10
PINGS_UNANSWERED: Final = 2
"""A broker that hangs, or whose host is gone, is noticed after half a minute."""

_GONE: Final = (ConnectionError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError, SentAway)
"""What breaks a connection, and each attempt to make it anew: told once, with the loss."""

_log = logging.getLogger(__name__)


class NoAnswer(Unavailable):
    """The question went out; nothing came back in time."""


class Connection:
    """Made by ``connect``; closed by ``close``, which first lets everything buffered go out."""

    def __init__(self, name: str, where: str) -> None:
        self.name = name
        self.where = where
        self.slow_consumer_drops = 0
        """Messages that this process was too slow to take."""
        self._client = PatientClient()
        self._up = asyncio.Event()
        self._last_error = ""
        self._reported: set[str] = set()
        """Errors that were logged since the connection last stood: each once."""
        self._closing = False
        self._counter = itertools.count(1)
        self._inbox = ""
        self._replies: dict[str, asyncio.Future[Msg]] = {}
        self._on_lost: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, settings: NatsSettings) -> None:
        """Raises:
        Unavailable: no server took the connection within ``connect_timeout_s``.
        InvalidSettings: credentials or certificates cannot be understood.
        """
        options = access.options_of(settings)
        self._client.demands_tls = access.demands_tls(settings)
        self._client.credentials = settings.credentials
        logging.getLogger("asyncio").addFilter(worth_telling)
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await self._client.connect(
                    **options,
                    servers=[url.strip() for url in settings.url.split(",") if url.strip()],
                    name=self.name,
                    error_cb=self._error,
                    disconnected_cb=self._lost,
                    reconnected_cb=self._back,
                    closed_cb=self._closed,
                    connect_timeout=math.ceil(settings.connect_timeout_s),
                    reconnect_time_wait=1,
                    ping_interval=PING_S,
                    max_outstanding_pings=PINGS_UNANSWERED,
                    max_reconnect_attempts=-1,
                    reconnect_to_server_handler=next_server,
                    pending_size=PENDING_BYTES,
                    drain_timeout=math.ceil(DRAIN_S),
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            self._closing = True
            await self._client.close()
            # Of several tries, the refusal that says what to change; what comes after it may be its consequence only.
            telling = (text for text in self._reported if access.advice(text, settings))
            why = next(telling, self._last_error) or "no answer"
            limit_s = f"{settings.connect_timeout_s:g} s"
            raise Unavailable(
                f"NATS at {self.where} took no connection within {limit_s} ({why}){access.advice(why, settings)}"
            ) from error
        self._reported.clear()
        self._last_error = ""
        self._inbox = self._client.new_inbox() + "."
        await self._client.subscribe(
            self._inbox + "*",
            cb=self._answered,
            pending_msgs_limit=SLOW_CONSUMER_MESSAGES,
            pending_bytes_limit=SLOW_CONSUMER_BYTES,
        )
        self._up.set()

    async def close(self) -> None:
        self._closing = True
        self._fail_requests("the connection is being closed")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_S)
        with contextlib.suppress(TimeoutError, OSError, nats.errors.Error):  # the broker is away: nothing to drain to
            async with asyncio.timeout(DRAIN_S):
                await self._client.drain()
        with contextlib.suppress(OSError, nats.errors.Error):
            await self._client.close()

    # --- State ---

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    @property
    def closed(self) -> bool:
        """For good: by ``close``, or because the broker refused this client (it says why in the log)."""
        return self._client.is_closed

    @property
    def max_payload(self) -> int:
        """The broker's limit on one message, headers included."""
        return self._client.max_payload

    async def until_connected(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever the connection is lost: the broker has then forgotten every open question."""
        self._on_lost.append(callback)

    # --- Sending ---

    async def publish(
        self, subject: str, data: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Hand to the broker, or to the buffer while it is away; no confirmation.

        Raises:
            Unavailable: closed, or away for so long that the buffer is full.
            InvalidMessage: over the broker's size limit.
        """
        room = HEADER_ROOM if headers else 0
        if len(data) + room > self._client.max_payload:
            raise InvalidMessage(f"message of {len(data)} bytes is over the broker's limit of {self.max_payload}")
        try:
            await self._client.publish(subject, data, reply, headers)
        except nats.errors.BadSubjectError as error:
            raise InvalidMessage(f"not a subject: {subject!r}") from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot publish to NATS at {self.where}: {error}") from error

    def post(self, subject: str, data: bytes) -> None:
        """``publish`` from a callback, best effort."""
        self._spawn(self._post(subject, data))

    async def _post(self, subject: str, data: bytes) -> None:
        try:
            await self.publish(subject, data)
        except (Unavailable, InvalidMessage) as error:
            _log.debug("dropped a message to %s: %s", subject, error)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """One message out, one back. A broker's "no responders" comes back as a message with ``status(msg) == 503``.

        Raises:
            Unavailable: not connected, or the connection was lost meanwhile; as ``NoAnswer``, no answer in time.
            InvalidMessage: over the broker's size limit.
        """
        token = str(next(self._counter))
        return await self._exchange(token, subject, data, self._inbox + token, headers, timeout_s)

    async def settled(self) -> None:
        """Returns when the broker has taken everything sent so far: a subscription made before this receives what anyone
        sends after it. (nats-py's ``flush`` cannot promise that: its PING overtakes the buffer.)"""
        token = str(next(self._counter))
        await self._exchange(token, self._inbox + token, b"", "", None, SETTLE_S)

    async def _exchange(
        self, token: str, subject: str, data: bytes, reply: str, headers: dict[str, str] | None, timeout_s: float
    ) -> Msg:
        """Publish, and wait for what arrives at the inbox under ``token``."""
        if not self._up.is_set():
            raise Unavailable(f"not connected to NATS at {self.where}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Msg] = loop.create_future()
        self._replies[token] = future
        # A timer on the future, not a cancellation: nats-py swallows a cancellation that hits it while it flushes.
        timer = loop.call_later(timeout_s, _expire, future, subject, timeout_s)
        try:
            await self.publish(subject, data, reply, headers)
            return await future
        finally:
            timer.cancel()
            del self._replies[token]
            if future.done() and not future.cancelled():
                future.exception()  # seen, also when `publish` raised first

    # --- Receiving ---

    def new_inbox(self) -> str:
        """A subject that nobody else uses, for answers."""
        return self._client.new_inbox()

    async def subscribe(self, subject: str, handler: Callable[[Msg], None], *, group: str = "") -> "NatsSubscription":
        """``handler`` runs on the loop for each message in order; what it raises is logged and ends nothing."""

        async def handle(message: Msg) -> None:
            try:
                handler(message)
            except Exception:
                _log.exception("a handler failed on a message of %s", subject)

        return await self._subscribe(subject, handle, group)

    async def subscribe_each(
        self, subject: str, handler: Callable[[Msg], Awaitable[None]], *, group: str = ""
    ) -> "NatsSubscription":
        """The same with a coroutine, awaited before the next message."""

        async def handle(message: Msg) -> None:
            try:
                await handler(message)
            except Exception:
                _log.exception("a handler failed on a message of %s", subject)

        return await self._subscribe(subject, handle, group)

    async def _subscribe(
        self, subject: str, handle: Callable[[Msg], Coroutine[Any, Any, None]], group: str
    ) -> "NatsSubscription":
        try:
            subscription = await self._client.subscribe(
                subject,
                queue=group,
                cb=handle,
                pending_msgs_limit=SLOW_CONSUMER_MESSAGES,
                pending_bytes_limit=SLOW_CONSUMER_BYTES,
            )
        except nats.errors.BadSubjectError as error:
            raise InvalidMessage(f"not a subject: {subject!r}") from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot subscribe at NATS {self.where}: {error}") from error
        with contextlib.suppress(Unavailable):  # the broker is away: it will hear of the subscription first thing
            await self.settled()
        return NatsSubscription(subscription.unsubscribe)

    async def _answered(self, message: Msg) -> None:
        future = self._replies.get(message.subject[len(self._inbox) :])
        if future is not None and not future.done():
            future.set_result(message)

    # --- Changes ---

    async def _lost(self) -> None:
        if not self._up.is_set():
            return
        self._up.clear()
        if not self._closing and not self.closed:
            why = self._last_error or "it does not answer"
            _log.warning("%s: lost NATS at %s (%s); reconnecting", self.name, self.where, why)
        self._fail_requests("the connection was lost")
        for callback in self._on_lost:
            callback()

    async def _back(self) -> None:
        self._reported.clear()
        self._last_error = ""
        self._up.set()
        _log.info("%s: NATS at %s is back", self.name, self.where)

    async def _closed(self) -> None:
        await self._lost()
        if not self._closing:
            # What the server itself said at the end is in no callback.
            why = self._client.last_error or self._last_error
            _log.critical("%s: NATS closed the connection for good (%s)", self.name, why)

    async def _error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.slow_consumer_drops += 1
        text = f"{type(error).__name__}: {error}"
        gone = isinstance(error, _GONE)
        if gone or not self._up.is_set():
            self._last_error = text
        if text not in self._reported and not self._closing:
            self._reported.add(text)
            # While it is being opened, who opens it is told by an error that says all this.
            level = logging.INFO if not self._inbox else logging.DEBUG if gone else logging.WARNING
            _log.log(level, "%s: NATS at %s: %s", self.name, self.where, text)

    def _fail_requests(self, why: str) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(Unavailable(f"NATS at {self.where}: {why}"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class NatsSubscription:
    """A running subscription; ``close`` ends it (also when the connection has gone already)."""

    def __init__(self, unsubscribe: Callable[[], Awaitable[None]]) -> None:
        self._unsubscribe = unsubscribe

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):  # closed already, or with the connection
            await self._unsubscribe()


async def connect(settings: NatsSettings, name: str) -> Connection:
    """Open a connection that shows as ``name`` in the broker's monitoring.

    Raises:
        Unavailable: no server took the connection within ``connect_timeout_s``.
        InvalidSettings: URL, credentials or certificates cannot be understood.
    """
    connection = Connection(name, access.places(settings))
    await connection.open(settings)
    return connection


def status(message: Msg) -> int:
    """The broker's inline status (404 no messages, 408 expired, 409 refused, 503 nobody there); 0 for a message."""
    headers: Mapping[str, str] | None = message.headers
    if not headers or message.data or message.reply:
        return 0
    code = headers.get("Status", "")
    return int(code) if code.isdecimal() else 0


def description(message: Msg) -> str:
    headers: Mapping[str, str] | None = message.headers
    return headers.get("Description", "").strip() if headers else ""


def _expire(future: asyncio.Future[Msg], subject: str, timeout_s: float) -> None:
    if not future.done():
        future.set_exception(NoAnswer(f"no answer on {subject} within {timeout_s:g} s"))
