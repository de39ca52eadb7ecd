"""What workers ask of an engine: compute and blocks. Queues, leases and transports are not its business."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from msgspec import Struct

from pdq.core.errors import EngineFailed
from pdq.core.layout import KvLayout
from pdq.core.messages import Sampling
from pdq.ports.kv import Buffer, ChunkPlan
from pdq.ports.workers import BackendContract, Occupancy


class PromptWork(Struct, frozen=True):
    """A prompt to prefill: ``tokens`` is prompt plus output so far, of which the last ``resumed`` were output.

    ``sampling.seed`` is always filled in here. ``max_new_tokens`` counts what may still follow ``tokens``.
    """

    request_id: str
    tokens: tuple[int, ...]
    resumed: int
    sampling: Sampling
    max_new_tokens: int


class Drawn(Struct, frozen=True):
    """One sampled token."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PrefillRun(Protocol):
    """One prompt in a prefill engine. Holds its blocks from creation to ``release``."""

    @property
    def plan(self) -> ChunkPlan: ...

    @property
    def blocks_held(self) -> int:
        """How many blocks it has now."""

    def chunks(self) -> AsyncIterator[tuple[int, Sequence[Buffer]]]:
        """Computes; yields (index, parts) as each chunk is finished. Cancelling the iteration stops at the next chunk."""

    @property
    def first(self) -> Drawn | None:
        """After the last chunk: the first new token, if the contract says that prefill owns it."""

    def release(self) -> None:
        """Blocks go back to the pool. Idempotent."""


class PrefillEngine(Protocol):
    @property
    def contract(self) -> BackendContract: ...

    def occupancy(self) -> Occupancy: ...

    def admit(self, work: PromptWork, *, output: bool = False) -> PrefillRun:
        """Reserve blocks for the whole prompt; with ``output`` (aggregated) also for ``max_new_tokens``.

        Raises:
            CapacityExhausted: not enough free blocks now.
            ContextTooLong: never fits.
        """

    async def close(self) -> None: ...


class DecodeSeat(Protocol):
    """One sequence's place in a decode engine: blocks for the prompt and for all output it may produce."""

    @property
    def buffers(self) -> Sequence[Sequence[memoryview]]:
        """Per chunk of the source's plan: where its bytes go."""

    @property
    def blocks_held(self) -> int:
        """How many blocks it has now; none once they are back in the pool, or quarantined."""

    def landed(self) -> None:
        """Every byte is in ``buffers`` and verified (for a ``Regroup`` mapping: copy from staging now)."""

    def join(self, first: Drawn | None, replay: Sequence[int] = ()) -> None:
        """Take part in the batch from the next step on. ``first`` is the token that prefill sampled, if it owns it;
        ``replay`` are the output tokens after it that are known already. None of them is given out again: they are fed to
        the model as if it had drawn them, and sampling goes on behind them."""

    def leave(self) -> None:
        """Out of the batch at the next step boundary, blocks back to the pool. Idempotent."""

    def quarantine(self) -> None:
        """Like ``leave``, but the blocks stay out of the pool, until the worker is started anew: a late write may still
        land in them, and a peer that was cut off can no longer say that none will."""


class Step(Struct, frozen=True):
    """What one batched step gave: each seat's token."""

    drawn: Sequence[tuple[DecodeSeat, Drawn]]
    seconds: float
    failed: Sequence[tuple[DecodeSeat, EngineFailed]] = ()
    """Seats that got no token and never will (non-finite logits, say)."""


class DecodeEngine(Protocol):
    @property
    def contract(self) -> BackendContract: ...

    def occupancy(self) -> Occupancy: ...

    def reserve(self, work: PromptWork, source: KvLayout) -> DecodeSeat:
        """Reserve a seat for a prompt whose KV comes in ``source`` layout.

        Raises:
            CapacityExhausted, ContextTooLong, IncompatibleLayout.
        """

    async def step(self) -> Step:
        """One batched step over all joined seats; waits while there are none. Runs outside the loop's thread."""

    def adopt(self, run: PrefillRun, work: PromptWork) -> DecodeSeat:
        """Aggregated: the seat that continues in ``run``'s blocks. ``run`` comes from the same engine, admitted with
        ``output``; its ``release`` does nothing from now on."""

    async def close(self) -> None: ...
