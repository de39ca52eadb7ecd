"""The wire types: frozen, self-describing, additive only. Unknown fields are ignored when read.

Everything is JSON (UTF-8). ``schemas/`` is generated from this module; a producer needs nothing else.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from pdq.core.errors import InvalidMessage
from pdq.core.handoff import Side

VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Priority = Literal["interactive", "batch"]
MAX_CHAT_MESSAGES: Final = 4096
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKENS: Final = 256
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
PROMPT_FIELDS: Final = ("prompt", "messages", "prompt_token_ids")
"""The ways to give a prompt; a job uses exactly one."""


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str
    name: Annotated[str, Meta(max_length=256)] | None = None


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. The draw at output position i depends only on (seed, i, logits)."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """0 keeps all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """None: derived from the request id, so that a retry still draws the same tokens."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """None: what the model's context leaves, bounded by the workers' configuration."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    stop: Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """None: none; N: of the drawn token and of the N most likely ones."""


OnHandoffFailure = Literal["recompute", "reject"]
OnStreamFailure = Literal["resume", "fail"]
Attempts = Annotated[int, Meta(ge=1, le=100)]
Retention = Literal["fetched", "first_token", "done"]


class Policy(Struct, frozen=True, omit_defaults=True):
    """What may be done for a request when something fails. The defaults are a deployment's own (``PDQ_POLICY_*``)."""

    on_handoff_failure: OnHandoffFailure = "recompute"
    """The KV cannot be fetched: ``recompute`` it, or ``reject`` the request."""
    on_stream_failure: OnStreamFailure = "resume"
    """Tokens are out and their worker is gone: ``resume`` after the last one that arrived, or ``fail``."""
    max_attempts: Attempts = 3
    """Prefills, and decode workers that died in the middle of a stream, all in all."""
    retain: Retention = "fetched"
    """How long the source keeps the KV: until it is ``fetched``, until the decode side's ``first_token``, or until the
    request is ``done``. What it still keeps need not be computed again when a decode worker dies."""


class PolicyWish(Struct, frozen=True, omit_defaults=True):
    """What one request asks for; what it leaves out is the deployment's default."""

    on_handoff_failure: OnHandoffFailure | None = None
    on_stream_failure: OnStreamFailure | None = None
    max_attempts: Attempts | None = None
    retain: Retention | None = None

    def over(self, default: Policy) -> Policy:
        wanted = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(default, **wanted)


class PrefillJob(Struct, frozen=True, omit_defaults=True):
    """One request, as a producer publishes it to ``pdq.jobs.prefill.<model>.<priority>``.

    Exactly one of ``prompt``, ``messages`` and ``prompt_token_ids`` is given. ``request_id`` is for pdq's own bridge and
    workers, which write the record first: a producer leaves it out, and learns the id from its first token frame.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    reply_to: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\s*>]+$")]
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_CHAT_MESSAGES)] | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    sampling: Sampling = Sampling()
    policy: PolicyWish = PolicyWish()
    timeout_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    priority: Priority = "interactive"
    tenant: Annotated[str, Meta(max_length=256)] = ""
    client_id: Annotated[str, Meta(max_length=256)] = ""
    """The producer's own name for the request; only echoed in token entries."""
    request_id: Annotated[str, Meta(max_length=64)] | None = None
    output_so_far: tuple[TokenId, ...] = ()
    """Resume: tokens that the client already has; prefilled after the prompt, never sent again."""
    v: int = VERSION

    def __post_init__(self) -> None:
        given = [name for name in PROMPT_FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(PROMPT_FIELDS)} must be given, got {', '.join(given) or 'none'}"
            )


class DecodeJob(Struct, frozen=True, omit_defaults=True):
    """Published by a prefill worker: KV for ``job`` is (or will be) offered; the record says where."""

    job: PrefillJob
    """With ``request_id`` and ``prompt_token_ids`` filled in."""
    source: str
    """The prefill worker, for logs; locators come from the record only."""
    attempt: int
    first_logprobs: "TokenLogprobs | None" = None
    """Of the token that the prefill side emitted, so that the decode side can send it again."""
    sent: tuple[TokenId, ...] = ()
    """Output that a decode worker had sent when it handed the sequence back, from position 0: fed to the model again,
    never sent again."""
    v: int = VERSION


class Logprob(Struct, frozen=True, array_like=True):
    token: TokenId
    text: str
    logprob: float


class TokenLogprobs(Struct, frozen=True, omit_defaults=True):
    """Log-probabilities at one output position."""

    token: TokenId
    text: str
    logprob: float
    top: tuple[Logprob, ...] = ()


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Failure(Struct, frozen=True):
    """Why a request ended without success; ``code`` is one of ``pdq.core.errors``."""

    code: str
    message: str
    retryable: bool = False


class End(Struct, frozen=True, omit_defaults=True):
    """The one terminal event of a request."""

    state: Literal["done", "failed", "cancelled", "expired"]
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    tail: str = ""
    """Text that was held back (it might have become a stop string or half a character) and belongs to the output."""
    usage: Usage | None = None
    error: Failure | None = None


class TokenEntry(Struct, frozen=True, omit_defaults=True):
    """What one request got: tokens ``seq`` .. ``seq + len(tokens) - 1``, and its end if that was all.

    ``pieces[i]`` is the text that became certain with ``tokens[i]``: a pure function of the tokens up to it, so a
    repeated token repeats its piece. ``end`` comes with, or after, the last token; its place is ``seq + len(tokens)``.
    An end that is not ``done`` ends the stream wherever it is: its sender need not know how far others came.
    """

    request_id: str
    seq: Annotated[int, Meta(ge=0)]
    tokens: tuple[TokenId, ...] = ()
    pieces: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    end: End | None = None
    client_id: str = ""


class TokenFrame(Struct, frozen=True, omit_defaults=True):
    """What a worker sends to one destination after one step: all that step's tokens that go there."""

    worker: str
    entries: tuple[TokenEntry, ...]
    v: int = VERSION


# --- Control ----------------------------------------------------------------------------------------------------------


class Cancel(Struct, frozen=True, tag="cancel"):
    """To all workers: these records are terminal; stop and free whatever you hold of them."""

    request_ids: tuple[str, ...]


class Release(Struct, frozen=True, tag="release"):
    """To a source: these handoffs are fetched; their KV is no longer needed."""

    request_ids: tuple[str, ...]


class Resend(Struct, frozen=True, tag="resend"):
    """To a worker: send ``request_id``'s tokens from ``seq`` on to ``reply_to`` again."""

    request_id: str
    seq: int
    reply_to: str


class Drain(Struct, frozen=True, tag="drain"):
    """To a worker: stop pulling, finish what runs within ``deadline_ms``, leave."""

    deadline_ms: int = 60_000
    spill: bool = False
    """Do not wait for KV to be fetched: move it to a tier, if the worker has one for that."""


class Undrain(Struct, frozen=True, tag="undrain"):
    """To a worker that drains and has not left yet: stay, and pull again."""


class Failpoints(Struct, frozen=True, tag="failpoints"):
    """To one process: from now on these failpoints are armed, and no others. Only for processes that were started with
    ``PDQ_FAILPOINTS``; all others ignore it."""

    setting: str
    """As in ``PDQ_FAILPOINTS``; empty: none."""


Control = Cancel | Release | Resend | Drain | Undrain | Failpoints


class OutputQuestion(Struct, frozen=True, tag="output_question"):
    """To the owner of ``reply_to`` (NATS request): which tokens of ``request_id`` do you have?"""

    request_id: str


class OutputAnswer(Struct, frozen=True):
    """``tokens`` in order from 0; ``wanted`` is False when the owner no longer wants the request."""

    request_id: str
    wanted: bool
    tokens: tuple[TokenId, ...] = ()


class StatusQuestion(Struct, frozen=True, tag="status_question"):
    """To pdq, from a producer that hears nothing or misses something (NATS request): what has become of my job?

    ``stream`` and ``sequence`` are those of the broker's acknowledgement, ``reply_to`` is the job's. What the producer
    lacks, from token ``next_seq`` on and to the end, is sent to ``reply_to`` again, as far as it is there by now.
    """

    model: str
    stream: str
    sequence: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    reply_to: str
    next_seq: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class StatusAnswer(Struct, frozen=True, omit_defaults=True):
    """``state`` is the request's, in the words of docs/states.md; or ``waiting``: no worker has taken the job yet; or
    ``unknown``: there is no such job, or not any more. It was turned away, its time in the queue ran out, or it has ended
    long ago."""

    state: Literal[
        "unknown", "waiting", "queued", "prefilling", "ready", "fetched", "done", "failed", "cancelled", "expired"
    ]
    request_id: str = ""


# --- A worker's own account -------------------------------------------------------------------------------------------


class AccountQuestion(Struct, frozen=True, tag="account_question"):
    """To a worker (NATS request): what do you hold now?"""


class Holding(Struct, frozen=True):
    """One request in a worker's hands."""

    request_id: str
    side: Side
    epoch: int
    doing: Literal["waiting", "computing", "held", "releasing", "fetching", "decoding", "finishing"]
    """``waiting`` for blocks, or for the prefill; ``held`` until a sink has fetched it; ``finishing``: computed."""
    blocks: int
    bytes: int
    """KV of the prompt, as it is offered or fetched; 0 while there is none."""
    for_ms: int
    """How long it has been doing that."""


class OfferedHandoff(Struct, frozen=True):
    request_id: str
    epoch: int


class JobInHand(Struct, frozen=True):
    """A delivered job that the worker has not acknowledged yet."""

    queue: str
    sequence: int
    for_ms: int


class AccountAnswer(Struct, frozen=True):
    """All that a worker holds, in one moment."""

    worker: str
    model: str
    holdings: tuple[Holding, ...]
    total_blocks: int
    free_blocks: int
    quarantined_blocks: int
    offers: Mapping[str, tuple[OfferedHandoff, ...]]
    """By transport: what it has on offer there."""
    jobs: tuple[JobInHand, ...]


T = TypeVar("T")
_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """``data`` as a message of ``kind``.

    Raises:
        InvalidMessage: too large, not JSON, or not this type; the message names the field.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        result: T = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise InvalidMessage(f"not a valid {name}: {error}") from error
    return result
