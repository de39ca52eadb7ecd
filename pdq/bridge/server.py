"""The bridge as a server: uvicorn on sockets of ours, inside the program's own event loop and shutdown.

Draining: no new connections, streams go on. Stopped: what still runs ends with an error that its client sees, and is
cancelled everywhere else.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from pdq.bridge.app import Bridge, Parts
from pdq.bridge.protocol import BoundedProtocol
from pdq.core.errors import InvalidSettings
from pdq.runtime import Lifecycle

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 75
CLOSE_S: Final = 5.0
"""How long ended answers may take to leave after the last stage has begun."""


class _Server(uvicorn.Server):
    """Signals are the lifecycle's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket whose connections send every write at once, whatever the event loop does about that; ``shared``:
    several bridge processes may listen on the same port.

    Raises:
        InvalidSettings: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidSettings(f"the bridge cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener


async def serve(
    parts: Parts,
    lifecycle: Lifecycle,
    *,
    listener: socket.socket | None = None,
    on_listening: Callable[[str, int], None] | None = None,
) -> None:
    """Serve until the lifecycle ends. ``on_listening`` is told the address, which may have been chosen just now."""
    settings = parts.settings.bridge
    listener = listener or listen(settings.host, settings.port)
    bridge = Bridge(parts)
    # What it says of starting and stopping, the bridge and its lifecycle say.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        bridge,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config)
    await bridge.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        host, port = listener.getsockname()[:2]
        if on_listening is not None:
            on_listening(host, port)
        log.info("serving %s on http://%s:%d", ", ".join(parts.tokenizers), host, port)
        await _either(serving, lifecycle.draining)
        server.should_exit = True
        await _either(serving, lifecycle.stopped)
    finally:
        bridge.in_flight.abort()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=CLOSE_S)
        server.force_exit = True
        await bridge.close()
        await serving


async def _either(serving: asyncio.Task[None], event: asyncio.Event) -> None:
    """Until ``event``, or until the server ends by itself."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
