"""The seams: what stages, bridge and CLI ask of the world, one Protocol per foreign concern.

Each port has one conformance suite (``tests/conformance``) that runs over the in-memory adapter and every real one.
All methods are coroutines on the event loop's thread and none blocks it for more than a few milliseconds. Adapters
translate foreign errors into ``pdq.core.errors`` exactly once: an unreachable server is ``Unavailable``.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

from msgspec import Struct

from pdq.core.audit import Books, KvObject
from pdq.core.errors import EngineFailed
from pdq.core.handoff import Event, Side, State
from pdq.core.layout import Fingerprint, KvLayout
from pdq.core.lease import Hold, Lease, RecordKey
from pdq.core.load import Load as Load
from pdq.core.messages import (
    AccountAnswer,
    ChatMessage,
    Control,
    OutputAnswer,
    Policy,
    Priority,
    Sampling,
    TokenFrame,
)

# --- Queues -----------------------------------------------------------------------------------------------------------


class Queue(StrEnum):
    """The three work queues. Each is one JetStream work-queue stream."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"


class Delivery(Protocol):
    """One job in one worker's hands. Undelivered again after ``ack_wait`` unless ``in_progress`` is called in time."""

    @property
    def data(self) -> bytes: ...
    @property
    def deliveries(self) -> int:
        """1 on the first delivery."""

    @property
    def sequence(self) -> int:
        """Place in the queue's stream: the same for every redelivery."""

    @property
    def published_ms(self) -> int:
        """When the broker stored it, Unix milliseconds on the broker's clock."""

    async def ack(self) -> None: ...
    async def retry(self, delay_s: float) -> None: ...
    async def in_progress(self) -> None: ...
    async def reject(self, code: str, detail: str) -> None:
        """Publish to the dead-letter subject with the reason, then remove from the queue."""


class StoredJob(Struct, frozen=True):
    """A job as it lies in its queue, delivered or not."""

    sequence: int
    published_ms: int
    data: bytes


class JobQueue(Protocol):
    async def publish(
        self,
        queue: Queue,
        model: str,
        data: bytes,
        *,
        message_id: str | None = None,
        priority: Priority = "interactive",
        ttl_s: float | None = None,
    ) -> None:
        """Store a job durably; returns once the broker has it.

        ``message_id`` makes a repeated publish within the broker's window a no-op. ``ttl_s`` bounds the wait in the queue.

        Raises:
            Overloaded: the stream's limit is reached.
            Unavailable: the broker does not answer. It may have the job all the same, or get it when it is back: try
                again with the same ``message_id``.
            InvalidMessage: over the broker's size limit.
        """

    async def pull(self, queue: Queue, model: str, *, limit: int, wait_s: float) -> Sequence[Delivery]:
        """Between 0 and ``limit`` jobs of one priority, the most urgent one that has any; returns as soon as there is at
        least one, or after ``wait_s``. Cancellable: a job that was on its way to a cancelled pull is delivered again,
        after ``ack_wait`` at the latest.

        Raises:
            Unavailable: the broker was away, or did not answer, until ``wait_s`` had passed.
        """

    async def depth(self, queue: Queue, model: str) -> tuple[int, int]:
        """(waiting, delivered and not yet acknowledged)."""

    async def stored(self, queue: Queue, model: str, limit: int) -> Sequence[StoredJob] | None:
        """All jobs that nobody has acknowledged, each priority's oldest first (for operators; one round trip each).
        None: they are more than ``limit``."""

    async def dead(self, model: str) -> int:
        """How many dead letters there are."""

    async def watch_exhausted(self, on_exhausted: Callable[[Queue, bytes], Awaitable[None]]) -> "Subscription":
        """Jobs that were delivered ``max_deliver`` times in vain go to the dead letters (reason ``max_deliveries``); then
        one of the watchers is called with the queue and the job's bytes. Somebody must always watch."""


# --- Tokens and control -----------------------------------------------------------------------------------------------


class TokenBus(Protocol):
    """Token frames from workers to whoever asked, and small control messages. At most once: loss is the reader's
    to notice (``pdq.core.stream``) and to repair with ``Resend``."""

    async def send(self, reply_to: str, frame: TokenFrame) -> None:
        """Frames over the broker's message limit are split, in order."""

    async def receive(
        self,
        subject: str,
        on_frame: Callable[[TokenFrame], None],
        answer: Callable[[str], OutputAnswer] | None = None,
    ) -> "Subscription":
        """Calls ``on_frame`` for each frame on ``subject``, in order, on the loop. Messages that do not parse are
        counted and dropped. ``answer`` replies to ``OutputQuestion`` for a request id."""

    async def ask_output(self, reply_to: str, request_id: str, timeout_s: float) -> OutputAnswer | None:
        """Ask the owner of ``reply_to`` which tokens it has; None when nobody answers in time."""

    async def ask_account(self, worker: str, timeout_s: float) -> AccountAnswer | None:
        """Ask a worker what it holds now; None when it does not answer in time."""

    async def answer_account(self, worker: str, answer: Callable[[], AccountAnswer]) -> "Subscription":
        """Reply to ``AccountQuestion`` for ``worker``."""

    async def control(self, subject: str, message: Control) -> None: ...

    async def on_control(self, subject: str, handler: Callable[[Control], None]) -> "Subscription": ...


class Subscription(Protocol):
    async def close(self) -> None: ...


# --- Ledger -----------------------------------------------------------------------------------------------------------


class Locator(Struct, frozen=True):
    """Where one transport serves a handoff's bytes. ``address`` is the transport's own affair.

    ``epoch`` is that of the attempt whose bytes they are: it outlives the source's lease when a tier does.
    """

    transport: str
    address: Mapping[str, str]
    epoch: int = 0
    outlives: bool = False
    """The bytes outlive their source's process: they lie in a tier."""


class NewRecord(Struct, frozen=True):
    """What is known when a request is accepted. ``timeout_ms`` becomes the absolute deadline on the ledger's clock."""

    key: RecordKey
    reply_to: str
    prompt_tokens: int
    max_new_tokens: int
    timeout_ms: int
    secret: str
    policy: Policy = Policy()
    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    tenant: str = ""
    priority: Priority = "interactive"
    client_id: str = ""


class Record(Struct, frozen=True):
    """The handoff record as read back. See ``pdq.core.handoff`` for what its state means."""

    key: RecordKey
    state: State
    attempt: int
    epoch: int
    deadline_ms: int
    reply_to: str
    prompt_tokens: int
    max_new_tokens: int
    secret: str
    policy: Policy
    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    tenant: str = ""
    priority: Priority = "interactive"
    client_id: str = ""
    source: Lease | None = None
    sink: Lease | None = None
    fingerprint: str = ""
    layout: KvLayout | None = None
    locators: tuple[Locator, ...] = ()
    digest: str = ""
    first_token: int | None = None
    """The token that the prefill side sampled and emitted, if it owns the first token."""
    emitted: int = 0
    """Tokens sent to the client so far, as of the last write that carried it."""
    streaming: bool = False
    """A decode worker has begun to send: the client may have more than ``emitted`` tokens, and only it knows how many."""
    streams_lost: int = 0
    """Decode workers that died while they streamed, and whose sequence another one continued from the same KV."""
    ended_code: str = ""
    """For a terminal record: finish reason, or error code."""
    ended_message: str = ""
    created_ms: int = 0
    ended_ms: int = 0


class Changes(Struct, frozen=True, omit_defaults=True):
    """Fields that an author writes together with an event, in the same atomic step. ``None`` leaves a field alone."""

    fingerprint: str | None = None
    layout: KvLayout | None = None
    locators: tuple[Locator, ...] | None = None
    digest: str | None = None
    first_token: int | None = None
    emitted: int | None = None
    streaming: bool | None = None
    streams_lost: int | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    ended_code: str | None = None
    ended_message: str | None = None


class Grant(Struct, frozen=True):
    """A lease, given. ``now_ms`` is the ledger's clock at the grant, so ``record.deadline_ms - now_ms`` is what is left."""

    record: Record
    epoch: int
    now_ms: int


class LogEntry(Struct, frozen=True):
    """One applied transition, as ``pdq trace`` shows it."""

    at_ms: int
    event: str
    state: State
    worker: str
    epoch: int
    note: Mapping[str, Any] = {}


class HandoffLedger(Protocol):
    """Records and leases. Every method is one atomic step (one Lua script, one round trip) unless it says otherwise.

    The executors of ``TRANSITIONS`` and ``RULES`` raise, and change nothing, with ``RecordNotFound``, ``RecordEnded``,
    ``IllegalTransition``, ``StaleEpoch`` (the named epoch is not current, or its lease has run out) or ``LeaseHeld``.
    """

    async def enqueue(self, new: NewRecord) -> tuple[Record, bool]:
        """Create the record in ``queued``. If it exists, nothing changes: (the existing record, False)."""

    async def acquire(self, key: RecordKey, event: Event, worker: str, ttl_ms: int) -> Grant:
        """``BEGIN`` or ``CLAIM``: take the source or sink lease for ``ttl_ms``; raises the epoch.

        ``BEGIN`` counts an attempt and raises ``AttemptsExhausted`` past ``policy.max_attempts`` (changing nothing).
        Past the deadline both raise ``DeadlineExceeded``.
        """

    async def apply(
        self,
        key: RecordKey,
        event: Event,
        *,
        epoch: int | None = None,
        worker: str = "",
        changes: Changes | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> Record:
        """Cause any other event; returns the record after it. ``note`` goes to the log only."""

    async def update(self, key: RecordKey, side: Side, epoch: int, changes: Changes) -> None:
        """Write fields without an event, under a running lease (progress, early locators, ``emitted``)."""

    async def release(self, key: RecordKey, side: Side, epoch: int) -> None:
        """Let one lease go without changing the state (a source that outlived ``fetched`` under ``retain``)."""

    async def renew(self, holds: Sequence[Hold], ttl_ms: int) -> Sequence[Hold]:
        """Prolong many leases; returns those that are lost (record ended, epoch not current, or run out)."""

    async def read(self, key: RecordKey) -> Record | None: ...

    async def read_many(self, keys: Sequence[RecordKey]) -> Sequence[Record | None]: ...

    async def find(self, request_id: str) -> Record | None:
        """By request id alone, over all models (several round trips; for operators)."""

    async def history(self, key: RecordKey) -> Sequence[LogEntry]: ...

    async def due(self, model: str, limit: int) -> Sequence[Record]:
        """Live records of which a lease or the deadline has run out: the reaper's work. Cost grows with these only."""

    async def reap(self, key: RecordKey) -> Record:
        """Clear every lease that has run out and put the record back at its next real expiry; no state change."""

    async def live(self, model: str) -> Sequence[Record]:
        """All records that are not terminal (for operators; cost grows with them)."""

    async def load(self, model: str) -> Load: ...

    async def books(self, model: str, *, mend: bool = False) -> Books | None:
        """What is kept beside the records, compared with them (for operators; cost grows with live records). None: there
        are too many to hold the ledger up for. ``mend`` sets the counters to what follows from the records, unless some
        of these are not on the due list. Finding those takes several steps."""

    async def models(self) -> Sequence[str]: ...

    async def now_ms(self) -> int: ...

    async def salt(self) -> str:
        """A random text that is made once for this ledger, and the same for everybody who may read the ledger."""


# --- Workers ----------------------------------------------------------------------------------------------------------


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


class WorkerRegistry(Protocol):
    """Who is alive. An entry vanishes by itself when it is not announced again within its TTL."""

    async def announce(self, info: WorkerInfo, ttl_ms: int) -> None: ...
    async def withdraw(self, worker: str) -> None: ...
    async def workers(self, model: str | None = None) -> Sequence[WorkerInfo]: ...


# --- KV transport -----------------------------------------------------------------------------------------------------

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


# --- Engines ----------------------------------------------------------------------------------------------------------


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


# --- Text -------------------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """A model's tokenizer and chat template. Pure and fast; safe to call on the loop for prompts of normal size."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def digest(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens are left out."""

    def piece(self, token: int) -> str:
        """One token as text, for logprobs."""

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The chat template with the generation prompt.

        Raises:
            InvalidRequest: the template refuses these messages, or there is no template.
        """
