"""``pdq publish``: one request straight onto the queue, as any producer would, its text streamed to stdout.

It needs no bridge. Ctrl-C cancels the request in the ledger and tells the workers.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Final

import msgspec
import typer

from pdq.cli.find import DEFAULT_STATE_DIR, StateDir, System, talk
from pdq.core import names
from pdq.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    JobLost,
    LedgerRefusal,
    RequestCancelled,
    Unavailable,
)
from pdq.core.handoff import Event
from pdq.core.messages import (
    Cancel,
    ChatMessage,
    End,
    OutputAnswer,
    PrefillJob,
    Sampling,
    StatusAnswer,
    StatusQuestion,
    TokenEntry,
    TokenFrame,
    decode,
    encode,
)
from pdq.core.settings import Settings
from pdq.core.stream import Assembler
from pdq.ports import Changes, Queue

ANSWER_S: Final = 1.0
GRACE_S: Final = 5.0
"""Past its timeout a request gets this long for its terminal event to arrive."""


class Request:
    """One request of this process, on a ``reply_to`` of its own."""

    def __init__(self, system: System, job: PrefillJob, silence_s: float) -> None:
        self._system = system
        self._job = job
        self._silence_s = silence_s
        self._frames: asyncio.Queue[TokenFrame] = asyncio.Queue()
        self._output = Assembler()
        self._sequence = 0
        assert job.timeout_ms is not None
        self._timeout_s = job.timeout_ms / 1000
        self._late_at = 0.0

    async def entries(self) -> AsyncGenerator[TokenEntry, None]:
        """Publish; then every token once, in order, and the end.

        Raises:
            DeadlineExceeded: the request's timeout has passed and nobody said a word about its end.
            JobLost: nobody knows of the job any more.
        """
        job = self._job
        self._late_at = asyncio.get_running_loop().time() + self._timeout_s
        subscription = await self._system.bus.receive(job.reply_to, self._frames.put_nowait, self._answer)
        try:
            self._sequence = await self._system.queue.publish(
                Queue.PREFILL, job.model, encode(job), priority=job.priority, ttl_s=self._timeout_s
            )
            while not self._output.ended:
                for entry in await self._arrivals():
                    yield entry
                if not self._output.ended:
                    self._in_time(GRACE_S)
        finally:
            await subscription.close()

    async def cancel(self) -> bool:
        """Cancel the request; False if there is nothing to cancel: it has ended, or no worker has taken it yet."""
        record = await self._system.ledger.of_job(self._job.model, names.place(Queue.PREFILL.stream, self._sequence))
        if record is None:
            return False
        changes = Changes(ended_code=RequestCancelled.code, ended_message="cancelled by its requester")
        try:
            await self._system.ledger.apply(record.key, Event.CANCEL, worker="cli", changes=changes)
        except LedgerRefusal:
            return False
        await self._system.bus.control(names.CANCEL_SUBJECT, Cancel((record.key.request_id,)))
        return True

    def _answer(self, request_id: str) -> OutputAnswer:
        return OutputAnswer(request_id, wanted=True, tokens=tuple(self._output.tokens))

    async def _arrivals(self) -> list[TokenEntry]:
        """What the next frame adds. After a silence, or before a gap, pdq is asked for what is missing."""
        try:
            frame = await asyncio.wait_for(self._frames.get(), self._silence_s)
        except TimeoutError:
            await self._ask()
            return []
        fresh = [part for entry in frame.entries for part in self._output.accept(entry)]
        if self._output.ask_again(asyncio.get_running_loop().time()) is not None:
            await self._ask()
        return fresh

    async def _ask(self) -> None:
        """What is missing is sent again, in a frame like any other. Whoever does not answer is asked again later."""
        job = self._job
        question = StatusQuestion(job.model, Queue.PREFILL.stream, self._sequence, job.reply_to, self._output.next_seq)
        answer: StatusAnswer | None = None
        with contextlib.suppress(Unavailable):
            answer = await self._system.bus.ask_status(question, ANSWER_S)
        if answer is not None and answer.state == "unknown" and self._frames.empty():
            self._in_time()
            raise JobLost("the job was turned away, or its request has ended long ago; nobody knows more of it")

    def _in_time(self, grace_s: float = 0.0) -> None:
        if asyncio.get_running_loop().time() > self._late_at + grace_s:
            raise DeadlineExceeded(f"no worker ended the request within {self._timeout_s:g} s")


async def served_model(system: System, wanted: str | None) -> str:
    """``wanted``, or the only model that is served.

    Raises:
        Unavailable, InvalidRequest: none or several are.
    """
    served = sorted({worker.model for worker in await system.registry.workers()})
    if wanted is not None:
        if wanted not in served:
            print(f"no worker serves {wanted!r} now (served: {', '.join(served) or 'none'}); waiting", file=sys.stderr)
        return wanted
    if not served:
        raise Unavailable("no worker serves any model yet; `pdq status` shows what is there")
    if len(served) > 1:
        raise InvalidRequest(f"several models are served: choose with --model {' or '.join(served)}", field="--model")
    return served[0]


async def stream(system: System, settings: Settings, job: PrefillJob, show: Callable[[TokenEntry], None]) -> End:
    """Publish ``job`` and show its entries as they come, to its end. Cancellation of the task cancels the request."""
    request = Request(system, job, settings.bridge.silence_s)
    try:
        async with contextlib.aclosing(request.entries()) as entries:
            async for entry in entries:
                show(entry)
                if entry.end is not None:
                    return entry.end
        raise AssertionError("entries() ends with an end or raises")
    except asyncio.CancelledError:
        if not await request.cancel():
            print("nothing to cancel: it has ended, or no worker has taken it yet", file=sys.stderr)
        raise


def publish(
    prompt: Annotated[str, typer.Argument(help="The text to continue; `-` reads it from standard input.")],
    model: Annotated[str | None, typer.Option(help="Which model; may be left out if only one is served.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="As a user's message, through the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="At most this many tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; 1 if left out.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from this share of the probability only.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Give way to interactive requests.")] = False,
    timeout_s: Annotated[float, typer.Option(help="For queue, prefill, handoff and decode together.")] = 600,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print each token entry as a line of JSON.")] = False,
) -> None:
    """Send one request over NATS and print its text as it comes. Ctrl-C cancels it.

    Exit status 0 if the request was done, 1 if it failed, expired or was cancelled.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    asked = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    given = {name: value for name, value in asked.items() if value is not None}
    sampling = decode(msgspec.json.encode(given), Sampling)

    def show(entry: TokenEntry) -> None:
        if as_json:
            typer.echo(encode(entry))
        else:
            typer.echo("".join(entry.pieces) + (entry.end.tail if entry.end else ""), nl=entry.end is not None)

    async def work(system: System, settings: Settings) -> End:
        job = PrefillJob(
            model=await served_model(system, model),
            reply_to=names.reply_subject(f"cli-{secrets.token_hex(8)}"),
            prompt=None if chat else text,
            messages=(ChatMessage("user", text),) if chat else None,
            sampling=sampling,
            timeout_ms=round(timeout_s * 1000),
            priority="batch" if batch else "interactive",
        )
        return await stream(system, settings, decode(encode(job), PrefillJob), show)

    end = talk(state_dir, work)
    if end.state != "done":
        code, message = (end.error.code, end.error.message) if end.error else (end.state, "no reason given")
        print(f"pdq: request {end.state} ({code}): {message}", file=sys.stderr)
        raise typer.Exit(1)
