"""The running batch of one decode worker: step, text, frames.

    step ─▶ every seat's token becomes text ─▶ one frame per destination ─▶ step

A sequence that ends leaves its seat at once. Its last token goes out with all others of the step, before the terminal
transition: a worker that dies between the two has lost nothing. Whoever waits for the sequence (``decode``) then makes the
transition and sends the end, so that the end is sent by who won the transition.
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
from pdq.stages.text import entry, logprobs_of

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """One sequence in the batch."""

    record: Record
    sampling: Sampling
    seat: DecodeSeat
    output: Output
    ended: asyncio.Future[None]
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
    ) -> None:
        """Decode until ``output`` is finished; every token is sent, and the end is the caller's to send.

        ``first`` (drawn by prefill) and ``replay`` are the last tokens of ``output``, which are not in the KV yet.
        ``began`` is set with the first token that comes out. The seat is left in any case.

        Raises:
            EngineFailed: this sequence cannot go on.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[seat] = Running(record, sampling, seat, output, ended, began or asyncio.Event())
        try:
            seat.join(first, replay)
            if failpoints.armed:
                await failpoints.hit("decode.joined", record.key.request_id)
            await ended
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
            frames.setdefault(running.record.reply_to, []).append(self._advance(running, token))
            if running.output.finish is not None:
                seat.leave()
                running.ended.set_result(None)
        return frames

    def _advance(self, running: Running, drawn: Drawn) -> TokenEntry:
        running.began.set()
        output = running.output
        seq = len(output.tokens)
        piece, _ = output.push(drawn.token)
        return entry(running.record, seq, drawn.token, piece, logprobs_of(self._tokenizer, running.sampling, drawn))

    def _fail(self, seat: DecodeSeat, error: EngineFailed) -> None:
        running = self._running.get(seat)
        if running is not None and not running.ended.done():
            running.ended.set_exception(error)
