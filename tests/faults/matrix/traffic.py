"""Requests and everything that came of them: over HTTP as a client sees it, and over NATS frame by frame."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal

import httpx

from pdq.connect import Connected
from pdq.core import errors, names
from pdq.core.messages import (
    End,
    Failure,
    OutputAnswer,
    PrefillJob,
    Sampling,
    StatusQuestion,
    TokenEntry,
    TokenFrame,
    encode,
)
from pdq.core.stream import Assembler
from pdq.ports import Queue
from tests.faults.matrix.plant import MODEL

SILENCE_S: Final = 1.0
GIVE_UP_S: Final = 30.0
_numbers = count(1)


@dataclass(frozen=True)
class Asked:
    prompt: str
    max_tokens: int


VOLLEY: Final = (Asked("first " * 55, 24), Asked("second " * 30, 40), Asked("third " * 15, 2))
"""What a cell's HTTP clients ask for at the same time."""
RAW: Final = Asked("producer " * 40, 30)
"""And what a producer publishes meanwhile."""

How = Literal["done", "failed", "cancelled", "expired", "refused", "broken", "hung"]


@dataclass
class Outcome:
    """``how``: a terminal event; or ``refused``, never accepted; ``broken``, the bridge is gone; ``hung``, no end came."""

    asked: Asked
    how: How
    text: str = ""
    reason: str = ""
    detail: str = ""
    request_id: str = ""
    frames: list[TokenEntry] = field(default_factory=list)


async def over_http(url: str, asked: Asked, timeout_ms: int) -> Outcome:
    """One streamed completion."""
    body = {"model": MODEL, "prompt": asked.prompt, "max_tokens": asked.max_tokens, "temperature": 0, "stream": True}
    outcome = Outcome(asked, "broken")
    try:
        async with (
            httpx.AsyncClient(timeout=GIVE_UP_S) as client,
            client.stream(
                "POST", f"{url}/v1/completions", json=body, headers={names.HEADER_TIMEOUT_MS: str(timeout_ms)}
            ) as answer,
        ):
            outcome.request_id = answer.headers.get(names.HEADER_REQUEST_ID, "")
            if answer.status_code != 200:
                outcome.detail = (await answer.aread()).decode()
                outcome.how = "refused" if answer.status_code == 503 else "failed"
                return outcome
            async for line in answer.aiter_lines():
                if line == "data: [DONE]" and outcome.how == "broken":
                    outcome.how = "done"
                elif line.startswith("data: "):
                    _read_event(outcome, json.loads(line[6:]))
    except httpx.TimeoutException:
        outcome.how = "hung"
    except httpx.HTTPError as error:
        outcome.detail = repr(error)
    return outcome


def _read_event(outcome: Outcome, event: dict[str, object]) -> None:
    if "error" in event:
        outcome.how, outcome.detail = "failed", str(event["error"])
    for choice in event.get("choices", ()):  # type: ignore[attr-defined]
        outcome.text += choice["text"]
        outcome.reason = choice.get("finish_reason") or outcome.reason


class Producer:
    """A program of its own that publishes one request and keeps all frames. It does what a producer shall do, and has
    nothing but NATS: it tells a worker that takes over what it has, and asks what became of its job when it misses
    something or hears nothing."""

    def __init__(self, system: Connected, asked: Asked) -> None:
        self._system = system
        self._asked = asked
        self._reply_to = names.reply_subject(f"producer-{next(_numbers)}")
        self._output = Assembler()
        self._pieces: list[str] = []
        self._end: End | None = None
        self._spoken = asyncio.Event()
        self._sequence = 0
        self.outcome = Outcome(asked, "hung")

    async def run(self) -> Outcome:
        job = PrefillJob(
            model=MODEL,
            reply_to=self._reply_to,
            prompt=self._asked.prompt,
            sampling=Sampling(temperature=0, max_tokens=self._asked.max_tokens),
            timeout_ms=45_000,
        )
        outcome = self.outcome
        subscription = await self._system.bus.receive(self._reply_to, self._on_frame, self._answer)
        try:
            self._sequence = await self._system.queue.publish(
                Queue.PREFILL, MODEL, encode(job), message_id=self._reply_to, ttl_s=45
            )
            async with asyncio.timeout(GIVE_UP_S):
                while self._end is None:
                    await self._listen()
        except errors.Unavailable as error:
            outcome.how, outcome.detail = "refused", str(error)
        except TimeoutError:
            outcome.detail = f"no end after {self._output.tokens}"
        finally:
            await subscription.close()
        if self._end is not None:
            outcome.how = self._end.state
            outcome.reason = self._end.finish_reason or ""
            outcome.detail = str(self._end.error or "")
            outcome.text = "".join(self._pieces) + self._end.tail
        return outcome

    def _answer(self, request_id: str) -> OutputAnswer:
        return OutputAnswer(request_id, wanted=True, tokens=tuple(self._output.tokens))

    def _on_frame(self, frame: TokenFrame) -> None:
        for entry in frame.entries:
            self.outcome.frames.append(entry)
            self.outcome.request_id = entry.request_id
            self._take(self._output.accept(entry))
        self._spoken.set()

    def _take(self, entries: Sequence[TokenEntry]) -> None:
        for entry in entries:
            self._pieces += entry.pieces
            self._end = entry.end or self._end

    async def _listen(self) -> None:
        self._spoken.clear()
        with contextlib.suppress(errors.Unavailable):
            try:
                await asyncio.wait_for(self._spoken.wait(), SILENCE_S)
            except TimeoutError:
                await self._ask()
            else:
                if self._output.ask_again(asyncio.get_running_loop().time()) is not None:
                    await self._ask()

    async def _ask(self) -> None:
        stream = Queue.PREFILL.stream
        question = StatusQuestion(MODEL, stream, self._sequence, self._reply_to, self._output.next_seq)
        answer = await self._system.bus.ask_status(question, SILENCE_S)
        if answer is not None and answer.state == "unknown" and self._end is None:
            self._end = End("failed", error=Failure("unknown", "nobody knows of the job any more"))


class Tap:
    """Every frame that goes to the bridge, by request."""

    def __init__(self) -> None:
        self.frames: dict[str, list[TokenEntry]] = {}

    def on_frame(self, frame: TokenFrame) -> None:
        for entry in frame.entries:
            self.frames.setdefault(entry.request_id, []).append(entry)


def faults_of(frames: Sequence[TokenEntry]) -> list[str]:
    """What must never be seen on the wire of one request, however often frames are repeated."""
    found: list[str] = []
    known: dict[int, int] = {}
    ends: dict[tuple[int, str], int] = {}
    for entry in frames:
        for seq, token in enumerate(entry.tokens, entry.seq):
            if known.setdefault(seq, token) != token:
                found.append(f"token {seq} is {known[seq]} and {token}")
        if entry.end is not None:
            place = (entry.seq + len(entry.tokens), entry.end.state)
            ends[place] = ends.get(place, 0) + 1
    if len(ends) > 1:
        found.append(f"several ends: {ends}")
    for end_at, state in ends:
        # Who ends a request badly need not know how far others came with it.
        beyond = sorted(seq for seq in known if seq >= end_at)
        if state == "done" and beyond:
            found.append(f"tokens {beyond} after an end at {end_at}")
    return found
