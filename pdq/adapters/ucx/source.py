"""The serving side: what is on offer, and the answers to those who want it."""

import asyncio
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdq.adapters.buffers import copied, cut, fitting, hashed
from pdq.adapters.ucx import wire
from pdq.adapters.ucx.link import Link
from pdq.core.errors import BufferAtRisk, HandoffUnknown, PdqError
from pdq.core.lease import RecordKey
from pdq.ports import Buffer, ChunkPlan, HandoffRef

log = logging.getLogger(__name__)

RELEASE_S: Final = 2.0
"""How long a release waits for sends that are under way, before it cuts their links off."""
MAX_WANTS: Final = 1024
"""Unanswered wants per link; a peer that goes over is cut off."""


@dataclass
class _Held:
    """One handoff on offer."""

    ref: HandoffRef
    plan: ChunkPlan
    chunks: dict[int, tuple[list[memoryview], str]] = field(default_factory=dict)
    serving: dict[asyncio.Task[None], Link] = field(default_factory=dict)
    hashing: set[asyncio.Task[str]] = field(default_factory=set)
    released: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new one, whenever a chunk is added or the handoff is released."""

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Source:
    def __init__(self) -> None:
        self._held: dict[tuple[RecordKey, int], _Held] = {}
        self._wants: dict[Link, dict[int, asyncio.Event]] = {}
        self._serves: set[asyncio.Task[None]] = set()

    async def offer(self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> None:
        views = fitting(plan, index, parts)
        held = self._held.setdefault((ref.key, ref.epoch), _Held(ref, plan))
        if index in held.chunks:
            return
        hashing = asyncio.create_task(hashed(views))
        held.hashing.add(hashing)
        try:
            digest = await hashing
        finally:
            held.hashing.discard(hashing)
        if held.released:
            raise HandoffUnknown(f"{ref.key.request_id} was released while its chunk {index} was offered")
        held.chunks.setdefault(index, (views, digest))
        held.wake()

    async def release(self, ref: HandoffRef) -> None:
        held = self._held.pop((ref.key, ref.epoch), None)
        if held is None:
            return
        held.released = True
        held.wake()
        if held.hashing:
            await asyncio.wait(held.hashing)
        if not held.serving:
            return
        await asyncio.wait(held.serving, timeout=RELEASE_S)
        for link in set(held.serving.values()):
            log.warning("a peer that does not take its bytes is cut off to release %s", ref.key.request_id)
            link.close_soon()
        if held.serving:
            await asyncio.wait(held.serving, timeout=RELEASE_S)
        if held.serving:
            raise BufferAtRisk(
                f"{ref.key.request_id} is released, but its blocks are still being sent: quarantine them"
            )

    def holding(self) -> Sequence[HandoffRef]:
        return [held.ref for held in self._held.values()]

    # --- Serving ------------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: wire.Message) -> None:
        wants = self._wants.setdefault(link, {})
        match message:
            case wire.Want():
                if len(wants) >= MAX_WANTS or message.number in wants:
                    log.warning("a transport peer with %d open wants is cut off", len(wants))
                    link.close_soon()
                    return
                wants[message.number] = asyncio.Event()
                serve = asyncio.create_task(self._serve(link, message, wants[message.number]))
                self._serves.add(serve)
                serve.add_done_callback(self._serves.discard)
            case wire.Cancel():
                for number in message.numbers:
                    if number in wants:
                        wants[number].set()
            case wire.Answer():
                log.warning("a transport peer that answers what nobody wants is cut off")
                link.close_soon()

    def on_end(self, link: Link) -> None:
        for cancelled in self._wants.pop(link, {}).values():
            cancelled.set()

    async def _serve(self, link: Link, want: wire.Want, cancelled: asyncio.Event) -> None:
        try:
            held = self._find(want)
            while held and not held.released and not cancelled.is_set() and want.chunk not in held.chunks:
                await _first(held.changed, cancelled)
            if held is None or held.released:
                await self._refuse(link, want, wire.Status.UNKNOWN)
            elif cancelled.is_set():
                await self._refuse(link, want, wire.Status.CANCELLED)
            else:
                await self._send(link, want, held)
        except PdqError as error:
            log.debug("want %d of %s ended: %s", want.number, want.request_id, error)
        finally:
            self._wants.get(link, {}).pop(want.number, None)

    def _find(self, want: wire.Want) -> _Held | None:
        """The handoff that ``want`` may have: known, with the right secret, and a range that lies in its plan."""
        held = self._held.get((RecordKey(want.model, want.request_id), want.epoch))
        if held is None or not hmac.compare_digest(held.ref.secret.encode(), want.secret.encode()):
            return None
        lengths = held.plan.lengths
        if want.chunk >= len(lengths) or want.offset + sum(want.pieces) > lengths[want.chunk]:
            return None
        return held

    async def _refuse(self, link: Link, want: wire.Want, status: wire.Status) -> None:
        if not link.ended:
            empty = [link.send(b"", wire.tag_of(want.first_tag, piece)) for piece in range(len(want.pieces))]
            await asyncio.gather(link.say(wire.Answer(want.number, status)), *empty)

    async def _send(self, link: Link, want: wire.Want, held: _Held) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        held.serving[serving] = link
        views, digest = held.chunks[want.chunk]
        sends = [link.say(wire.Answer(want.number, wire.Status.OK, digest))]
        try:
            offset = want.offset
            for number, length in enumerate(want.pieces):
                piece = await _contiguous(list(cut(views, offset, length)), length)
                sends.append(link.send(piece, wire.tag_of(want.first_tag, number)))
                offset += length
            await asyncio.gather(*sends)
        finally:
            # A link that broke in one send may still be in another.
            await asyncio.wait(sends)
            del held.serving[serving]


async def _contiguous(views: list[memoryview], length: int) -> memoryview:
    """One view of bytes that may lie in several parts: copied only if they do."""
    if len(views) == 1:
        return views[0]
    joined = memoryview(bytearray(length))
    await copied(views, [joined])
    return joined


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
