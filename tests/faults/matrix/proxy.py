"""A network between one program and one server that can be cut, slowed down and mended.

What is sent while it is cut is not lost but late, as with TCP over a line that is dead for a while. Connections that are
opened meanwhile hang until it is mended.
"""

import asyncio
import contextlib
from typing import Final

READ_BYTES: Final = 16 * 1024


class Network:
    """Listens on ``port`` of loopback and passes everything on to ``target``."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._lag_s = 0.0
        self._pipes: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> "Network":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    def slow(self, lag_s: float) -> None:
        """Every 16 KiB, and every message, take ``lag_s`` more."""
        self._lag_s = lag_s

    def mend(self) -> None:
        self._lag_s = 0.0
        self._whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        ways = [asyncio.ensure_future(self._pass_on(*pair)) for pair in ((reader, back), (there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            back.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if self._lag_s:
                    await asyncio.sleep(self._lag_s)
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
