"""The bridge on the wire: what it does with sockets, slow readers and broken requests."""

import asyncio
import json
import socket

import pytest

from pdq.bridge.reply import Channel
from pdq.bridge.server import listen
from pdq.core.messages import PrefillJob
from tests.unit.bridge.harness import ANSWER, MESSAGES, MODEL, Rig, Sender, rig, speak, until

STREAMED = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": True}).encode()


def address(world: Rig) -> tuple[str, int]:
    host, _, port = world.base_url.removeprefix("http://").partition(":")
    return host, int(port)


def request(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def test_a_client_that_does_not_read_holds_up_nobody_and_loses_nothing() -> None:
    frames, flood_sent = 20_000, asyncio.Event()

    async def flood(world: Rig, job: PrefillJob, sender: Sender) -> None:
        if job is not world.jobs[0]:
            await speak(world, job, sender)
            return
        for at in range(0, frames, 100):
            await sender.send(*[sender.entry(at + step, "x") for step in range(100)])
            await asyncio.sleep(0)
        await sender.send(sender.entry(frames, end=sender.done(frames)))
        flood_sent.set()

    async with rig(flood, send_buffer=16_384) as world:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, address(world))
        reader, writer = await asyncio.open_connection(sock=slow, limit=65_536)
        writer.write(request(STREAMED))
        await asyncio.wait_for(flood_sent.wait(), 30)
        other = await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
        assert other.choices[0].message.content == ANSWER
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += await asyncio.wait_for(reader.read(1 << 20), 30)
        writer.close()
    assert received.count(b'"content":"x"') == frames


async def test_accepted_connections_send_without_delay() -> None:
    with listen("127.0.0.1", 0) as listener, socket.socket() as client:
        listener.listen()
        client.connect(listener.getsockname())
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_two_requests_in_one_packet_are_answered_in_order() -> None:
    async with rig() as world:
        reader, writer = await asyncio.open_connection(*address(world))
        body = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
        writer.write(request(body) + request(body))
        received = b""
        while received.count(b'"finish_reason":"stop"') < 2:
            received += await asyncio.wait_for(reader.read(65536), 10)
        writer.close()
    assert received.count(b"HTTP/1.1 200 OK") == 2


async def test_a_request_that_is_no_http_is_refused_and_the_bridge_goes_on() -> None:
    async with rig() as world:
        reader, writer = await asyncio.open_connection(*address(world))
        writer.write(b"\x16\x03\x01 junk\r\n\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        answer = await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER


async def test_messages_queue_in_order_behind_one_that_has_to_wait() -> None:
    gate, sent = asyncio.Event(), []

    async def send(message: object) -> None:
        await gate.wait()
        sent.append(message)

    channel = Channel(send, [])  # type: ignore[arg-type]
    channel.start(200, [])
    for body in (b"a", b"b"):
        channel.write(body, more=True)
    assert sent == []
    gate.set()
    channel.write(b"c", more=False)
    await until(lambda: len(sent) == 2)
    assert sent[1] == {"type": "http.response.body", "body": b"abc", "more_body": False}


async def test_a_client_that_never_completes_its_headers_is_thrown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.bridge.protocol.HEAD_S", 0.2)
    async with rig(speak) as world:
        for beginning in (b"", b"POST /v1/chat", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
            reader, writer = await asyncio.open_connection(*address(world))
            writer.write(beginning)
            await asyncio.wait_for(reader.read(), 30)
            writer.close()


async def test_a_body_that_never_ends_gets_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.bridge.exchange.BODY_S", 0.2)
    async with rig(speak) as world:
        reader, writer = await asyncio.open_connection(*address(world))
        writer.write(request(STREAMED)[:-5])
        status = await asyncio.wait_for(reader.readline(), 30)
        assert b" 408 " in status
        writer.close()
