"""Who is alive, what it promises, and what it holds."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Protocol

from msgspec import Struct

from pdq.core.layout import Fingerprint, KvLayout


class Pool(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class BackendContract(Struct, frozen=True):
    """What an engine promises; published when its worker registers, and compared before two workers may pair."""

    name: str
    version: str
    first_token: Literal["prefill", "decode"]
    order: tuple[Literal["on_start", "on_first_chunk", "on_complete"], ...]
    direction: Literal["pull", "push"]
    chunked: bool
    reentry: bool
    resume: bool
    layout: KvLayout
    fingerprint: Fingerprint
    max_context: int
    features: tuple[str, ...] = ()


class Occupancy(Struct, frozen=True):
    """A worker's own account of what it holds now."""

    total_blocks: int
    free_blocks: int
    running: int
    """Requests being computed."""
    held: int
    """Handoffs whose KV is held for someone to fetch."""
    served: int = 0
    """Requests that this worker has taken since it started."""
    steps: int = 0
    """Batched engine steps since it started."""
    tokens: int = 0
    """Tokens computed since it started (prompt tokens in prefill, output tokens in decode)."""
    busy_s: float = 0.0
    """Seconds in which it computed ``tokens``: without them a quiet worker would look like a slow one."""
    transfers: int = 0
    """KV transfers that it receives now."""
    peak_batch: int = 0
    quarantined_blocks: int = 0
    """Out of use for good: when their transfer was cut, a late write could still land in them."""


class WorkerInfo(Struct, frozen=True):
    """What a live worker says of itself, again and again, until its entry runs out."""

    worker: str
    pool: Pool
    model: str
    contract: BackendContract
    occupancy: Occupancy
    host: str
    pid: int
    state: Literal["ready", "draining"]
    started_ms: int
    aggregated: bool = False
    """A decode-pool worker that also takes whole requests from the prefill queue."""
    spill: tuple[str, ...] = ()
    """The tiers to which it can move KV that nobody has fetched yet."""


class WorkerRegistry(Protocol):
    """Who is alive. An entry vanishes by itself when it is not announced again within its TTL."""

    async def announce(self, info: WorkerInfo, ttl_ms: int) -> None: ...
    async def withdraw(self, worker: str) -> None: ...
    async def workers(self, model: str | None = None) -> Sequence[WorkerInfo]: ...
    async def last(self, model: str) -> WorkerInfo | None:
        """What a worker of this model has said of itself last, even if none is alive. None: there never was one."""
