"""The connection: one socket that all coroutines of a ledger share, scripts, and the translation of Redis' errors.

redis-py's client checks a connection out of a pool per command, which costs more than the command. ``Link`` lets it do
what is hard (URLs, TLS, authentication, Sentinel) and then pipelines: commands go out in the order of their calls,
all of one loop iteration in one write, and one task hands the replies back in that order.

A command whose reply was lost may or may not have been executed, so nothing is ever sent twice: the caller gets
``Unavailable``, and the next call connects anew. Leases make every such doubt end by itself.
"""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from importlib.resources import files
from typing import Any, Final, NoReturn

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pdq.adapters.tls import client_context
from pdq.core.errors import InvalidSettings, PdqError, Unavailable
from pdq.core.settings import RedisSettings

Argument = str | bytes | int
SCAN_PAGE: Final = 500

# Error replies (by their first word) that say "not now", not "wrong".
_PASSING: Final = frozenset(
    {
        "LOADING",
        "BUSY",
        "OOM",
        "MISCONF",
        "READONLY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "NOREPLICAS",
        "UNBLOCKED",
    }
)


def client_for(settings: RedisSettings) -> Redis:
    """A client for ``settings.url``; it connects when it is first used.

    Raises:
        InvalidSettings: URL, credentials or certificates cannot be understood.
    """
    client: Redis = Redis.from_url(
        settings.url,
        **options_of(settings),
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return client


def options_of(settings: RedisSettings) -> dict[str, Any]:
    """Credentials and certificates besides ``settings.url``, as redis-py's clients and pools take them.

    Raises:
        InvalidSettings: URL, credentials or certificates cannot be understood, or contradict each other.
    """
    try:
        url = parse_url(settings.url)
    except ValueError:  # what it says may quote a part of the password
        raise InvalidSettings(
            "PDQ_REDIS_URL is not a URL like redis://host:6379/0 or rediss://user:password@host:6379/0; write special "
            "characters of a password as %XX, or set PDQ_REDIS_PASSWORD instead"
        ) from None
    given = {"username": settings.username, "password": settings.password.reveal()}
    options: dict[str, Any] = {option: value for option, value in given.items() if value}
    for option in options.keys() & url.keys():
        raise InvalidSettings(f"PDQ_REDIS_URL and PDQ_REDIS_{option.upper()} both give a {option}: remove one of them")
    if settings.username and not {"password"} & (options.keys() | url.keys()):
        raise InvalidSettings("PDQ_REDIS_USERNAME is set and no password is: set PDQ_REDIS_PASSWORD")
    files = {"ssl_ca_certs": settings.tls_ca, "ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    if any(files.values()):
        if url.get("connection_class") is not SSLConnection:
            raise InvalidSettings("PDQ_REDIS_TLS_... is set, but PDQ_REDIS_URL does not begin with rediss://")
        client_context("REDIS", settings.tls_ca, settings.tls_cert, settings.tls_key)  # redis-py looks at them too late
        options |= {option: path for option, path in files.items() if path}
    return options


async def connect(settings: RedisSettings) -> Redis:
    """A client that has talked to its server once. Close it with ``aclose``.

    Raises:
        Unavailable: nobody answers, or the server refuses us.
    """
    client = client_for(settings)
    try:
        await client.ping()
    except (RedisError, OSError) as error:
        await client.aclose()
        raise translate(error, endpoint(client)) from error
    return client


def endpoint(client: Redis) -> str:
    """Where ``client`` connects to, without user and password."""
    options = client.connection_pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def translate(error: Exception, where: str) -> PdqError:
    """The error of our own tree for one of Redis'."""
    if isinstance(error, AuthenticationError):
        return Unavailable(f"Redis at {where} refuses us: {error}; see PDQ_REDIS_USERNAME and PDQ_REDIS_PASSWORD")
    if isinstance(error, NoPermissionError):
        return PdqError(f"Redis at {where} refused a command: {error}; its access rules lack what SECURITY.md lists")
    passing = isinstance(error, (ReadOnlyError, OutOfMemoryError)) or str(error).split(" ", 1)[0] in _PASSING
    if isinstance(error, ResponseError) and not passing:
        return PdqError(f"Redis at {where} refused a command: {error}")
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Unavailable(f"Redis at {where} has a certificate that is not trusted: {error}; see PDQ_REDIS_TLS_CA")
    return Unavailable(f"Redis at {where} is not available: {error or type(error).__name__}")


def literally(text: str) -> str:
    """``text`` as a pattern that nothing else is like."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


class Script:
    """A Lua script: the named ``.lua`` files, one after the other."""

    def __init__(self, *parts: str) -> None:
        self.text = "\n".join(parts)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def source(name: str) -> str:
    """The text of one ``.lua`` file of this package."""
    return (files(__package__) / f"{name}.lua").read_text()


class Link:
    """One shared, pipelined connection to ``client``'s server; opened by the first call, and again after a loss."""

    def __init__(self, client: Redis) -> None:
        self.where = endpoint(client)
        pool = client.connection_pool
        self._timeout_s = float(pool.connection_kwargs.get("socket_timeout") or 5.0)
        self._open_kwargs = {
            **pool.connection_kwargs,
            # One watch over the whole pipeline instead of one timer per read; replies as plain arrays of bytes.
            "socket_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": False,
        }
        self._connection_class = pool.connection_class
        self._connection: AbstractConnection | None = None
        self._opening = asyncio.Lock()
        self._unsent: list[bytes] = []
        self._wake = asyncio.Event()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._answered = 0
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._closing: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def call(self, *command: Argument) -> Any:
        """One command, one reply.

        Raises:
            Unavailable: no connection, no answer in time, or a server that says "not now".
        """
        try:
            return await self._submit(await self._connected(), command)
        except (RedisError, OSError) as error:
            self._refused(error)

    async def many(self, commands: Iterable[Sequence[Argument]]) -> list[Any]:
        """Several commands in one round trip."""
        try:
            connection = await self._connected()
            return await asyncio.gather(*[self._submit(connection, command) for command in commands])
        except (RedisError, OSError) as error:
            self._refused(error)

    async def run(
        self, script: Script, keys: Sequence[str], *args: Argument, after: Sequence[Argument] | None = None
    ) -> Any:
        """A script by its digest; by its text when the server does not know it (it has been restarted, or is new).

        ``after`` is a command that goes out just before it in the same round trip, and must succeed too.
        """
        try:
            connection = await self._connected()
            if after is not None:
                first = self._submit(connection, after)
            try:
                reply = self._submit(connection, ("EVALSHA", script.sha, len(keys), *keys, *args))
                return await reply if after is None else (await asyncio.gather(first, reply))[1]
            except NoScriptError:
                return await self._submit(connection, ("EVAL", script.text, len(keys), *keys, *args))
        except (RedisError, OSError) as error:
            self._refused(error)

    async def scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """All keys like ``pattern``, in pages. A key that is there all the while comes at least once."""
        cursor = b"0"
        while True:
            cursor, keys = await self.call("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_PAGE)
            if keys:
                yield keys
            if cursor == b"0":
                return

    async def close(self) -> None:
        if self._connection is not None:
            self._lost(self._connection, RedisConnectionError("closed by this process"))
        if self._closing is not None:
            await self._closing
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refused(self, error: Exception) -> NoReturn:
        if isinstance(error, ReadOnlyError) and self._connection is not None:
            # The server became a replica: the address may lead to another one by now.
            self._lost(self._connection, error)
        raise translate(error, self.where) from error

    def _submit(self, connection: AbstractConnection, command: Sequence[Argument]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if connection is not self._connection:
            future.set_exception(RedisConnectionError("the connection was lost"))
            return future
        self._unsent.append(pack_command(tuple(command)))  # type: ignore[arg-type]  # its stub forgets the "..."
        self._waiting.append(future)
        self._wake.set()
        if self._watch is None:
            self._watch = loop.call_later(self._timeout_s, self._check, self._answered)
        return future

    async def _connected(self) -> AbstractConnection:
        if (connection := self._connection) is not None:
            return connection
        async with self._opening:
            if self._connection is None:
                connection = self._connection_class(**self._open_kwargs)
                await connection.connect()  # type: ignore[no-untyped-call]
                self._connection = connection
                self._tasks = (
                    asyncio.create_task(self._write(connection), name="redis-write"),
                    asyncio.create_task(self._read(connection), name="redis-read"),
                )
            return self._connection

    async def _write(self, connection: AbstractConnection) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch, self._unsent = self._unsent, []
                if not connection.is_connected:
                    raise RedisConnectionError("the connection was lost")
                await connection.send_packed_command(batch, check_health=False)
        except (RedisError, OSError) as error:
            self._lost(connection, error)

    async def _read(self, connection: AbstractConnection) -> None:
        try:
            while True:
                try:
                    reply = await connection.read_response(disconnect_on_error=False)
                except ResponseError as error:  # the answer to one command; the connection is fine
                    reply = error
                future = self._waiting.popleft()
                self._answered += 1
                if future.done():  # its caller was cancelled
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (RedisError, OSError) as error:
            self._lost(connection, error)

    def _check(self, answered: int) -> None:
        """Called once per timeout while commands wait: a server that answered none of them in that time is gone."""
        self._watch = None
        if not self._waiting:
            return
        if self._answered == answered and self._connection is not None:
            self._lost(self._connection, RedisTimeoutError(f"no answer within {self._timeout_s:g} s"))
        else:
            self._watch = asyncio.get_running_loop().call_later(self._timeout_s, self._check, self._answered)

    def _lost(self, connection: AbstractConnection, error: Exception) -> None:
        """Fail what waits and let the connection go; the next call opens another one."""
        if connection is not self._connection:
            return
        self._connection = None
        self._unsent = []
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for task in self._tasks:
            task.cancel()
        self._closing = asyncio.create_task(connection.disconnect(nowait=True), name="redis-close")
