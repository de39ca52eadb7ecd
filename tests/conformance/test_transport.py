"""One suite for the KV transport port, over all four adapters; where bytes can leave the process, from another one too."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdq.adapters.memory.transport import TransportWorld
from pdq.adapters.processes import Server
from pdq.core.errors import DigestMismatch, HandoffUnknown, PeerLost, TransferFailed
from pdq.core.layout import chunk_hash
from pdq.core.names import SHM_PREFIX
from pdq.ports import ChunkPlan, KvTransport, Locator
from tests.kv import MODEL, SourceProcess, cuts, make, payload, ref, targets, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ["memory", "shm", "redis", "ucx"]
MIB = 1 << 20


@dataclass
class Pair:
    """A source and a sink of one kind, in this process."""

    kind: str
    source: KvTransport
    sink: KvTransport


@pytest_asyncio.fixture(params=KINDS, scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest, valkey: Server) -> AsyncIterator[Pair]:
    world = TransportWorld()
    pair = Pair(request.param, make(request.param, valkey.url, world), make(request.param, valkey.url, world))
    await pair.source.start()
    await pair.sink.start()
    yield pair
    await pair.sink.close()
    await pair.source.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def leaves_nothing(pair: Pair, valkey: Server) -> AsyncIterator[None]:
    yield
    for held in list(pair.source.holding()):
        await pair.source.release(held)
    assert pair.source.holding() == []
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        assert [key async for key in client.scan_iter(f"pdq:{{{MODEL}}}:kv:*")] == []


async def offered(pair: Pair, request_id: str, plan: ChunkPlan, parts: int = 1) -> Locator:
    for index, length in enumerate(plan.lengths):
        locator = await pair.source.offer(ref(request_id), plan, index, cuts(payload(1, index, length), parts))
    return locator


@pytest.mark.parametrize(
    ("lengths", "source_parts", "sink_parts"),
    [
        ((1,), 1, 1),
        ((4097, 1, 65_535), 3, 2),
        ((0, 5, 0), 1, 1),
        ((MIB, MIB, 7), 16, 16),
        ((3 * MIB,), 700, 1300),
        ((20 * MIB + 3,), 1, 3),
        ((64 * MIB,), 4, 1),
    ],
)
async def test_bytes_arrive_and_hashes_are_of_what_landed(
    pair: Pair, lengths: tuple[int, ...], source_parts: int, sink_parts: int
) -> None:
    plan = ChunkPlan(lengths)
    locator = await offered(pair, "r", plan, source_parts)
    buffers, into = targets(plan, sink_parts)
    fetched = await pair.sink.fetch(locator, ref("r"), plan, into, 20)
    assert buffers == [payload(1, index, length) for index, length in enumerate(lengths)]
    assert fetched.hashes == tuple(chunk_hash(buffer) for buffer in buffers)
    assert fetched.bytes == sum(lengths)
    assert fetched.transport == pair.sink.name == locator.transport


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
async def test_parts_may_be_split_anywhere_on_either_side(pair: Pair, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 400_000), label="length")
    borders = st.lists(st.integers(0, length), max_size=40)
    source_borders, sink_borders = data.draw(borders, label="source"), data.draw(borders, label="sink")
    plan = ChunkPlan((length,))

    content = payload(3, 0, length)
    locator = await pair.source.offer(ref("split"), plan, 0, cuts(content, source_borders))
    buffers, into = targets(plan, sink_borders)
    await pair.sink.fetch(locator, ref("split"), plan, into, 20)
    await pair.source.release(ref("split"))
    assert buffers == [content]


async def test_a_fetch_may_start_before_all_chunks_are_offered(pair: Pair) -> None:
    plan = ChunkPlan((5000, 70_000, 300_000))
    content = [bytes(payload(1, index, length)) for index, length in enumerate(plan.lengths)]
    locator = await pair.source.offer(ref("r"), plan, 0, [content[0]])
    buffers, into = targets(plan)
    fetch = asyncio.create_task(pair.sink.fetch(locator, ref("r"), plan, into, 20))
    await until(lambda: buffers[0] == content[0])
    for index in (2, 1):
        assert not fetch.done()
        assert await pair.source.offer(ref("r"), plan, index, [content[index]]) == locator
    await fetch
    assert buffers == content


async def test_offering_a_chunk_twice_changes_nothing(pair: Pair) -> None:
    plan = ChunkPlan((100,))
    locator = await offered(pair, "r", plan)
    assert await pair.source.offer(ref("r"), plan, 0, [bytes(100)]) == locator
    buffers, into = targets(plan)
    await pair.sink.fetch(locator, ref("r"), plan, into, 20)
    assert buffers == [payload(1, 0, 100)]


async def test_a_chunk_of_another_length_than_planned_is_refused(pair: Pair) -> None:
    plan = ChunkPlan((100,))
    with pytest.raises(TransferFailed):
        await pair.source.offer(ref("r"), plan, 0, [bytes(99)])
    with pytest.raises(TransferFailed):
        await pair.source.offer(ref("r"), plan, 1, [bytes(100)])


@pytest.mark.parametrize(
    "wrong",
    [ref("r", secret="close sesame"), ref("r", epoch=2), ref("never offered")],
    ids=["secret", "epoch", "request"],
)
async def test_only_the_right_secret_epoch_and_request_open_a_handoff(pair: Pair, wrong: object) -> None:
    plan = ChunkPlan((1000, 1000))
    locator = await offered(pair, "r", plan)
    buffers, into = targets(plan)
    with pytest.raises(HandoffUnknown):
        await pair.sink.fetch(locator, wrong, plan, into, 20)  # type: ignore[arg-type]
    assert not any(map(any, buffers))
    await pair.sink.fetch(locator, ref("r"), plan, into, 20)


async def test_what_is_released_is_unknown(pair: Pair) -> None:
    plan = ChunkPlan((1000,))
    locator = await offered(pair, "r", plan)
    await pair.source.release(ref("r"))
    await pair.source.release(ref("r"))
    with pytest.raises(HandoffUnknown):
        await pair.sink.fetch(locator, ref("r"), plan, targets(plan)[1], 20)


async def test_a_release_ends_a_fetch_that_waits(pair: Pair) -> None:
    plan = ChunkPlan((1000, 1000))
    locator = await pair.source.offer(ref("r"), plan, 0, [payload(1, 0, 1000)])
    buffers, into = targets(plan)
    fetch = asyncio.create_task(pair.sink.fetch(locator, ref("r"), plan, into, 20))
    await until(lambda: any(buffers[0]))
    await pair.source.release(ref("r"))
    with pytest.raises(HandoffUnknown):
        await fetch


async def test_after_a_release_the_parts_are_the_callers_again(pair: Pair) -> None:
    """Whatever a fetch that was cut short has got, it never passes for the handoff once the parts are overwritten."""
    plan = ChunkPlan((8 * MIB,) * 4)
    content = [payload(1, index, length) for index, length in enumerate(plan.lengths)]
    original = [bytes(chunk) for chunk in content]
    for index, chunk in enumerate(content):
        locator = await pair.source.offer(ref("r"), plan, index, [chunk])
    buffers, into = targets(plan)
    fetch = asyncio.create_task(pair.sink.fetch(locator, ref("r"), plan, into, 20))
    await until(lambda: any(buffers[0][:1]) or fetch.done())
    await pair.source.release(ref("r"))
    for chunk in content:
        chunk[:] = bytes(len(chunk))
    try:
        await fetch
    except HandoffUnknown:
        return
    assert [bytes(buffer) for buffer in buffers] == original


async def test_a_source_that_announces_other_bytes_is_found_out(pair: Pair) -> None:
    if pair.kind in ("shm", "redis"):
        pytest.skip("the tier holds a copy that was hashed as it was made; its corruption has a test of its own")
    plan = ChunkPlan((300_000,))
    content = payload(1, 0, 300_000)
    locator = await pair.source.offer(ref("r"), plan, 0, [content])
    content[77] ^= 1
    with pytest.raises(DigestMismatch):
        await pair.sink.fetch(locator, ref("r"), plan, targets(plan)[1], 20)


async def test_bytes_that_changed_in_the_store_are_found_out(pair: Pair, valkey: Server) -> None:
    if pair.kind not in ("shm", "redis"):
        pytest.skip("nothing is stored between source and sink")
    plan = ChunkPlan((300_000,))
    locator = await offered(pair, "r", plan)
    if pair.kind == "shm":
        path = Path("/dev/shm") / locator.address["segment"]
        with path.open("r+b") as segment:
            segment.seek(4096 + 77)
            segment.write(b"not what was there")
    else:
        async with redis.asyncio.Redis.from_url(valkey.url) as client:
            keys = [key async for key in client.scan_iter(f"pdq:{{{MODEL}}}:kv:*:0.0")]
            await client.setrange(keys[0], 77, b"not what was there")
    with pytest.raises(DigestMismatch):
        await pair.sink.fetch(locator, ref("r"), plan, targets(plan)[1], 20)


async def test_nothing_in_time_is_a_lost_peer(pair: Pair) -> None:
    plan = ChunkPlan((1000, 1000))
    locator = await pair.source.offer(ref("r"), plan, 0, [payload(1, 0, 1000)])
    with pytest.raises(PeerLost):
        await pair.sink.fetch(locator, ref("r"), plan, targets(plan)[1], 0.1)


async def test_a_cancelled_fetch_writes_no_more(pair: Pair) -> None:
    plan = ChunkPlan((2 * MIB, 2 * MIB))
    locator = await pair.source.offer(ref("r"), plan, 0, [payload(1, 0, 2 * MIB)])
    buffers, into = targets(plan)
    fetch = asyncio.create_task(pair.sink.fetch(locator, ref("r"), plan, into, 20))
    await until(lambda: any(buffers[0]))
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    await pair.source.offer(ref("r"), plan, 1, [payload(1, 1, 2 * MIB)])
    # A complete fetch of the same bytes over the same path: a late write of the cancelled one would be here by now.
    others, elsewhere = targets(plan)
    await pair.sink.fetch(locator, ref("r"), plan, elsewhere, 20)
    assert others == [payload(1, 0, 2 * MIB), payload(1, 1, 2 * MIB)]
    assert not any(map(any, buffers))


async def test_sixteen_handoffs_at_once(pair: Pair) -> None:
    plan = ChunkPlan((200_000, 300_001))

    async def exchange(number: int) -> None:
        content = [payload(number, index, length) for index, length in enumerate(plan.lengths)]
        name = f"r{number}"
        locator = await pair.source.offer(ref(name), plan, 0, cuts(content[0], number + 1))
        buffers, into = targets(plan, 17 - number)
        fetch = asyncio.create_task(pair.sink.fetch(locator, ref(name), plan, into, 20))
        await pair.source.offer(ref(name), plan, 1, [content[1]])
        await fetch
        assert buffers == content
        await pair.source.release(ref(name))

    await asyncio.gather(*(exchange(number) for number in range(16)))


@pytest.mark.parametrize(
    "address",
    [
        {},
        {"host": "127.0.0.1", "port": "1", "boot_id": "no boot", "segment": "pdq-kv-none"},
        {"host": "127.0.0.1", "port": "70000"},
        {"host": "no such host.", "port": "-1"},
        {"host": "\x00\ud800", "port": "80", "segment": "../../etc/passwd"},
    ],
)
async def test_a_wrong_address_fails_that_fetch_only(pair: Pair, address: dict[str, str]) -> None:
    if pair.kind in ("memory", "redis"):
        pytest.skip("has no address")
    plan = ChunkPlan((1000,))
    with pytest.raises(TransferFailed):
        await pair.sink.fetch(Locator(pair.kind, address), ref("r"), plan, targets(plan)[1], 5)
    locator = await offered(pair, "r", plan)
    await pair.sink.fetch(locator, ref("r"), plan, targets(plan)[1], 20)


async def test_holding_lists_what_was_offered_and_not_released(pair: Pair) -> None:
    plan = ChunkPlan((10,))
    await offered(pair, "a", plan)
    await offered(pair, "b", plan)
    assert set(pair.source.holding()) == {ref("a"), ref("b")}
    await pair.source.release(ref("a"))
    assert list(pair.source.holding()) == [ref("b")]


# --- From another process ---------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def other(pair: Pair, valkey: Server) -> AsyncIterator[SourceProcess]:
    if pair.kind == "memory":
        pytest.skip("never leaves the process")
    source = await SourceProcess.start(pair.kind, valkey.url)
    yield source
    await source.kill()


async def test_bytes_come_from_another_process_and_nothing_is_left_of_it(pair: Pair, other: SourceProcess) -> None:
    plan = ChunkPlan((3 * MIB + 1, 5000))
    locator = await other.offer("r", plan, parts=5)
    buffers, into = targets(plan, 3)
    await pair.sink.fetch(locator, ref("r"), plan, into, 20)
    assert buffers == [payload(1, index, length) for index, length in enumerate(plan.lengths)]
    await other.tell("release", id="r")
    assert (await other.tell("holding"))["holding"] == []
    with pytest.raises(HandoffUnknown):
        await pair.sink.fetch(locator, ref("r"), plan, into, 20)
    before = set(os.listdir("/dev/shm"))
    assert await other.end() == 0
    gone = [name for name in before if name.startswith(SHM_PREFIX)]
    assert pair.kind != "shm" or any(not (Path("/dev/shm") / name).exists() for name in gone)


async def test_chunks_are_waited_for_from_another_process(pair: Pair, other: SourceProcess) -> None:
    plan = ChunkPlan((100_000, 100_000))
    locator = await other.offer("r", plan, chunks=[0])
    buffers, into = targets(plan)
    fetch = asyncio.create_task(pair.sink.fetch(locator, ref("r"), plan, into, 20))
    await until(lambda: any(buffers[0]))
    await other.offer("r", plan, chunks=[1])
    await fetch
    assert buffers == [payload(1, 0, 100_000), payload(1, 1, 100_000)]
    await other.tell("release", id="r")


async def test_the_tier_outlives_its_source(pair: Pair, other: SourceProcess) -> None:
    if pair.kind != "redis":
        pytest.skip("not a tier")
    plan = ChunkPlan((100_000,))
    locator = await other.offer("r", plan)
    assert await other.end() == 0
    buffers, into = targets(plan)
    await pair.sink.fetch(locator, ref("r"), plan, into, 20)
    assert buffers == [payload(1, 0, 100_000)]
    await pair.sink.release(ref("r", secret="not the secret"))
    await pair.sink.fetch(locator, ref("r"), plan, into, 20)
    await pair.sink.release(ref("r"))
    with pytest.raises(HandoffUnknown):
        await pair.sink.fetch(locator, ref("r"), plan, into, 20)


async def test_segments_of_a_process_that_was_killed_are_swept(pair: Pair, other: SourceProcess) -> None:
    if pair.kind != "shm":
        pytest.skip("has no segments")
    locator = await other.offer("r", ChunkPlan((100_000,)))
    path = Path("/dev/shm") / locator.address["segment"]
    assert path.stat().st_mode & 0o777 == 0o600
    await pair.sink.start()
    assert path.exists()
    await other.kill()
    await pair.sink.start()
    assert not path.exists()
