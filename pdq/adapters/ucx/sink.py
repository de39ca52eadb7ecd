"""The fetching side: receives posted first, then wanted, then verified where they lie.

How a fetch ends: each posted receive is answered by its source, with bytes or with an empty message; only then has it
ended. After an error or a cancellation the sink asks the source to answer what is open, and waits ``SETTLE_S`` for it.
A source that stays silent is cut off, and because UCX may still write to what was cut off, that is ``BufferAtRisk``.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import randbits
from typing import Final

import xxhash

from pdq import failpoints
from pdq.adapters.buffers import INLINE_BYTES, copied, cut, off_loop
from pdq.adapters.ucx import wire
from pdq.adapters.ucx.context import context
from pdq.adapters.ucx.link import Link
from pdq.core.errors import BufferAtRisk, DigestMismatch, HandoffUnknown, InvalidMessage, PeerLost
from pdq.core.layout import chunk_hash
from pdq.ports import ChunkPlan, HandoffRef

WANT_BYTES: Final = 16 * 1024 * 1024
"""Asked for at a time."""
WINDOW: Final = 3
"""Wants under way per fetch: one lands while one is hashed and one is on its way."""
DIRECT_BYTES: Final = 64 * 1024
"""Parts from here on are received in place; runs of smaller ones come as one piece and are copied out."""
SETTLE_S: Final = 2.0


@dataclass
class _Piece:
    """One message: a part of the sink's buffers, or a staging buffer for a run of small ones."""

    memory: memoryview
    scatter: list[memoryview] = field(default_factory=list)


@dataclass
class _Batch:
    """One ``Want``: its pieces, and the part of the chunk that it covers."""

    number: int
    chunk: int
    last: bool
    views: list[memoryview]
    pieces: list[_Piece]
    answer: asyncio.Future[wire.Answer]
    receives: list[asyncio.Task[None]] = field(default_factory=list)


class Sink:
    """The sink's end of one link: hands answers to the fetches that wait for them."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[wire.Answer]] = {}

    def on_message(self, link: Link, message: wire.Message) -> None:
        if not isinstance(message, wire.Answer):
            raise InvalidMessage(f"a source may only answer, it sent {type(message).__name__}")
        answer = self._answers.pop(message.number, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def on_end(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(PeerLost("the connection to the source broke"))
                answer.exception()
        self._answers.clear()

    def expect(self) -> tuple[int, asyncio.Future[wire.Answer]]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        return number, self._answers[number]


class Pull:
    """One fetch."""

    def __init__(
        self,
        link: Link,
        sink: Sink,
        ref: HandoffRef,
        plan: ChunkPlan,
        targets: list[list[memoryview]],
        timeout_s: float,
    ) -> None:
        self._link = link
        self._sink = sink
        self._ref = ref
        self._plan = plan
        self._targets = targets
        self._timeout_s = timeout_s
        self._open: deque[_Batch] = deque()
        self._state = xxhash.xxh3_128()
        self._hashes = [chunk_hash()] * len(targets)
        """Of the chunks as they landed; an empty one never has to."""

    async def run(self) -> tuple[str, ...]:
        """The hashes of all chunks as they landed."""
        try:
            for chunk, offset, views in self._ranges():
                if len(self._open) == WINDOW:
                    await self._land(self._open[0])
                self._open.append(self._post(chunk, offset, views))
            while self._open:
                await self._land(self._open[0])
        except BaseException as error:
            if not await self._settled():
                raise BufferAtRisk(
                    f"the fetch of {self._ref.key.request_id} ended, but its source does not confirm that nothing is on "
                    "its way: quarantine the blocks"
                ) from error
            raise
        return tuple(self._hashes)

    # --- Forward ------------------------------------------------------------------------------------------------------

    def _ranges(self) -> Iterator[tuple[int, int, list[memoryview]]]:
        """What to ask for at a time: bounded in bytes and in pieces."""
        for chunk, target in enumerate(self._targets):
            offset, length = 0, self._plan.lengths[chunk]
            while offset < length:
                views = list(cut(target, offset, WANT_BYTES))[: wire.MAX_PIECES]
                yield chunk, offset, views
                offset += sum(map(len, views))

    def _post(self, chunk: int, offset: int, views: list[memoryview]) -> _Batch:
        number, answer = self._sink.expect()
        pieces = list(_pieces(views))
        size = sum(map(len, views))
        batch = _Batch(number, chunk, offset + size == self._plan.lengths[chunk], views, pieces, answer)
        first_tag = randbits(64)
        for index, piece in enumerate(pieces):
            batch.receives.append(self._link.receive(piece.memory, wire.tag_of(first_tag, index)))
        key = self._ref.key
        lengths = tuple(len(piece.memory) for piece in pieces)
        self._link.say(
            wire.Want(
                number, key.model, key.request_id, self._ref.epoch, self._ref.secret, chunk, offset, lengths, first_tag
            )
        )
        return batch

    async def _land(self, batch: _Batch) -> None:
        """Wait for the answer and the pieces of one batch, then hash them; after a chunk's last batch, compare."""
        waiting: list[asyncio.Future[object]] = [batch.answer, *batch.receives]  # type: ignore[list-item]
        done, missing = await asyncio.wait(waiting, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for ended in done:
            ended.result()
        if missing:
            raise PeerLost(f"nothing of chunk {batch.chunk} of {self._ref.key.request_id} within {self._timeout_s} s")
        answer = batch.answer.result()
        if answer.status is not wire.Status.OK:
            raise HandoffUnknown(f"the source does not hold {self._ref.key.request_id} epoch {self._ref.epoch}")
        self._open.popleft()
        for piece in batch.pieces:
            if piece.scatter:
                await copied([piece.memory], piece.scatter)
        await self._hash(batch.views)
        if batch.last:
            landed, self._state = self._state.hexdigest(), xxhash.xxh3_128()
            if failpoints.armed and await failpoints.hit("transport.chunk", self._ref.key.request_id):
                landed = failpoints.WRONG_DIGEST
            if landed != answer.digest:
                raise DigestMismatch(
                    f"chunk {batch.chunk} of {self._ref.key.request_id} landed as {landed}, announced as {answer.digest}"
                )
            self._hashes[batch.chunk] = landed

    async def _hash(self, views: Sequence[memoryview]) -> None:
        def update() -> None:
            for view in views:
                self._state.update(view)

        if sum(map(len, views)) <= INLINE_BYTES:
            update()
        else:
            await off_loop(update)

    # --- Backward -----------------------------------------------------------------------------------------------------

    async def _settled(self) -> bool:
        """Whether nothing can land any more. Takes its bounded time even if the fetch is cancelled again."""
        work = asyncio.create_task(self._settle())
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        return work.result()

    async def _settle(self) -> bool:
        receives = [receive for batch in self._open for receive in batch.receives]
        if not self._link.ended and not all(receive.done() for receive in receives):
            self._link.say(wire.Cancel(tuple(batch.number for batch in self._open)))
            await asyncio.wait(receives, timeout=SETTLE_S)
        if all(receive.done() and receive.exception() is None for receive in receives):
            return True
        # The connection broke, or the source is silent. Either way UCX has to let go of the endpoint first.
        await self._link.close()
        if self._link.cut:
            context.abandon([piece.memory for batch in self._open for piece in batch.pieces])
        return not self._link.cut


def _pieces(views: Sequence[memoryview]) -> Iterator[_Piece]:
    run: list[memoryview] = []
    for view in views:
        if len(view) < DIRECT_BYTES:
            run.append(view)
            continue
        if run:
            yield _staged(run)
            run = []
        yield _Piece(view)
    if run:
        yield _staged(run)


def _staged(run: list[memoryview]) -> _Piece:
    if len(run) == 1:
        return _Piece(run[0])
    return _Piece(memoryview(bytearray(sum(map(len, run)))), run)
