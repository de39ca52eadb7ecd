"""The UCX context of this process: made by the first transport that starts, unmade by the last one that closes.

What is set here was measured over loopback TCP: ``put_zcopy`` rendezvous moves twice as much as the default, and Python
futures with a sleeping progress thread are the only mode that costs nothing when idle. An operator's own ``UCX_*``
variables win, and hosts with RDMA devices keep UCX's own choice of devices and protocols.
"""

import asyncio
import fcntl
import importlib
import logging
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pdq.adapters.buffers import off_loop
from pdq.core.errors import InvalidSettings

log = logging.getLogger(__name__)

SIOCGIFADDR: Final = 0x8915
EPOLL_MS: Final = 100
"""How long the progress thread sleeps when nothing happens. ucxx' own 1 ms costs 1.6 percent of a core, and no wake-up was
seen to depend on it."""
CONNECT_S: Final = 5.0
"""For the handshake of an endpoint, either side: a silent stranger is dropped after it."""


class Context:
    """Counts the transports that use UCX; ``api`` is the ``ucxx`` module, configured and initialised."""

    def __init__(self) -> None:
        self.api: Any = None
        self._users = 0
        self._opening: asyncio.Task[None] | None = None
        self._abandoned: list[object] = []

    async def acquire(self, host: str) -> Any:
        """The ``ucxx`` module, ready for endpoints."""
        self._users += 1
        if self._users == 1:
            self._opening = asyncio.create_task(self._open(host))
        assert self._opening is not None
        try:
            await asyncio.shield(self._opening)
        except BaseException:
            self._users -= 1
            raise
        return self.api

    async def _open(self, host: str) -> None:
        _configure(host)
        self.api = await off_loop(_load)
        self.api.init(progress_mode="thread", enable_python_future=True)
        worker = self.api.core._get_ctx().worker
        # The thread begins with a slow import; only then does it look whether it shall stop.
        await off_loop(worker.stop_progress_thread)
        worker.start_progress_thread(polling_mode=False, epoll_timeout=EPOLL_MS)

    async def release(self) -> None:
        """Call after closing all endpoints and listeners."""
        self._users -= 1
        if self._users:
            return
        await asyncio.sleep(0)  # callbacks that still hold endpoints
        # Without this, reset waits for the notifier's poll of a second, on the loop's thread.
        self.api.core._get_ctx().worker.stop_request_notifier_thread()
        try:
            self.api.reset()
        except self.api.exceptions.UCXError as error:
            log.warning("UCX context is left to the end of the process: %s", str(error).splitlines()[0])
        else:
            self._abandoned.clear()

    def abandon(self, buffer: object) -> None:
        """Keep memory that UCX may still write to alive until the worker is gone: ucxx itself does not."""
        self._abandoned.append(buffer)


context: Final = Context()


def _load() -> Any:
    # The wheel's own library first: a system libucx of another version may lie on the loader's path.
    importlib.import_module("libucx").load_library()
    return importlib.import_module("ucxx")


def _configure(host: str) -> None:
    defaults = {"UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    if not has_rdma():
        defaults |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device_of(host), "UCX_RNDV_SCHEME": "put_zcopy"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def has_rdma() -> bool:
    """Whether this host has RDMA devices: then UCX chooses, and its listener may not be a TCP port."""
    with suppress(OSError):
        return any(Path("/sys/class/infiniband").iterdir())
    return False


def device_of(host: str) -> str:
    """The network interface that owns ``host``.

    Raises:
        InvalidSettings: no interface of this machine does.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise InvalidSettings(f"PDQ_TRANSPORT_UCX_HOST={host!r} is not a name or address of this machine") from error
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise InvalidSettings(f"PDQ_TRANSPORT_UCX_HOST={host!r} is {address}, which no interface of this machine has")


def confine(port: int, device: str) -> bool:
    """Let the UCX listener on ``port`` accept only what comes in through ``device``: it always binds all addresses, and
    takes no other. On loopback that means this host only. False if there is no such TCP listener, or no right to do it."""
    inode = next(
        (
            fields[9]
            for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
            if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"
        ),
        None,
    )
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()) != f"socket:[{inode}]":
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\x00")
                return True
    return False


def lean(error: BaseException) -> BaseException:
    """The error without its frames: they hold endpoints, and an error that someone keeps would keep UCX from closing."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return error
