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
from pdq.core.errors import DeadlineExceeded, InvalidRequest, LedgerRefusal, RequestCancelled, Unavailable
from pdq.core.handoff import Event
from pdq.core.lease import RecordKey
from pdq.core.messages import (
    Cancel,
    ChatMessage,
    End,
    OutputAnswer,
    PrefillJob,
    Resend,
    Sampling,
    TokenEntry,
    TokenFrame,
    decode,
    encode,
)
from pdq.core.settings import Settings
from pdq.core.stream import Assembler
from pdq.ports import Changes, Queue, Record
from pdq.stages.endings import recorded_end

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
        self._request_id = ""

    async def entries(self) -> AsyncGenerator[TokenEntry, None]:
        """Publish; then every token once, in order, and the end.

        Raises:
            DeadlineExceeded: the request's timeout has passed and nobody said a word about its end.
        """
        job, clock = self._job, asyncio.get_running_loop().time
        assert job.timeout_ms is not None
        timeout_s = job.timeout_ms / 1000
        give_up = clock() + timeout_s + GRACE_S
        subscription = await self._system.bus.receive(job.reply_to, self._frames.put_nowait, self._answer)
        try:
            await self._system.queue.publish(
                Queue.PREFILL, job.model, encode(job), priority=job.priority, ttl_s=timeout_s
            )
            while not self._output.ended:
                for entry in await self._arrivals():
                    yield entry
                if not self._output.ended and clock() > give_up:
                    raise DeadlineExceeded(f"no worker ended the request within {timeout_s:g} s")
        finally:
            await subscription.close()

    async def cancel(self) -> bool:
        """Cancel the request; False if there is nothing to cancel: it has ended, or no worker has taken it yet."""
        record = await self._record()
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
        """What the next frame adds. After a silence: what the record says, if it has ended."""
        try:
            frame = await asyncio.wait_for(self._frames.get(), self._silence_s)
        except TimeoutError:
            record = await self._record()
            if record is None or not record.state.terminal:
                return []
            self._output.ended = True
            at = self._output.next_seq
            return [TokenEntry(record.key.request_id, at, end=recorded_end(record, at))]
        fresh: list[TokenEntry] = []
        for entry in frame.entries:
            self._request_id = self._request_id or entry.request_id
            fresh += self._output.accept(entry)
        missing = self._output.ask_again(asyncio.get_running_loop().time())
        if missing is not None:
            resend = Resend(self._request_id, missing, self._job.reply_to)
            await self._system.bus.control(names.worker_subject(frame.worker), resend)
        return fresh

    async def _record(self) -> Record | None:
        """The request's record. Its id is known from the first entry on; before that, only this request replies here."""
        if self._request_id:
            return await self._system.ledger.read(RecordKey(self._job.model, self._request_id))
        live = await self._system.ledger.live(self._job.model)
        return next((record for record in live if record.reply_to == self._job.reply_to), None)


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
