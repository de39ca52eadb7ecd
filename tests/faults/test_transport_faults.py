"""Peers of the KV transports that are killed, stopped, strange or gone."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from pdq.adapters.shm import _Mapped
from pdq.adapters.ucx.context import context
from pdq.core.errors import BufferAtRisk, HandoffUnknown, PeerLost
from pdq.core.names import SHM_PREFIX
from pdq.ports import ChunkPlan, KvTransport
from tests.kv import SourceProcess, make, payload, ref, targets, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
LARGE = ChunkPlan((32 * MIB,) * 4)
SMALL = ChunkPlan((100_000, 100_000))


@dataclass
class Here:
    kind: str
    transport: KvTransport


@pytest_asyncio.fixture(params=["shm", "ucx"], scope="module", loop_scope="module")
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Here]:
    transport = make(request.param, "")
    await transport.start()
    yield Here(request.param, transport)
    await transport.close()


Spawn = Callable[[], "asyncio.Future[SourceProcess]"]


@pytest_asyncio.fixture(loop_scope="module")
async def spawn(here: Here) -> AsyncIterator[Spawn]:
    started: list[SourceProcess] = []

    async def start() -> SourceProcess:
        started.append(await SourceProcess.start(here.kind, ""))
        return started[-1]

    yield lambda: asyncio.ensure_future(start())
    for process in started:
        await process.kill()


def only(here: Here, kind: str) -> None:
    if here.kind != kind:
        pytest.skip(f"about {kind}")


async def test_a_source_killed_while_its_sink_waits_is_a_lost_peer(here: Here, spawn: Spawn) -> None:
    source = await spawn()
    locator = await source.offer("r", SMALL, chunks=[0])
    buffers, into = targets(SMALL)
    fetch = asyncio.create_task(here.transport.fetch(locator, ref("r"), SMALL, into, 30))
    await until(lambda: any(buffers[0]))
    await source.kill()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(fetch, 10)


async def test_a_source_killed_in_the_middle_leaves_buffers_that_nothing_writes_to(here: Here, spawn: Spawn) -> None:
    only(here, "ucx")
    source, heir = await spawn(), await spawn()
    locator = await source.offer("r", LARGE)
    buffers, into = targets(LARGE)
    fetch = asyncio.create_task(here.transport.fetch(locator, ref("r"), LARGE, into, 30))
    await until(lambda: any(buffers[0][:1]))
    await source.kill()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(fetch, 15)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    again = await heir.offer("r", SMALL)
    others, elsewhere = targets(SMALL)
    await here.transport.fetch(again, ref("r"), SMALL, elsewhere, 20)
    assert others == [payload(1, 0, 100_000), payload(1, 1, 100_000)]
    assert not any(map(any, buffers))


async def test_a_stopped_source_puts_the_buffers_at_risk_and_is_served_from_again_later(
    here: Here, spawn: Spawn
) -> None:
    only(here, "ucx")
    source = await spawn()
    locator = await source.offer("r", LARGE)
    buffers, into = targets(LARGE)
    fetch = asyncio.create_task(here.transport.fetch(locator, ref("r"), LARGE, into, 0.5))
    await until(lambda: any(buffers[0][:1]))
    os.kill(source.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BufferAtRisk) as caught:
            await fetch
        assert isinstance(caught.value.__cause__, PeerLost)
    finally:
        os.kill(source.pid, signal.SIGCONT)
    others, elsewhere = targets(LARGE)
    await here.transport.fetch(locator, ref("r"), LARGE, elsewhere, 30)
    assert others == [payload(1, index, length) for index, length in enumerate(LARGE.lengths)]


async def test_a_cancelled_fetch_from_a_stopped_source_says_that_its_buffers_are_at_risk(
    here: Here, spawn: Spawn
) -> None:
    only(here, "ucx")
    source = await spawn()
    locator = await source.offer("r", LARGE)
    buffers, into = targets(LARGE)
    fetch = asyncio.create_task(here.transport.fetch(locator, ref("r"), LARGE, into, 30))
    await until(lambda: any(buffers[0][:1]))
    os.kill(source.pid, signal.SIGSTOP)
    try:
        fetch.cancel()
        with pytest.raises(BufferAtRisk) as caught:
            await fetch
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    finally:
        os.kill(source.pid, signal.SIGCONT)


async def test_a_stopped_source_that_owes_a_chunk_is_a_lost_peer_in_time(here: Here, spawn: Spawn) -> None:
    only(here, "shm")
    source = await spawn()
    locator = await source.offer("r", SMALL, chunks=[0])
    os.kill(source.pid, signal.SIGSTOP)
    try:
        with pytest.raises(PeerLost):
            await here.transport.fetch(locator, ref("r"), SMALL, targets(SMALL)[1], 0.3)
    finally:
        os.kill(source.pid, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sink_that_dies_in_the_middle_does_not_hold_the_source_up(
    here: Here, spawn: Spawn, number: signal.Signals
) -> None:
    victim, healthy = await spawn(), make(here.kind, "")
    content = [payload(1, index, length) for index, length in enumerate(LARGE.lengths)]
    for index, chunk in enumerate(content):
        locator = await here.transport.offer(ref("r"), LARGE, index, [chunk])
    await victim.tell("fetch", id="r", lengths=LARGE.lengths, address=dict(locator.address))
    os.kill(victim.pid, number)
    await healthy.start()
    try:
        buffers, into = targets(LARGE)
        await healthy.fetch(locator, ref("r"), LARGE, into, 30)
        assert buffers == content
        await asyncio.wait_for(here.transport.release(ref("r")), 10)
        with pytest.raises(HandoffUnknown):
            await healthy.fetch(locator, ref("r"), LARGE, into, 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGCONT)
        await healthy.close()


async def test_strangers_on_the_port_disturb_nobody(here: Here, spawn: Spawn) -> None:
    only(here, "ucx")
    source = await spawn()
    locator = await source.offer("r", LARGE)
    host, port = locator.address["host"], int(locator.address["port"])
    buffers, into = targets(LARGE)
    fetch = asyncio.create_task(here.transport.fetch(locator, ref("r"), LARGE, into, 30))

    silent = [socket.create_connection((host, port)) for _ in range(20)]
    for length in (1, 100, 70_000):
        with contextlib.suppress(ConnectionError), socket.create_connection((host, port)) as stranger:
            stranger.sendall(os.urandom(length))
    for junk in (b"", b"x", os.urandom(100), b"pdqk\x01\x00\x00\x00\xff\xff\xff\xff", os.urandom(1 << 20)):
        endpoint = await context.api.create_endpoint(host, port)
        with contextlib.suppress(context.api.exceptions.UCXError):
            await asyncio.wait_for(endpoint.send(junk), 5)
        await endpoint.close()

    await fetch
    assert buffers == [payload(1, index, length) for index, length in enumerate(LARGE.lengths)]
    for stranger in silent:
        stranger.close()
    assert (await source.tell("holding"))["holding"] == ["r"]
    assert await source.end() == 0


async def test_the_listener_is_open_to_the_configured_host_only(here: Here) -> None:
    only(here, "ucx")
    locator = await here.transport.offer(ref("r"), SMALL, 0, [payload(1, 0, 100_000)])
    await here.transport.release(ref("r"))
    port = int(locator.address["port"])
    own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; names the address that faces the network
        own.add(probe.getsockname()[0])
    for address in (a for a in own if not str(a).startswith("127.")):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((str(address), port), timeout=2)


async def test_a_port_that_nobody_listens_on_is_a_lost_peer_at_once(here: Here, spawn: Spawn) -> None:
    only(here, "ucx")
    source = await spawn()
    locator = await source.offer("r", SMALL)
    await source.kill()
    for _ in range(5):
        with pytest.raises(PeerLost):
            await asyncio.wait_for(here.transport.fetch(locator, ref("r"), SMALL, targets(SMALL)[1], 30), 3)


def test_many_threads_may_open_segments_while_others_are_forgotten(tmp_path: Path) -> None:
    names = [f"{SHM_PREFIX}{number}" for number in range(64)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    mapped = _Mapped(tmp_path, limit=48 * 4096)
    with ThreadPoolExecutor(8) as threads:
        opened = list(threads.map(lambda n: len(mapped.open(names[n % 64], 4096)[1]), range(2000)))
    assert opened == [4096] * 2000
    mapped.close()
