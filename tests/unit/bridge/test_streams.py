"""What an accepted request can rely on: it ends once, and it stops when nobody wants it or the bridge goes."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from openai import APIError, InternalServerError

from pdq.adapters.memory.bus import MemoryBus
from pdq.adapters.memory.ledger import MemoryLedger
from pdq.bridge.metrics import Metrics
from pdq.bridge.requests import InFlight
from pdq.core.handoff import State
from pdq.core.lease import RecordKey
from pdq.core.messages import End, Failure, PrefillJob, TokenEntry
from pdq.ports import NewRecord, Record
from tests.unit.bridge.harness import (
    ANSWER,
    BODY,
    CHAT,
    MESSAGES,
    MODEL,
    SHORT_SILENCE,
    Rig,
    Sender,
    events,
    rig,
    settings,
    until,
)

# --- Routes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "record_mode"), [("disaggregated", "disaggregated"), ("aggregated", "aggregated"), ("auto", "aggregated")]
)
async def test_the_mode_decides_queue_and_record(mode: str, record_mode: str) -> None:
    async with rig(config=settings(handoff={"mode": mode})) as world, world.http() as client:
        answer = await client.post(CHAT, json=BODY)
    record = await world.record(answer.headers["x-request-id"])
    assert record.mode == record_mode
    assert record.prompt_tokens == len(world.jobs[0].prompt_token_ids or ())
    assert record.max_new_tokens == world.jobs[0].sampling.max_tokens
    assert record.state is State.DONE


async def test_long_prompts_are_split_over_the_pools_in_auto_mode() -> None:
    async with rig(config=settings(handoff={"mode": "auto"})) as world, world.http() as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 100})
    assert (await world.record(answer.headers["x-request-id"])).mode == "disaggregated"


# --- Cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_client_that_leaves_cancels_its_request_everywhere(stream: bool, tokens: int) -> None:
    async def stall(_: Rig, __: PrefillJob, sender: Sender) -> None:
        if tokens:
            await sender.send(sender.entry(0, "abc"))

    async with rig(stall) as world:
        async with world.http() as client:
            asking = asyncio.create_task(client.post(CHAT, json={**BODY, "stream": stream}))
            await until(lambda: bool(world.jobs))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: bool(world.cancelled()))
        request_id = world.jobs[0].request_id
        assert request_id is not None
        record = await world.record(request_id)
        assert record.state is State.CANCELLED
        assert world.cancelled() == [request_id]
        answer = await world.bus.ask_output(world.jobs[0].reply_to, request_id, 1)
        assert answer is not None
        assert not answer.wanted


async def test_a_client_that_leaves_after_the_end_cancels_nothing() -> None:
    async with rig() as world:
        async with world.http() as client:
            await client.post(CHAT, json=BODY)
        async with world.http() as client:
            assert "pdq_bridge_in_flight 0.0" in (await client.get("/metrics")).text
    assert world.cancelled() == []


async def test_frames_of_a_request_that_nobody_wants_are_dropped() -> None:
    async def late(world: Rig, _: PrefillJob, sender: Sender) -> None:
        await until(lambda: bool(world.cancelled()))
        for entry in sender.entries(ANSWER):
            await sender.send(entry)

    async with rig(late) as world:
        async with world.http() as client:
            asking = asyncio.create_task(client.post(CHAT, json=BODY))
            await until(lambda: bool(world.jobs))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        async with world.http() as client:
            await until(lambda: bool(world.cancelled()))
            assert (await client.get("/metrics")).status_code == 200


# --- Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("failed", "engine_failed", 500),
        ("failed", "stream_lost", 502),
        ("failed", "attempts_exhausted", 502),
        ("failed", "context_length_exceeded", 400),
        ("failed", "no_such_code", 500),
        ("expired", "deadline_exceeded", 504),
        ("cancelled", "cancelled", 503),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_has_its_own_status(
    state: str, code: str, status: int, stream: bool
) -> None:
    async def fail(_: Rig, __: PrefillJob, sender: Sender) -> None:
        end = End(state, error=Failure(code, "it did not work"))  # type: ignore[arg-type]
        await sender.send(sender.entry(0, end=end))

    async with rig(fail) as world, world.http() as client:
        answer = await client.post(CHAT, json={**BODY, "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == "it did not work"


async def break_off(_: Rig, __: PrefillJob, sender: Sender) -> None:
    await sender.send(sender.entry(0, "abc"))
    end = End("failed", error=Failure("stream_lost", "its worker died"))
    await sender.send(sender.entry(3, end=end))


async def test_a_failure_after_the_first_token_is_an_error_event_that_clients_raise() -> None:
    async with rig(break_off) as world:
        stream = await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = ""
        with pytest.raises(APIError, match="its worker died"):
            async for chunk in stream:
                seen += chunk.choices[0].delta.content or ""
        assert seen == "abc"
        async with world.http() as client:
            told = events((await client.post(CHAT, json={**BODY, "stream": True})).text)
    assert told[-1] == "[DONE]"
    assert "error" in told[-2]
    assert sum("error" in event for event in told) == 1


async def test_a_failure_of_a_request_that_is_not_streamed_has_a_status_also_after_tokens() -> None:
    async with rig(break_off) as world:
        with pytest.raises(InternalServerError) as caught:
            await world.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.status_code == 502


async def test_held_back_text_at_the_end_belongs_to_the_answer() -> None:
    async def tail(_: Rig, __: PrefillJob, sender: Sender) -> None:
        await sender.send(sender.entry(0, "abc"))
        await sender.send(sender.entry(3, end=sender.done(3, finish_reason="length", tail="def")))

    async with rig(tail) as world, world.http() as client:
        whole = (await client.post(CHAT, json=BODY)).json()
        told = events((await client.post(CHAT, json={**BODY, "stream": True})).text)
    assert whole["choices"][0]["message"]["content"] == "abcdef"
    chunks = [event["choices"][0] for event in told if isinstance(event, dict)]  # type: ignore[index]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "abcdef"
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "length"]


async def test_an_answer_of_one_frame_is_one_whole_stream() -> None:
    async def at_once(_: Rig, __: PrefillJob, sender: Sender) -> None:
        await sender.send(sender.entry(0, "abc", end=sender.done(3)))

    async with rig(at_once) as world, world.http() as client:
        told = events((await client.post(CHAT, json={**BODY, "stream": True})).text)
    assert len(told) == 4
    assert told[-1] == "[DONE]"


# --- Shutdown ---------------------------------------------------------------------------------------------------------


async def test_draining_lets_streams_finish_and_takes_no_new_connection() -> None:
    async def wait_for_drain(world: Rig, job: PrefillJob, sender: Sender) -> None:
        await sender.send(sender.entry(0, "a"))
        await world.lifecycle.draining.wait()
        await sender.send(sender.entry(1, "b", end=sender.done(2)))

    async with rig(wait_for_drain) as world, world.http() as client:
        asking = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: bool(world.jobs))
        world.lifecycle.drain()
        assert (await asking).json()["choices"][0]["message"]["content"] == "ab"
        assert world.serving is not None
        await world.serving
        with pytest.raises(httpx.ConnectError):
            await client.get("/health/live")
    assert world.cancelled() == []


async def test_the_last_stage_ends_streams_with_an_error_and_cancels_them() -> None:
    async def stall(_: Rig, __: PrefillJob, sender: Sender) -> None:
        await sender.send(sender.entry(0, "abc"))

    async with rig(stall) as world, world.http() as client:
        asking = asyncio.create_task(client.post(CHAT, json={**BODY, "stream": True}))
        await until(lambda: bool(world.jobs))
        world.lifecycle.stop()
        told = events((await asking).text)
        assert world.serving is not None
        await world.serving
    assert told[-1] == "[DONE]"
    assert "shutting down" in str(told[-2])
    request_id = world.jobs[0].request_id
    assert request_id is not None
    assert (await world.record(request_id)).state is State.CANCELLED
    assert world.cancelled() == [request_id]


class SlowLedger(MemoryLedger):
    def __init__(self) -> None:
        super().__init__(SHORT_SILENCE.lease)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def enqueue(self, new: NewRecord) -> tuple[Record, bool]:
        self.asked.set()
        await self.gate.wait()
        return await super().enqueue(new)


async def test_a_request_that_is_aborted_while_it_is_accepted_ends_cancelled() -> None:
    ledger = SlowLedger()
    async with rig(ledger=ledger) as world, world.http() as client:
        asking = asyncio.create_task(client.post(CHAT, json=BODY))
        await ledger.asked.wait()
        world.lifecycle.stop()
        answer = await asking
        assert answer.status_code == 503
        ledger.gate.set()
        assert world.serving is not None
        await world.serving
    assert (await world.record(answer.headers["x-request-id"])).state is State.CANCELLED


async def test_a_request_that_is_still_being_recorded_is_not_taken_for_a_lost_one() -> None:
    class Nowhere:
        def deliver(self, entries: Sequence[TokenEntry]) -> None:
            raise AssertionError(f"{entries} delivered")

    now = 0.0
    in_flight = InFlight(
        owner="test",
        ledger=MemoryLedger(SHORT_SILENCE.lease),
        bus=MemoryBus(),
        metrics=Metrics([]),
        silence_s=5,
        clock=lambda: now,
    )
    stream = in_flight.open(RecordKey(MODEL, "1"), "disaggregated", Nowhere(), now)
    now = 100.0
    await in_flight.sweep()
    assert len(in_flight) == 1
    assert not stream.ended


# --- Metrics ----------------------------------------------------------------------------------------------------------


async def test_metrics_count_requests_tokens_and_refusals() -> None:
    async with rig() as world, world.http() as client:
        await client.post(CHAT, json=BODY)
        await client.post(CHAT, json={**BODY, "model": "none"})
        text = (await client.get("/metrics")).text
    tokens = float(len(ANSWER.encode()) + 1)
    assert f'pdq_bridge_requests_total{{mode="disaggregated",model="{MODEL}",outcome="done"}} 1.0' in text
    assert f'pdq_bridge_output_tokens_total{{model="{MODEL}"}} {tokens}' in text
    assert 'pdq_bridge_refusals_total{code="model_not_found"} 1.0' in text
    assert f'pdq_bridge_time_to_first_token_seconds_count{{model="{MODEL}"}} 1.0' in text
    assert f"pdq_bridge_frames_total {tokens}" in text
    assert "pdq_bridge_in_flight 0.0" in text


async def test_metrics_do_not_say_when_a_series_was_created() -> None:
    async with rig() as world, world.http() as client:
        await client.post(CHAT, json=BODY)
        assert "_created" not in (await client.get("/metrics")).text
