"""One endpoint between two processes: control messages in order, pieces under their own tags, one way to end.

Callers that can be cancelled never await UCX itself: every send and receive is a task of the link, which holds the buffer
until UCX has said that it is done with it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from pdq.adapters.ucx import wire
from pdq.adapters.ucx.context import context, lean
from pdq.core.errors import InvalidMessage, PeerLost

log = logging.getLogger(__name__)


class Link:
    """``on_message`` is called on the loop for each control message; ``on_end`` once, when the link is gone."""

    def __init__(
        self, endpoint: Any, on_message: "Callable[[Link, wire.Message], None]", on_end: "Callable[[Link], None]"
    ) -> None:
        self._endpoint = endpoint
        self._on_message = on_message
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.ended = False
        self.cut = False
        """Ended by this side, while UCX still had the peer: its last writes cannot be ruled out."""
        self._listener = asyncio.create_task(self._listen())

    # --- Messages -----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        buffer = bytearray(wire.MAX_MESSAGE)
        try:
            while True:
                wire.blank(buffer)
                await self._endpoint.recv(buffer)
                self._on_message(self, wire.decode(buffer))
        except InvalidMessage as error:
            log.warning("a transport peer is cut off: %s", error)
        except context.api.exceptions.UCXError as error:
            log.debug("a transport link ended: %r", lean(error))
        finally:
            self.close_soon()

    def say(self, message: wire.Message) -> asyncio.Task[None]:
        return self._task(self._endpoint.send(wire.encode(message)))

    # --- Pieces -------------------------------------------------------------------------------------------------------

    def send(self, piece: memoryview | bytes, tag: int) -> asyncio.Task[None]:
        """The task ends when UCX no longer reads from ``piece``."""
        return self._task(self._endpoint.send(piece, tag=self._tag(tag), force_tag=True))

    def receive(self, piece: memoryview, tag: int) -> asyncio.Task[None]:
        """The task ends when a message has landed in ``piece``, or the link is gone."""
        return self._task(self._endpoint.recv(piece, tag=self._tag(tag), force_tag=True))

    @staticmethod
    def _tag(tag: int) -> Any:
        return context.api.types.Tag(tag)

    def _task(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(_translated(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Nobody may be waiting any more when it fails.
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return task

    # --- End ----------------------------------------------------------------------------------------------------------

    def close_soon(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def close(self) -> None:
        """Returns when UCX has let go of the endpoint. Idempotent."""
        self.close_soon()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self.ended:
            return
        self.ended = True
        self.cut = not self._endpoint.closed
        await self._endpoint.close()
        self._on_end(self)
        await asyncio.wait({self._listener})


async def _translated(work: Any) -> None:
    try:
        await work
    except context.api.exceptions.UCXError as error:
        raise PeerLost(f"the connection broke: {error}") from lean(error)
