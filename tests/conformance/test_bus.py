"""The ``TokenBus`` port: frames and control messages, over memory and real NATS."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdq.adapters.processes import Server, nats_server
from pdq.core import names
from pdq.core.errors import InvalidMessage, Unavailable
from pdq.core.handoff import Side
from pdq.core.messages import (
    AccountAnswer,
    Cancel,
    Control,
    Drain,
    End,
    Holding,
    JobInHand,
    Logprob,
    OfferedHandoff,
    OutputAnswer,
    OutputQuestion,
    Resend,
    StatusAnswer,
    StatusQuestion,
    TokenEntry,
    TokenFrame,
    TokenLogprobs,
    encode,
)
from pdq.core.settings import QueueSettings
from pdq.core.stream import Assembler
from tests.conformance.brokers import SMALL_PAYLOAD, MemoryPlace, NatsPlace, Place, eventually


@pytest.fixture(scope="module")
def small_nats(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server with the limit on messages that NATS has by default."""
    server = nats_server(tmp_path_factory.mktemp("nats"))
    config = server.directory / "nats.conf"
    config.write_text(config.read_text().replace("max_payload: 8MB", f"max_payload: {SMALL_PAYLOAD}"))
    return server


@pytest.fixture(params=["memory", "nats"])
async def place(request: pytest.FixtureRequest, small_nats: Server) -> AsyncIterator[Place]:
    if request.param == "memory":
        yield MemoryPlace(QueueSettings())
        return
    await small_nats.start()
    place = NatsPlace(small_nats.url, QueueSettings())
    yield place
    await place.close()
    await small_nats.stop()


class Inbox:
    """Collects what a handler is called with."""

    def __init__(self) -> None:
        self.got: list[TokenFrame] = []

    async def has(self, count: int) -> list[TokenFrame]:
        async def enough() -> bool:
            return len(self.got) >= count

        await eventually(enough)
        return self.got


def frame(seq: int, count: int = 1, request_id: str = "r", end: End | None = None) -> TokenFrame:
    tokens = tuple(range(seq, seq + count))
    return TokenFrame("w", (TokenEntry(request_id, seq, tokens, tuple(f"t{n} ü" for n in tokens), end=end),))


async def test_frames_arrive_as_sent_and_in_order(place: Place) -> None:
    sender, receiver = await place.bus(), await place.bus()
    inbox = Inbox()
    await receiver.receive("pdq.tokens.a", inbox.got.append)
    frames = [frame(seq) for seq in range(500)]
    for one in frames:
        await sender.send("pdq.tokens.a", one)
    assert await inbox.has(500) == frames


async def test_frames_go_to_their_subject_only_and_no_longer_after_closing(place: Place) -> None:
    bus = await place.bus()
    mine, other = Inbox(), Inbox()
    subscription = await bus.receive("pdq.tokens.mine", mine.got.append)
    await bus.receive("pdq.tokens.other", other.got.append)
    await bus.send("pdq.tokens.mine", frame(0))
    await mine.has(1)
    await subscription.close()
    await bus.send("pdq.tokens.mine", frame(1))
    await bus.send("pdq.tokens.other", frame(2))
    await other.has(1)
    assert (mine.got, other.got) == ([frame(0)], [frame(2)])
    await subscription.close()


async def test_a_frame_over_the_message_limit_is_split_in_order(place: Place) -> None:
    sender, receiver = await place.bus(), await place.bus()
    inbox = Inbox()
    await receiver.receive("pdq.tokens.a", inbox.got.append)
    end = End(state="done", finish_reason="length")
    large = TokenEntry("large", 3, tuple(range(200_000)), ("piece",) * 200_000, end=end)
    small = [TokenEntry(str(n), n, (n,), ("x" * 1000,)) for n in range(1500)]
    await sender.send("pdq.tokens.a", TokenFrame("w", (*small[:700], large, *small[700:])))
    await sender.send("pdq.tokens.a", frame(0))

    async def all_there() -> bool:
        return bool(inbox.got) and inbox.got[-1] == frame(0)

    await eventually(all_there)
    entries = [entry for one in inbox.got[:-1] for entry in one.entries]
    assert len(inbox.got) > 3
    assert [entry for entry in entries if entry.request_id != "large"] == small
    assembler = Assembler(tokens=(0,) * 3)
    delivered = [part for entry in entries if entry.request_id == "large" for part in assembler.accept(entry)]
    assert tuple(assembler.tokens[3:]) == large.tokens
    assert delivered[-1].end == end


async def test_what_cannot_be_split_below_the_limit_is_refused(place: Place) -> None:
    bus = await place.bus()
    top = tuple(Logprob(n, "x" * 100_000, -1.0) for n in range(12))
    entry = TokenEntry("r", 0, (1,), ("a",), logprobs=(TokenLogprobs(1, "a", -1.0, top),))
    with pytest.raises(InvalidMessage, match="split"):
        await bus.send("pdq.tokens.a", TokenFrame("w", (entry,)))


async def test_junk_is_counted_and_dropped_and_the_rest_still_comes(place: Place) -> None:
    bus = await place.bus()
    inbox = Inbox()
    heard: list[Control] = []
    await bus.receive("pdq.tokens.a", inbox.got.append)
    await bus.on_control("pdq.control.worker.w", heard.append)
    junk = [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"worker": 1}',
        b'{"type": "cancel"}',
        b"null",
        b'{"type": "format c:"}',
    ]
    for data in junk:
        await place.send_raw("pdq.tokens.a", data)
        await place.send_raw("pdq.control.worker.w", data)

    async def counted() -> bool:
        return bus.junk == 2 * len(junk)

    await eventually(counted)
    await bus.send("pdq.tokens.a", frame(0))
    assert await inbox.has(1) == [frame(0)]
    assert not heard


async def test_a_handler_that_fails_does_not_end_the_subscription(place: Place) -> None:
    bus = await place.bus()
    inbox = Inbox()

    def fail_once(one: TokenFrame) -> None:
        inbox.got.append(one)
        if len(inbox.got) == 1:
            raise RuntimeError("a mistake in the receiver")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    await bus.receive("pdq.tokens.a", fail_once)
    await bus.send("pdq.tokens.a", frame(0))
    await bus.send("pdq.tokens.a", frame(1))
    assert await inbox.has(2) == [frame(0), frame(1)]


async def test_the_owner_of_a_subject_is_asked_which_tokens_it_has(place: Place) -> None:
    owner, worker = await place.bus(), await place.bus()
    answers = {"known": OutputAnswer("known", True, (1, 2, 3))}
    await owner.receive(
        "pdq.tokens.a", Inbox().got.append, lambda request_id: answers.get(request_id, OutputAnswer(request_id, False))
    )
    assert await worker.ask_output("pdq.tokens.a", "known", 5) == OutputAnswer("known", True, (1, 2, 3))
    assert await worker.ask_output("pdq.tokens.a", "unknown", 5) == OutputAnswer("unknown", False)


async def test_a_question_that_nobody_answers_gets_none(place: Place) -> None:
    owner, worker = await place.bus(), await place.bus()
    assert await worker.ask_output("pdq.tokens.nobody", "r", 0.2) is None
    await owner.receive("pdq.tokens.deaf", Inbox().got.append)
    assert await worker.ask_output("pdq.tokens.deaf", "r", 0.2) is None


async def test_a_worker_is_asked_what_it_holds(place: Place) -> None:
    worker, asker = await place.bus(), await place.bus()
    holding = Holding("r", Side.SINK, 3, "decoding", 4, 4096, 12)
    offers = {"ucx": (OfferedHandoff("q", 1),), "shm": ()}
    account = AccountAnswer("w", "org/model.v1", (holding,), 8, 3, 1, offers, (JobInHand("decode", 7, 12),))
    answering = await worker.answer_account("w", lambda: account)
    assert await asker.ask_account("w", 5) == account
    assert await asker.ask_account("other", 0.2) is None
    await answering.close()
    assert await asker.ask_account("w", 0.2) is None


async def test_one_of_those_who_can_say_it_is_asked_what_became_of_a_job(place: Place) -> None:
    first, second, producer = await place.bus(), await place.bus(), await place.bus()
    asked: list[StatusQuestion] = []

    async def answer(question: StatusQuestion) -> StatusAnswer:
        asked.append(question)
        if question.sequence == 13:
            raise Unavailable("the ledger is away")
        return StatusAnswer("done", "r")

    answering = [await bus.answer_status(answer) for bus in (first, second)]
    question = StatusQuestion("org/model.v1", "PDQ_PREFILL", 7, "pdq.tokens.a", 3)
    assert await producer.ask_status(question, 5) == StatusAnswer("done", "r")
    assert asked == [question]
    assert await producer.ask_status(replace(question, sequence=13), 0.2) is None
    assert await producer.ask_status(question, 5) == StatusAnswer("done", "r")
    for one in answering:
        await one.close()
    assert await producer.ask_status(question, 0.2) is None


async def test_control_messages_of_each_kind_reach_every_listener(place: Place) -> None:
    sender, first, second = await place.bus(), await place.bus(), await place.bus()
    heard: tuple[list[Control], list[Control]] = ([], [])
    await first.on_control(names.CANCEL_SUBJECT, heard[0].append)
    await second.on_control(names.CANCEL_SUBJECT, heard[1].append)
    sent: list[Control] = [Cancel(("a", "b")), Resend("r", 5, "pdq.tokens.a"), Drain(deadline_ms=1)]
    for message in sent:
        await sender.control(names.CANCEL_SUBJECT, message)

    async def all_heard() -> bool:
        return len(heard[0]) + len(heard[1]) == 2 * len(sent)

    await eventually(all_heard)
    assert heard == (sent, sent)


# --- A real broker only -----------------------------------------------------------------------------------------------


async def test_an_owner_that_comes_back_within_the_time_is_still_heard(nats: Server) -> None:
    place = NatsPlace(nats.url, QueueSettings())
    owner, worker = await place.bus(), await place.bus()
    asked = asyncio.create_task(worker.ask_output("pdq.tokens.late", "r", 10))
    assert await worker.ask_output("pdq.tokens.nobody", "r", 0.1) is None
    await owner.receive("pdq.tokens.late", Inbox().got.append, lambda request_id: OutputAnswer(request_id, True))
    assert await asked == OutputAnswer("r", True)
    await place.close()


async def test_frames_sent_while_the_broker_restarts_arrive_when_it_is_back(tmp_path: Path) -> None:
    server = await nats_server(tmp_path).start()
    place = NatsPlace(server.url, QueueSettings())
    sender, receiver = await place.bus(), await place.bus()
    inbox = Inbox()
    await receiver.receive("pdq.tokens.a", inbox.got.append, lambda request_id: OutputAnswer(request_id, True))
    await sender.send("pdq.tokens.a", frame(0))
    await inbox.has(1)
    await server.stop()

    async def unavailable() -> bool:
        try:
            await sender.ask_output("pdq.tokens.a", "r", 0.05)
        except Unavailable:
            return True
        return False

    await eventually(unavailable)
    await sender.send("pdq.tokens.a", frame(1))
    await server.start()

    async def answered() -> bool:
        try:
            return await sender.ask_output("pdq.tokens.a", "r", 0.2) is not None
        except Unavailable:
            return False

    await eventually(answered)
    # Which of the two connections was back first decides whether frame 1 found its receiver; nothing else is lost.
    await sender.send("pdq.tokens.a", frame(2))

    async def last_came() -> bool:
        return inbox.got[-1] == frame(2)

    await eventually(last_came)
    assert inbox.got in ([frame(0), frame(1), frame(2)], [frame(0), frame(2)])
    await place.close()
    await server.stop()


async def test_a_question_on_the_wire_is_json_that_anyone_can_answer(nats: Server) -> None:
    place = NatsPlace(nats.url, QueueSettings())
    connection, bus = await place.connection(), await place.bus()
    seen: list[bytes] = []
    await connection.subscribe("my.inbox", lambda message: seen.append(message.data))
    await bus.ask_output("my.inbox", "r", 0.1)
    assert seen == [encode(OutputQuestion("r"))]
    await place.close()
