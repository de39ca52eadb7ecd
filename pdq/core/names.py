"""Every subject, stream, consumer, header and key that pdq puts on the wire, once.

Model names may hold any character (``org/model.v1``); in subjects and consumer names they appear as ``token(model)``.
Redis keys carry the model as a hash tag, ``{model}``, so that all keys of one script live in one cluster slot.
"""

from typing import Final
from urllib.parse import quote, unquote

# --- NATS: jobs (JetStream) -------------------------------------------------------------------------------------------

PREFILL_STREAM: Final = "PDQ_PREFILL"
DECODE_STREAM: Final = "PDQ_DECODE"
LOCAL_STREAM: Final = "PDQ_LOCAL"
DEAD_STREAM: Final = "PDQ_DEAD"

DEAD_SUBJECTS: Final = "pdq.dead.>"

PRIORITIES: Final = ("interactive", "batch")
"""Most urgent first."""

HEADER_MSG_ID: Final = "Nats-Msg-Id"
HEADER_TTL: Final = "Nats-TTL"
HEADER_DEAD_REASON: Final = "Pdq-Reason"
HEADER_DEAD_DETAIL: Final = "Pdq-Detail"
HEADER_DEAD_SUBJECT: Final = "Pdq-Subject"


def token(model: str) -> str:
    """``model`` as one NATS subject token: letters, digits, ``-`` and ``_`` stay, all else is %XX with ``=`` for ``%``."""
    return quote(model, safe="").replace(".", "%2E").replace("~", "%7E").replace("%", "=")


def model_of(job_subject: str) -> str:
    """The model to which a job published on this subject belongs."""
    return unquote(job_subject.split(".")[3].replace("=", "%"))


def prefill_subject(model: str, priority: str = "interactive") -> str:
    """Where a ``PrefillJob`` for ``model`` is published."""
    return f"pdq.jobs.prefill.{token(model)}.{priority}"


def decode_subject(model: str, priority: str = "interactive") -> str:
    """Where a ``DecodeJob`` for ``model`` is published (by pdq's own workers only)."""
    return f"pdq.jobs.decode.{token(model)}.{priority}"


def local_subject(model: str, priority: str = "interactive") -> str:
    """Where a ``PrefillJob`` goes that one worker shall prefill and decode (aggregated)."""
    return f"pdq.jobs.local.{token(model)}.{priority}"


def dead_subject(queue: str, model: str) -> str:
    """Where a rejected job of ``queue`` ends, with its reason in the headers."""
    return f"pdq.dead.{queue}.{token(model)}"


def place(stream: str, sequence: int) -> str:
    """Where a job lies, as the broker's acknowledgement says it to whoever published the job."""
    return f"{stream}:{sequence}"


def consumer(model: str, priority: str = "interactive") -> str:
    """The durable pull consumer that all workers of one queue and model share, one per priority."""
    return f"workers-{priority}-{token(model)}"


# --- NATS: tokens and control (core) ----------------------------------------------------------------------------------


def reply_subject(owner: str) -> str:
    """Where one process (a bridge, a CLI) receives the token frames of all its requests."""
    return f"pdq.tokens.{owner}"


def worker_subject(worker: str) -> str:
    """Control messages for one worker: ``Release``, ``Resend``, ``Drain``, ``Failpoints``."""
    return f"pdq.control.worker.{worker}"


def account_subject(worker: str) -> str:
    """Where a worker is asked (NATS request) what it holds."""
    return f"{worker_subject(worker)}.account"


STATUS_SUBJECT: Final = "pdq.status"
"""Where a producer asks (NATS request) what has become of its job."""


def publishable(subject: str) -> bool:
    """May frames be sent there? A requester names its own subject, never one of pdq's own or the broker's."""
    tokens = subject.split(".")
    reserved = subject.startswith(("$", "pdq.jobs.", "pdq.control.", "pdq.dead.", STATUS_SUBJECT))
    return not reserved and all(part and not set(part) & set("*> \t\r\n") for part in tokens)


CANCEL_SUBJECT: Final = "pdq.control.cancel"

# --- Redis / Valkey ---------------------------------------------------------------------------------------------------

MODELS_KEY: Final = "pdq:models"
WORKERS_KEY: Final = "pdq:workers"
SALT_KEY: Final = "pdq:salt"


def record_key(model: str, request_id: str) -> str:
    """Hash: the handoff record."""
    return f"pdq:{{{model}}}:record:{request_id}"


def log_key(model: str, request_id: str) -> str:
    """List: one entry per applied transition, for ``pdq trace``."""
    return f"pdq:{{{model}}}:log:{request_id}"


def job_key(model: str, job: str) -> str:
    """String with TTL: the id of the request whose job lies, or lay, at ``job`` (see ``place``)."""
    return f"pdq:{{{model}}}:job:{job}"


def load_key(model: str) -> str:
    """Hash: requests, prompt tokens and reserved tokens, counted by state, class and tenant."""
    return f"pdq:{{{model}}}:load"


def due_key(model: str) -> str:
    """Sorted set: request id by the earliest instant (ms) at which a lease or the deadline runs out, or a look is due."""
    return f"pdq:{{{model}}}:due"


def board_key(model: str, what: str) -> str:
    """What steers a model's pools: ``fixed`` (hash: pool -> replicas), ``away`` (set of workers), ``leader`` and ``report``
    (strings with a TTL)."""
    return f"pdq:{{{model}}}:board:{what}"


def tier_key(model: str, request_id: str, epoch: int, part: str) -> str:
    """String: one chunk (``part`` is its index) or the header (``head``) of KV bytes in the Redis tier."""
    return f"pdq:{{{model}}}:kv:{request_id}:{epoch}:{part}"


TIER_KEYS: Final = "pdq:{*}:kv:*"
"""A pattern for every ``tier_key``."""


def of_tier_key(key: str) -> tuple[str, str, int]:
    """Model, request id and epoch of a ``tier_key``."""
    model, request_id, epoch, _ = key.rsplit(":", 3)
    return model.removeprefix("pdq:{").removesuffix("}:kv"), request_id, int(epoch)


def worker_key(worker: str) -> str:
    """String with TTL: what a live worker says of itself (contract, capacity, occupancy)."""
    return f"pdq:worker:{worker}"


def last_worker_key(model: str) -> str:
    """String: what the last worker of this model that said anything has said of itself. It stays when all have gone."""
    return f"pdq:worker:of:{{{model}}}"


# --- Environment, shared memory ---------------------------------------------------------------------------------------

SHM_PREFIX: Final = "pdq-kv-"

ENV_NATS_URL: Final = "PDQ_NATS_URL"
ENV_REDIS_URL: Final = "PDQ_REDIS_URL"
ENV_BRIDGE_URL: Final = "PDQ_BRIDGE_URL"

HEADER_REQUEST_ID: Final = "x-request-id"
HEADER_CLIENT_REQUEST_ID: Final = "x-client-request-id"
HEADER_TIMEOUT_MS: Final = "x-request-timeout-ms"
HEADER_PRIORITY: Final = "x-pdq-priority"
HEADER_TENANT: Final = "x-pdq-tenant"
