"""Moving KV bytes, and looking after those that lie in a tier."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from pdq.core.audit import KvObject
from pdq.core.lease import RecordKey
from pdq.ports.ledger import Locator

Buffer = bytes | bytearray | memoryview


class HandoffRef(Struct, frozen=True):
    """What names a handoff's bytes to a transport: an attempt of a request, and the secret that opens it."""

    key: RecordKey
    epoch: int
    secret: str


class ChunkPlan(Struct, frozen=True):
    """How many chunks there are and how long each is; both sides compute it from layout and prompt length."""

    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.lengths)


class Fetched(Struct, frozen=True):
    """What a completed fetch reports; ``hashes`` are of the bytes as they lie in the sink's buffers."""

    transport: str
    bytes: int
    hashes: tuple[str, ...]


class KvTransport(Protocol):
    """Moves chunks of KV from a source (or a tier) into a sink's own buffers. Sources and sinks use the same object."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Let go of everything: sockets, segments, tasks. Buffers that a late write could still reach are abandoned, not
        returned."""

    async def offer(self, ref: HandoffRef, plan: ChunkPlan, index: int, parts: Sequence[Buffer]) -> Locator:
        """Make chunk ``index`` available. ``parts`` (concatenated: ``plan.lengths[index]`` bytes) stay valid and unchanged
        until ``release`` returns. The locator is the same for every chunk of a handoff; calling again for a chunk
        that is already offered changes nothing."""

    async def fetch(
        self, locator: Locator, ref: HandoffRef, plan: ChunkPlan, into: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Fetched:
        """Pull every chunk into ``into`` (per chunk: writable parts of the plan's length, in order), waiting for chunks
        that are not offered yet. Returns only when every byte has landed.

        After an error or a cancellation, no late write can land in ``into``: this method returns only once the transport
        has confirmed that, or raises ``BufferAtRisk`` from the original error so that the caller quarantines the blocks.

        Raises:
            HandoffUnknown: released, never offered here, or wrong secret (the peer does not say which).
            PeerLost: no connection, reset, or nothing within ``timeout_s``.
            DigestMismatch: a chunk's hash is not the one its source announced.
        """

    async def release(self, ref: HandoffRef) -> None:
        """Source or tier lets go: new fetches get ``HandoffUnknown``, running ones are ended; then the parts are free.
        Unknown handoffs are fine."""

    def holding(self) -> Sequence[HandoffRef]:
        """What this process has offered and not released."""

    def sweep(self) -> int:
        """Remove what sources that died on this host have left behind; how many objects that were. May do file I/O."""


class KvStore(Protocol):
    """A place where KV bytes lie without a process around them, as operators see it: a tier, or shared memory."""

    @property
    def name(self) -> str:
        """The transport that puts them there."""

    async def objects(self) -> Sequence[KvObject]:
        """Everything there (several steps; cost grows with all keys or files)."""

    async def discard(self, found: Sequence[KvObject]) -> int:
        """Delete these, unless a living process has them; how many are gone."""
