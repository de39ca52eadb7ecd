"""The running batch of one decode worker: step, text, frames.

    step ─▶ every seat's token becomes text ─▶ one frame per destination ─▶ step

A sequence that ends leaves its seat at once; whoever waits for it (``decode``) then makes the terminal transition and
sends the last token together with the end, so that the end is sent by who won the transition.
"""

import asyncio
import logging
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from pdq import failpoints
from pdq.core.errors import EngineFailed
from pdq.core.messages import Sampling, TokenEntry
from pdq.core.output import Output
from pdq.ports import DecodeEngine, DecodeSeat, Drawn, Record, Tokenizer
from pdq.stages.outbox import Outbox
from pdq.stages.text import done, entry, logprobs_of

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """One sequence in the batch."""

    record: Record
    sampling: Sampling
    seat: DecodeSeat
    output: Output
    ended: asyncio.Future[TokenEntry]
    began: asyncio.Event


class Batch:
    def __init__(self, engine: DecodeEngine, outbox: Outbox, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._outbox = outbox
        self._tokenizer = tokenizer
        self._running: dict[DecodeSeat, Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def decode(
        self,
        record: Record,
        sampling: Sampling,
        seat: DecodeSeat,
        output: Output,
        first: Drawn | None,
        replay: Tokens[int] = (),
        began: asyncio.Event | None = None,
    ) -> TokenEntry:
        """Decode to the end; the entry of the last token, its ``end`` filled in, for the caller to send.

        ``first`` (drawn by prefill) and ``replay`` are the last tokens of ``output``, which are not in the KV yet.
        ``began`` is set with the first token that comes out. The seat is left in any case.

        Raises:
            EngineFailed: this sequence cannot go on.
        """
        ended: asyncio.Future[TokenEntry] = asyncio.get_running_loop().create_future()
        self._running[seat] = Running(record, sampling, seat, output, ended, began or asyncio.Event())
        try:
            seat.join(first, replay)
            if failpoints.armed:
                await failpoints.hit("decode.joined", record.key.request_id)
            return await ended
        finally:
            self._running.pop(seat, None)
            seat.leave()
            if not ended.done() or ended.cancelled() or ended.exception() is not None:
                self._outbox.forget(record.key.request_id)

    async def run(self) -> None:
        """Step forever."""
        while True:
            try:
                step = await self._engine.step()
                if failpoints.armed:
                    await failpoints.hit("decode.step")
            except EngineFailed as failure:
                log.exception("a step failed; its sequences end")
                for seat in list(self._running):
                    self._fail(seat, failure)
                continue
            for seat, error in step.failed:
                self._fail(seat, error)
            frames = self._frames(step.drawn)
            for reply_to, entries in frames.items():
                await self._outbox.send(reply_to, entries)

    def _frames(self, drawn: Tokens[tuple[DecodeSeat, Drawn]]) -> dict[str, list[TokenEntry]]:
        frames: dict[str, list[TokenEntry]] = {}
        for seat, token in drawn:
            running = self._running.get(seat)
            if running is None or running.ended.done():
                continue
            sent = self._advance(running, token)
            if sent.end is not None:
                seat.leave()
                running.ended.set_result(sent)
            else:
                frames.setdefault(running.record.reply_to, []).append(sent)
        return frames

    def _advance(self, running: Running, drawn: Drawn) -> TokenEntry:
        running.began.set()
        output = running.output
        seq = len(output.tokens)
        piece, finish = output.push(drawn.token)
        logprobs = logprobs_of(self._tokenizer, running.sampling, drawn)
        end = done(running.record, finish, output) if finish is not None else None
        return entry(running.record, seq, drawn.token, piece, logprobs, end)

    def _fail(self, seat: DecodeSeat, error: EngineFailed) -> None:
        running = self._running.get(seat)
        if running is not None and not running.ended.done():
            running.ended.set_exception(error)
