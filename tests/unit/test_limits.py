"""Every limit of SECURITY.md at its edge: as much as is allowed passes, one more is refused with a typed error."""

import asyncio
import base64
import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from pdq.adapters.nats import NatsBus, NatsQueue, connect
from pdq.adapters.nats.connection import HEADER_ROOM
from pdq.adapters.nats.queue import DETAIL_BYTES
from pdq.adapters.processes import Server
from pdq.adapters.shm import HEAD, ShmTransport
from pdq.adapters.ucx import source, wire
from pdq.adapters.ucx.transport import MAX_LINKS
from pdq.bridge import openai
from pdq.bridge.exchange import CLIENT_ID_LENGTH
from pdq.bridge.protocol import MAX_HEAD_BYTES
from pdq.core import messages, names
from pdq.core.errors import HandoffUnknown, InvalidMessage, InvalidRequest, TransferFailed
from pdq.core.messages import MAX_MESSAGE_BYTES, End, PrefillJob, TokenEntry, TokenFrame, decode
from pdq.core.settings import NatsSettings, QueueSettings, Settings, TransportSettings
from pdq.ports import ChunkPlan, KvTransport, Locator, Queue
from tests.kv import make, payload, ref, targets
from tests.unit.bridge.harness import MODEL, rig, settings

DOCUMENT = Path(__file__).parents[2] / "SECURITY.md"


# --- NATS messages ----------------------------------------------------------------------------------------------------


def job(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "reply_to": "r", "prompt": "p", **fields}


def sampling(**fields: Any) -> dict[str, Any]:
    return job(sampling=fields)


def chat(count: int = 1, **message: Any) -> dict[str, Any]:
    return {"model": "m", "reply_to": "r", "messages": [{"role": "user", "content": "x", **message}] * count}


JOB_LIMITS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "chat messages": (messages.MAX_CHAT_MESSAGES, chat),
    "stop strings": (messages.MAX_STOPS, lambda n: sampling(stop=["x"] * n)),
    "characters of a stop string": (messages.MAX_STOP_CHARS, lambda n: sampling(stop=["x" * n])),
    "stop token ids": (messages.MAX_STOP_TOKENS, lambda n: sampling(stop_token_ids=[1] * n)),
    "logprobs": (20, lambda n: sampling(logprobs=n)),
    "role": (64, lambda n: chat(role="x" * n)),
    "name": (256, lambda n: chat(name="x" * n)),
    "model": (256, lambda n: job(model="x" * n)),
    "reply_to": (256, lambda n: job(reply_to="x" * n)),
    "tenant": (256, lambda n: job(tenant="x" * n)),
    "client_id": (256, lambda n: job(client_id="x" * n)),
    "request_id": (64, lambda n: job(request_id="x" * n)),
    "timeout_ms": (86_400_000, lambda n: job(timeout_ms=n)),
    "token id": (2**31 - 1, lambda n: {"model": "m", "reply_to": "r", "prompt_token_ids": [n]}),
    "max_attempts": (100, lambda n: job(policy={"max_attempts": n})),
}


@pytest.mark.parametrize("what", JOB_LIMITS)
def test_a_job_may_use_each_limit_and_not_exceed_it(what: str) -> None:
    limit, build = JOB_LIMITS[what]
    decode(json.dumps(build(limit)).encode(), PrefillJob)
    with pytest.raises(InvalidMessage, match=r"at `\$\."):
        decode(json.dumps(build(limit + 1)).encode(), PrefillJob)


@pytest.mark.parametrize("kind", [PrefillJob, messages.DecodeJob, TokenFrame, messages.Control, messages.OutputAnswer])
def test_no_message_may_be_longer_than_eight_megabytes(kind: Any) -> None:
    resend = b'{"type":"resend","request_id":"r","seq":1,"reply_to":"x"}'
    assert isinstance(decode(resend.ljust(MAX_MESSAGE_BYTES), messages.Control), messages.Resend)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match=f"{MAX_MESSAGE_BYTES + 1} bytes is over the limit"):
        decode(b" " * (MAX_MESSAGE_BYTES + 1), kind)


async def test_a_job_fits_the_broker_with_room_for_the_headers_of_a_dead_letter(nats: Server, model: str) -> None:
    connection = await connect(NatsSettings(url=nats.url), "limits")
    queue = NatsQueue(connection, QueueSettings())
    await queue.ensure_streams()
    limit = connection.max_payload - HEADER_ROOM
    with pytest.raises(InvalidMessage, match=f"{limit + 1} bytes is over the broker's limit"):
        await queue.publish(Queue.PREFILL, model, bytes(limit + 1))
    await queue.publish(Queue.PREFILL, model, bytes(limit), message_id=os.urandom(8).hex(), ttl_s=60)
    (delivery,) = await queue.pull(Queue.PREFILL, model, limit=1, wait_s=20)
    assert len(delivery.data) == limit
    await delivery.reject("too_large", "é" * 10_000)
    stored = await connection.request(
        f"$JS.API.STREAM.MSG.GET.{names.DEAD_STREAM}",
        json.dumps({"last_by_subj": names.dead_subject("prefill", model)}).encode(),
        timeout_s=20,
    )
    dead = json.loads(stored.data)["message"]
    detail = re.search(rf"{names.HEADER_DEAD_DETAIL}: (.*)\r\n", base64.b64decode(dead["hdrs"]).decode())
    assert detail is not None
    assert len(detail[1].encode()) == DETAIL_BYTES
    assert len(base64.b64decode(dead["data"])) == limit
    await connection.close()


async def test_a_plain_message_may_be_as_long_as_the_broker_allows(nats: Server) -> None:
    connection = await connect(NatsSettings(url=nats.url), "limits")
    heard = asyncio.Event()
    subject = connection.new_inbox()
    listening = await connection.subscribe(subject, lambda message: heard.set())
    await connection.publish(subject, bytes(connection.max_payload))
    await asyncio.wait_for(heard.wait(), 20)
    with pytest.raises(InvalidMessage, match="over the broker's limit"):
        await connection.publish(subject, bytes(connection.max_payload + 1))
    assert connection.connected
    await listening.close()
    await connection.close()


async def test_a_frame_over_the_limit_is_cut_and_one_that_cannot_be_cut_is_refused(nats: Server) -> None:
    connection = await connect(NatsSettings(url=nats.url), "limits")
    bus, got, subject = NatsBus(connection), [], connection.new_inbox()  # type: ignore[var-annotated]
    listening = await bus.receive(subject, got.append)
    huge = "x" * (connection.max_payload // 2)
    await bus.send(subject, TokenFrame("w", (TokenEntry("r", 0, (1, 2, 3), (huge, huge, huge), end=End("done")),)))
    async with asyncio.timeout(20):
        while not got or not got[-1].entries[-1].end:
            await connection.settled()
    assert [entry.seq for frame in got for entry in frame.entries if entry.tokens] == [0, 1, 2]
    with pytest.raises(InvalidMessage, match="cannot be split"):
        await bus.send(subject, TokenFrame("w", (TokenEntry("r", 3, (1,), (huge * 2,)),)))
    await listening.close()
    await connection.close()


# --- HTTP -------------------------------------------------------------------------------------------------------------


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}


def said(**fields: Any) -> dict[str, Any]:
    return asked(messages=[{"role": "user", "content": "x", **fields}])


BODY_LIMITS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "messages": (messages.MAX_CHAT_MESSAGES, lambda n: asked(messages=[{"role": "user", "content": "x"}] * n)),
    "content": (openai.MAX_PARTS, lambda n: said(content=[{"type": "text", "text": "x"}] * n)),
    "stop": (messages.MAX_STOPS, lambda n: asked(stop=["x"] * n)),
    "stop_token_ids": (messages.MAX_STOP_TOKENS, lambda n: asked(stop_token_ids=[1] * n)),
    "top_logprobs": (20, lambda n: asked(logprobs=True, top_logprobs=n)),
    "model": (256, lambda n: asked(model="x" * n)),
    "user": (256, lambda n: asked(user="x" * n)),
    "role": (64, lambda n: said(role="x" * n)),
    "name": (256, lambda n: said(name="x" * n)),
}


@pytest.mark.parametrize("field", BODY_LIMITS)
def test_a_request_may_use_each_limit_and_not_exceed_it(field: str) -> None:
    limit, build = BODY_LIMITS[field]
    openai.parse(json.dumps(build(limit)).encode(), openai.ChatRequest)
    with pytest.raises(InvalidRequest) as caught:
        openai.parse(json.dumps(build(limit + 1)).encode(), openai.ChatRequest)
    assert field in (caught.value.field or "")


def test_a_stop_string_may_have_its_length_and_no_more() -> None:
    openai.parse(json.dumps(asked(stop="x" * messages.MAX_STOP_CHARS)).encode(), openai.ChatRequest)
    with pytest.raises(InvalidRequest, match=f"<= {messages.MAX_STOP_CHARS}"):
        openai.parse(json.dumps(asked(stop="x" * (messages.MAX_STOP_CHARS + 1))).encode(), openai.ChatRequest)


async def test_a_body_may_have_the_configured_length_and_no_more() -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    async with rig(config=settings(bridge={"max_body_bytes": 1000})) as world, world.http() as client:
        assert (await client.post("/v1/completions", content=body.ljust(1000))).status_code == 200
        answer = await client.post("/v1/completions", content=body.ljust(1001))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def head(extra: int) -> bytes:
    """A request whose URL, names and values have ``MAX_HEAD_BYTES + extra`` bytes."""
    fixed = len("/health/live" + "host" + "x" + "connection" + "close" + "filler")
    filler = b"y" * (MAX_HEAD_BYTES + extra - fixed)
    return b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nfiller: %b\r\n\r\n" % filler


async def exchange(base_url: str, *parts: bytes) -> bytes:
    url = httpx.URL(base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    answer = asyncio.ensure_future(reader.read())
    with contextlib.suppress(OSError):  # closed by the bridge before it had all
        for part in parts:
            writer.write(part)
            await writer.drain()
    try:
        return await asyncio.wait_for(answer, 20)
    except ConnectionError:  # closed with bytes unread: the answer may be lost on its way
        return b""
    finally:
        writer.close()


async def test_a_head_may_have_its_length_and_no_more() -> None:
    async with rig() as world:
        assert (await exchange(world.base_url, head(0))).startswith(b"HTTP/1.1 200")
        answer = await exchange(world.base_url, head(1))
        assert answer.startswith(b"HTTP/1.1 431")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "headers_too_large"


ENDLESS = {
    "URL": b"GET /",
    "header name": b"GET / HTTP/1.1\r\nx",
    "header value": b"GET / HTTP/1.1\r\nx: ",
    "trailer": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ",
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_never_ends_is_cut_off(what: str) -> None:
    """Without a bound on it, this one connection could fill the bridge's memory."""
    async with rig() as world:
        answer = await exchange(world.base_url, ENDLESS[what], *[b"y" * 50_000] * 40)
        assert not answer or re.match(rb"HTTP/1.1 (431|400)", answer), answer[:200]
        async with world.http() as client:
            assert (await client.get("/health/live")).status_code == 200


async def test_a_clients_own_id_is_cut_to_its_length() -> None:
    async with rig() as world, world.http() as client:
        answer = await client.get("/v1/models", headers={"x-request-id": "x" * (CLIENT_ID_LENGTH + 1)})
    assert answer.headers["x-client-request-id"] == "x" * CLIENT_ID_LENGTH


# --- UCX --------------------------------------------------------------------------------------------------------------


def want(number: int = 1, pieces: int = 1, secret: str = "s") -> wire.Want:
    return wire.Want(number, "m", "r", 1, secret, 0, 0, (1,) * pieces, 0)


def test_a_transport_message_may_fill_its_buffer_and_no_more() -> None:
    room = wire.MAX_MESSAGE - len(wire.encode(want(secret="x" * 60_000))) + 60_000
    buffer = bytearray(wire.encode(want(secret="x" * room)))
    assert len(buffer) == wire.MAX_MESSAGE
    assert wire.decode(buffer) == want(secret="x" * room)
    with pytest.raises(InvalidMessage, match=f"over the limit of {wire.MAX_MESSAGE}"):
        wire.encode(want(secret="x" * (room + 1)))
    with pytest.raises(InvalidMessage, match="claims"):
        wire.decode(buffer[:-1])


def test_a_want_may_have_its_number_of_pieces_and_no_more() -> None:
    most = want(pieces=wire.MAX_PIECES)
    assert wire.decode(bytearray(wire.encode(most))) == most
    with pytest.raises(InvalidMessage, match="does not parse"):
        wire.decode(bytearray(wire.encode(want(pieces=wire.MAX_PIECES + 1))))


async def test_a_peer_may_have_its_number_of_open_wants_and_no_more() -> None:
    class Peer:
        """What a source sees of a link; nothing is ever sent on it, since the chunk it waits for is never offered."""

        ended, cut_off = False, False

        def close_soon(self) -> None:
            self.cut_off = True

    serving, peer = source.Source(), Peer()
    plan = ChunkPlan((1, 1))
    await serving.offer(ref("r"), plan, 0, [b"x"])
    asked = wire.Want(0, ref("r").key.model, "r", 1, ref("r").secret, 1, 0, (1,), 0)
    for number in range(source.MAX_WANTS + 1):
        assert not peer.cut_off
        serving.on_message(peer, wire.Want(number, *list(_fields(asked))[1:]))  # type: ignore[arg-type]
    assert peer.cut_off
    peer.ended = True
    serving.on_end(peer)  # type: ignore[arg-type]
    await serving.release(ref("r"))


def _fields(message: wire.Want) -> list[Any]:
    return [getattr(message, name) for name in message.__struct_fields__]


# --- Stored KV --------------------------------------------------------------------------------------------------------


async def fetched(transport: KvTransport, locator: Locator, plan: ChunkPlan) -> list[bytearray]:
    buffers, into = targets(plan)
    await transport.fetch(locator, ref("limits"), plan, into, 5)
    return buffers


@pytest.mark.parametrize("extra", [-1, 1])
async def test_a_piece_in_the_tier_of_another_length_is_refused(valkey: Server, extra: int) -> None:
    plan, tier = ChunkPlan((300_000,)), make("redis", valkey.url)
    locator = await tier.offer(ref("limits"), plan, 0, [payload(1, 0, 300_000)])
    assert await fetched(tier, locator, plan) == [payload(1, 0, 300_000)]
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        (key,) = [key async for key in client.scan_iter("pdq:*:kv:limits:1:0.1")]
        piece = await client.get(key)
        await client.set(key, piece[:extra] if extra < 0 else piece + b"x")
    with pytest.raises(TransferFailed, match="bytes expected"):
        await fetched(tier, locator, plan)
    await tier.release(ref("limits"))
    await tier.close()


async def test_junk_in_a_head_in_the_tier_harms_nobody(valkey: Server) -> None:
    plan, tier = ChunkPlan((10,)), make("redis", valkey.url)
    locator = await tier.offer(ref("limits"), plan, 0, [payload(1, 0, 10)])
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        (key,) = [key async for key in client.scan_iter("pdq:*:kv:limits:1:head")]
        await client.hset(key, "junk", b"\xff")  # type: ignore[misc]
        assert await fetched(tier, locator, plan) == [payload(1, 0, 10)]
        await client.hdel(key, "lengths")  # type: ignore[misc]
    with pytest.raises(HandoffUnknown, match="another plan"):
        await fetched(tier, locator, plan)
    await tier.release(ref("limits"))
    await tier.close()


@pytest.mark.parametrize("damage", ["too short", "another number of chunks"])
async def test_a_segment_that_cannot_be_the_handoffs_is_refused(tmp_path: Path, damage: str) -> None:
    plan = ChunkPlan((10_000,))
    source_side, sink = (ShmTransport(TransportSettings(shm_dir=str(tmp_path))) for _ in range(2))
    locator = await source_side.offer(ref("limits"), plan, 0, [payload(1, 0, 10_000)])
    assert await fetched(sink, locator, plan) == [payload(1, 0, 10_000)]
    path = tmp_path / locator.address["segment"]
    if damage == "too short":
        os.truncate(path, 4096 + 9_999)
    else:
        with path.open("r+b") as segment:
            segment.seek(HEAD.size - 4)
            segment.write((2).to_bytes(4, "little"))
    with pytest.raises(HandoffUnknown):
        await fetched(sink, locator, plan)
    await sink.close()
    os.truncate(path, 4096 + 10_000)
    await source_side.close()


# --- The table --------------------------------------------------------------------------------------------------------

TABLE = {
    "HTTP head": [MAX_HEAD_BYTES // 1024],
    "HTTP body": [Settings().bridge.max_body_bytes // 1024**2],
    "`x-request-id`": [CLIENT_ID_LENGTH],
    "messages of a chat": [messages.MAX_CHAT_MESSAGES, openai.MAX_PARTS],
    "stop strings": [messages.MAX_STOPS, messages.MAX_STOP_CHARS],
    "stop token ids": [messages.MAX_STOP_TOKENS],
    "any message on NATS": [MAX_MESSAGE_BYTES // 1024**2],
    "job on NATS": [HEADER_ROOM],
    "dead letter's detail": [DETAIL_BYTES],
    "UCX control message": [wire.MAX_MESSAGE // 1024],
    "UCX pieces": [wire.MAX_PIECES, source.MAX_WANTS, MAX_LINKS],
    "queued jobs": [Settings().queue.max_messages],
}


@pytest.mark.parametrize("row", TABLE)
def test_the_documented_limits_are_the_real_ones(row: str) -> None:
    (line,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {row}")]
    numbers = [int(number.replace(" ", "")) for number in re.findall(r"\d[\d ]*", line)]
    assert [number for number in numbers if number in TABLE[row]] == TABLE[row]
