"""What an accepted request can rely on when frames, or those who send them, are lost: it is whole, or it ends."""

import asyncio
from collections.abc import Sequence

import pytest

from pdq.adapters.memory.ledger import MemoryLedger
from pdq.core import names
from pdq.core.handoff import Event
from pdq.core.lease import RecordKey
from pdq.core.messages import Control, PrefillJob, Resend
from pdq.ports import Changes, Record
from tests.unit.bridge.harness import (
    ANSWER,
    BODY,
    CHAT,
    SHORT_SILENCE,
    WORKER,
    Rig,
    Sender,
    events,
    rig,
    speak,
    until,
)

# --- Loss -------------------------------------------------------------------------------------------------------------


async def test_a_gap_is_asked_for_again_and_the_text_is_whole() -> None:
    async def lossy(world: Rig, _: PrefillJob, sender: Sender) -> None:
        await sender.send(sender.entry(0, "ab"))
        await sender.send(sender.entry(4, "ef", end=sender.done(6)))
        await until(lambda: bool(world.resends()))
        assert world.resends()[0] == Resend(sender.key.request_id, 2, sender.job.reply_to)
        await sender.send(sender.entry(2, "cd"))

    async with rig(lossy) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == "abcdef"


async def test_a_gap_that_no_answer_fills_does_not_keep_a_stream_open_for_ever() -> None:
    answers: set[asyncio.Task[None]] = set()

    async def forgetful(world: Rig, _: PrefillJob, sender: Sender) -> None:
        def answer(message: Control) -> None:
            if isinstance(message, Resend):
                answers.add(asyncio.create_task(sender.send(sender.entry(1, "b", end=sender.done(2)))))

        await world.bus.on_control(names.worker_subject(WORKER), answer)
        await sender.begin()
        await sender.send(sender.entry(1, "b"))
        await sender.finish("stop", 2)

    async with rig(forgetful, config=SHORT_SILENCE) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answers
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "stream_lost"


async def test_repeated_and_reordered_entries_are_delivered_once_in_order() -> None:
    async def disorderly(_: Rig, __: PrefillJob, sender: Sender) -> None:
        for seq, text in ((0, "ab"), (0, "ab"), (3, "d"), (1, "bcd"), (2, "cd")):
            await sender.send(sender.entry(seq, text))
        await sender.send(sender.entry(4, end=sender.done(4)))
        await sender.send(sender.entry(4, end=sender.done(4)))

    async with rig(disorderly) as world, world.http() as client:
        told = await client.post(CHAT, json={**BODY, "stream": True})
    chunks = [event for event in events(told.text) if isinstance(event, dict)]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)  # type: ignore[index]
    assert text == "abcd"


async def test_a_resumed_worker_learns_which_tokens_the_client_has() -> None:
    async def resume(world: Rig, job: PrefillJob, sender: Sender) -> None:
        await sender.send(sender.entry(0, "abc"))
        answer = await world.bus.ask_output(job.reply_to, sender.key.request_id, 5)
        assert answer is not None
        assert answer.wanted
        assert answer.tokens == tuple(b"abc")
        await sender.send(sender.entry(len(answer.tokens), "def", end=sender.done(6)))

    async with rig(resume) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == "abcdef"


# --- Silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "code", "status"), [(Event.FAIL, "attempts_exhausted", 502), (Event.CANCEL, "cancelled", 503)]
)
async def test_a_silent_stream_ends_as_its_record_says(event: Event, code: str, status: int) -> None:
    async def end_in_silence(world: Rig, _: PrefillJob, sender: Sender) -> None:
        await world.ledger.apply(sender.key, event, changes=Changes(ended_code=code, ended_message="ended elsewhere"))

    async with rig(end_in_silence, config=SHORT_SILENCE) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == "ended elsewhere"


class CountingLedger(MemoryLedger):
    comparisons = 0

    async def read_many(self, keys: Sequence[RecordKey]) -> Sequence[Record | None]:
        self.comparisons += 1
        return await super().read_many(keys)


async def test_a_silent_stream_whose_request_runs_is_left_alone() -> None:
    ledger = CountingLedger(SHORT_SILENCE.lease)

    async def slow(world: Rig, job: PrefillJob, sender: Sender) -> None:
        await until(lambda: ledger.comparisons > 2)
        await speak(world, job, sender)

    async with rig(slow, config=SHORT_SILENCE, ledger=ledger) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("heard", ["abc", ""])
async def test_lost_last_frames_of_a_request_that_is_done_are_asked_for_first(heard: str) -> None:
    async def lose_the_end(world: Rig, _: PrefillJob, sender: Sender) -> None:
        await sender.begin()
        await sender.send(sender.entry(0, heard))
        await sender.finish("stop", 6)
        await until(lambda: bool(world.resends()))
        seq = world.resends()[0].seq
        assert seq == len(heard)
        await sender.send(sender.entry(seq, "abcdef"[seq:], end=sender.done(6)))

    async with rig(lose_the_end, config=SHORT_SILENCE) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == "abcdef"


@pytest.mark.parametrize(("emitted", "status"), [(3, 200), (6, 502)])
async def test_an_end_that_nobody_can_send_again_comes_from_the_record(emitted: int, status: int) -> None:
    async def die(_: Rig, __: PrefillJob, sender: Sender) -> None:
        await sender.begin()
        await sender.send(sender.entry(0, "abc"))
        await sender.finish("length", emitted)

    async with rig(die, config=SHORT_SILENCE) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 3
    else:
        assert answer.json()["error"]["code"] == "stream_lost"


async def test_a_stream_whose_record_has_vanished_ends() -> None:
    async def vanish(world: Rig, _: PrefillJob, sender: Sender) -> None:
        world.ledger._records.clear()

    async with rig(vanish, config=SHORT_SILENCE) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 502
