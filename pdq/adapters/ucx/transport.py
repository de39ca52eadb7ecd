"""``UcxTransport``: the port, a listener for sinks, and one kept link per source address."""

import asyncio
import logging
from collections.abc import Sequence
from socket import AF_INET
from typing import Any, Final

from pdq.adapters.buffers import fitting_all
from pdq.adapters.ucx.context import CONNECT_S, confine, context, device_of, has_rdma, lean
from pdq.adapters.ucx.link import Link
from pdq.adapters.ucx.sink import Pull, Sink
from pdq.adapters.ucx.source import Source
from pdq.core.errors import PeerLost, Unavailable
from pdq.core.settings import TransportSettings
from pdq.ports import Buffer, ChunkPlan, Fetched, HandoffRef, Locator

log = logging.getLogger(__name__)

Address = tuple[str, int]
MAX_LINKS: Final = 4096
"""Accepted at a time."""


class UcxTransport:
    """``KvTransport`` over UCX."""

    def __init__(self, settings: TransportSettings) -> None:
        self._host = settings.ucx_host
        self._source = Source()
        self._listener: Any = None
        self._port = 0
        self._accepted: set[Link] = set()
        self._outgoing: dict[Address, asyncio.Task[tuple[Link, Sink]]] = {}

    @property
    def name(self) -> str:
        return "ucx"

    async def start(self) -> None:
        api = await context.acquire(self._host)
        try:
            self._listener = api.create_listener(self._accept, 0, connect_timeout=CONNECT_S)
        except api.exceptions.UCXError as error:
            await context.release()
            raise Unavailable(f"UCX cannot listen: {error}") from lean(error)
        self._port = self._listener.port
        device = device_of(self._host)
        if not confine(self._port, device) and not has_rdma():
            await self.close()
            raise Unavailable(
                f"the UCX listener cannot be confined to {device}, so that strangers could reach it on every network of "
                "this host: allow SO_BINDTODEVICE (Linux 5.7 or CAP_NET_RAW), or take ucx out of PDQ_TRANSPORT_ORDER"
            )

    async def close(self) -> None:
        if self._listener is None:
            return
        self._listener.close()
        for ref in list(self._source.holding()):
            await self._source.release(ref)
        for connecting in list(self._outgoing.values()):
            await asyncio.wait([connecting])
            if not connecting.exception():
                await connecting.result()[0].close()
        self._outgoing.clear()
        for link in list(self._accepted):
            await link.close()
        self._listener = None
        await context.release()

    # --- Source -------------------------------------------------------------------------------------------------------

    def _accept(self, endpoint: Any) -> None:
        def ended(link: Link) -> None:
            self._accepted.discard(link)
            self._source.on_end(link)

        link = Link(endpoint, self._source.on_message, ended)
        self._accepted.add(link)
        if len(self._accepted) > MAX_LINKS or self._listener is None:
            link.close_soon()

    async def offer(self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> Locator:
        await self._source.offer(ref, plan, index, parts)
        return Locator(self.name, {"host": self._host, "port": str(self._port)})

    async def release(self, ref: HandoffRef) -> None:
        await self._source.release(ref)

    def holding(self) -> Sequence[HandoffRef]:
        return self._source.holding()

    def sweep(self) -> int:
        return 0  # memory and sockets go with their process

    # --- Sink ---------------------------------------------------------------------------------------------------------

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        targets = fitting_all(plan, into)
        link, sink = await self._link_to(_address(locator), timeout_s)
        hashes = await Pull(link, sink, ref, plan, targets, timeout_s).run()
        return Fetched(self.name, plan.total, hashes)

    async def _link_to(self, address: Address, timeout_s: float) -> tuple[Link, Sink]:
        """The link to a source: kept from an earlier fetch, or connected now, once for all who wait for it."""
        connecting = self._outgoing.get(address)
        if connecting is None:
            connecting = self._outgoing[address] = asyncio.create_task(self._connect(address))
            # Whoever waits for it may have been cancelled.
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(connecting)
        except TimeoutError as error:
            raise PeerLost(f"no UCX connection to {address[0]}:{address[1]} within {timeout_s} s") from error

    async def _connect(self, address: Address) -> tuple[Link, Sink]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(*address, family=AF_INET)
            host = str(found[0][4][0])
            if not has_rdma():
                # UCX loses the news of a refused connection now and then, and waits for its timeout.
                _, probe = await asyncio.open_connection(host, address[1])
                probe.close()
            endpoint = await context.api.create_endpoint(host, address[1], connect_timeout=CONNECT_S)
        except (OSError, ValueError, RuntimeError, context.api.exceptions.UCXError) as error:
            self._outgoing.pop(address, None)
            raise PeerLost(f"no UCX connection to {address[0]}:{address[1]}: {error!r}") from lean(error)
        sink = Sink()

        def ended(_: Link) -> None:
            self._outgoing.pop(address, None)
            sink.on_end()

        return Link(endpoint, sink.on_message, ended), sink


def _address(locator: Locator) -> Address:
    host, port = locator.address.get("host", ""), locator.address.get("port", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise PeerLost(f"the UCX locator {dict(locator.address)} names no host and port")
    return host, int(port)
