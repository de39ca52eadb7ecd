"""Every setting, once: frozen, grouped by concern, units in the names, defaults here and nowhere else.

``pdq.core.environment`` reads them.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pdq.core.messages import Policy

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Milliseconds = Annotated[float, Meta(ge=0)]
Delay = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Replicas = Annotated[int, Meta(ge=0, le=10_000)]
Weights = dict[str, Annotated[float, Meta(gt=0)]]
Transports = tuple[Literal["ucx", "shm", "redis", "memory"], ...]
Url = Annotated[str, Meta(title="URL")]
"""May carry a user and a password."""


class Secret:
    """Text that no log, message or representation shows; only ``reveal`` does. False if empty."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "***" if self else ""


class SecretLines(Secret):
    """A secret of one or more lines."""


class NatsSettings(Struct, frozen=True):
    url: Url = "nats://127.0.0.1:4222"
    """Comma-separated for a cluster. ``tls://`` accepts no server that does not offer TLS."""
    connect_timeout_s: Seconds = 5.0
    """How long a program that starts waits for the first connection."""
    user: str = ""
    """With ``password``. They win over those in the URL."""
    password: Secret = Secret()
    """See ``user``."""
    token: Secret = Secret()
    """Instead of user and password."""
    credentials: str = ""
    """File with a user's JWT and seed, as ``nsc`` writes it; instead of user and password. Read again at each reconnect."""
    tls_ca: str = ""
    """File with the certificates (PEM) that may sign the server's, instead of the system's. Setting it demands TLS."""
    tls_cert: str = ""
    """File with this client's own certificate (PEM), where the server asks for one. Setting it demands TLS."""
    tls_key: str = ""
    """File with the private key of ``tls_cert``."""

    def __repr__(self) -> str:
        return f"NatsSettings(user={self.user!r}, password={self.password}, token={self.token}, ...)"


class RedisSettings(Struct, frozen=True):
    url: Url = "redis://127.0.0.1:6379/0"
    """Redis or Valkey: ``redis://``, or ``rediss://`` for TLS."""
    timeout_s: Seconds = 5.0
    """For connecting, and for one command."""
    username: str = ""
    """With ``password``, if the server has users."""
    password: Secret = Secret()
    """Instead of one in the URL."""
    tls_ca: str = ""
    """File with certificates (PEM) that may sign the server's, besides the system's. For ``rediss://``."""
    tls_cert: str = ""
    """File with this client's own certificate (PEM), where the server asks for one. For ``rediss://``."""
    tls_key: str = ""
    """File with the private key of ``tls_cert``."""

    def __repr__(self) -> str:
        return f"RedisSettings(username={self.username!r}, password={self.password}, ...)"


class LeaseSettings(Struct, frozen=True):
    ttl_ms: Annotated[int, Meta(ge=100)] = 10_000
    """Renewed at a third. After a holder's death nothing of it is left after this plus one reaper period."""
    reaper_period_ms: Annotated[int, Meta(ge=10)] = 1_000
    """How often the reaper looks for what has run out."""
    ended_ttl_s: Positive = 600
    """How long an ended record (and its log, for ``pdq trace``) stays readable."""


class QueueSettings(Struct, frozen=True):
    ack_wait_s: Seconds = 10.0
    """An unacknowledged job is delivered again after this; holders say "in progress" at a third."""
    max_deliver: Positive = 100
    """A guard, far above what ``policy.max_attempts`` allows."""
    max_messages: Positive = 200_000
    """Per stream; past it, publishing is refused."""
    duplicate_window_s: Seconds = 120.0
    """A publish with the same ``Nats-Msg-Id`` within this time is a no-op."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Copies of each stream, over as many servers of a cluster."""


class TransportSettings(Struct, frozen=True):
    order: Transports = ("ucx", "shm", "redis")
    """The order in which a sink tries a handoff's locators. A source offers on the first of them and on ``ucx`` if it is
    named at all; ``shm`` and ``redis`` further down, which copy every byte, only if they are in ``write_through``."""
    write_through: Transports = ()
    """Tiers that get a copy of every handoff as it is computed. A tier outlives its source's process: the copy is kept
    until the request has ended."""
    spill: Transports = ()
    """The tier to which a prefill worker moves KV that nobody has fetched yet, when it must leave or when that KV keeps it
    from serving others; none: it is computed again then, or waited for."""
    fetch_timeout_s: Seconds = 30.0
    """A sink gives a transport up when nothing has come for this long."""
    ucx_host: str = "127.0.0.1"
    """Where the UCX listener binds and what goes into its locators."""
    shm_dir: str = "/dev/shm"
    """Where shared-memory segments lie: a memory file system that all workers of this host see."""
    tier_ttl_s: Seconds = 120.0
    """TTL of a tier's objects: a dead writer leaves nothing."""


class EngineSettings(Struct, frozen=True):
    device: str = "auto"
    """``auto``: CUDA where there is a device, else CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: float32 on CPU, the checkpoint's own elsewhere."""
    block_size: Positive = 16
    """Tokens in one KV block."""
    chunk_tokens: Positive = 256
    """Prompt tokens that are computed, offered and hashed at a time; a multiple of ``block_size``."""
    kv_tokens: Positive = 16_384
    """KV capacity of one worker, in tokens."""
    max_running: Positive = 64
    """Requests that one worker computes or holds at a time."""
    max_output_tokens: Positive = 4_096
    """Bound on ``max_tokens``, and its default together with what the context leaves."""


class SimSettings(Struct, frozen=True):
    """The engine without a model."""

    prefill_ms_per_token: Milliseconds = 0.0
    """Pretended time for one prompt token."""
    step_ms: Milliseconds = 0.0
    """Pretended time for one batched decode step."""
    kv_bytes_per_token: Positive = 1_024
    """Size of the pretended KV, which is really moved."""
    max_context: Positive = 32_768
    """Prompt and output together, in tokens."""


class HandoffSettings(Struct, frozen=True):
    order: Literal["on_start", "on_first_chunk", "on_complete"] = "on_complete"
    """When the decode job is published: from "transfer overlaps compute" to "late binding of the decode worker"."""
    mode: Literal["disaggregated", "aggregated", "auto"] = "disaggregated"
    """``aggregated``: one worker does both halves. ``auto``: decided for each request."""
    auto_local_tokens: Positive = 64
    """``auto``: prompts up to this many tokens are prefilled by a decode worker."""
    default_timeout_ms: Positive = 600_000
    """For requests that name none: queue, prefill, handoff and decode together."""
    max_timeout_ms: Positive = 3_600_000
    """What a request may ask for at most."""


class BridgeSettings(Struct, frozen=True):
    host: str = "127.0.0.1"
    """Where the OpenAI API listens."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: a free one."""
    max_body_bytes: Positive = 4 * 1024 * 1024
    """Larger HTTP bodies are refused."""
    api_keys: SecretLines = SecretLines()
    """Who may ask, a line each: ``KEY TENANT [CLASS]``, the class being the best that this key may ask for (``interactive``
    if none is named). Not set: everybody may."""
    silence_s: Seconds = 5.0
    """A stream that is silent for this long is compared with its record."""


class DrainSettings(Struct, frozen=True):
    deadline_s: Seconds = 60.0
    """How long a program that got SIGTERM finishes what it has; then it stops, and releases what is left."""


class AdmissionSettings(Struct, frozen=True):
    """What may be accepted, per model. See ``pdq.core.admission``."""

    without_workers: Literal["wait", "refuse"] = "wait"
    """What becomes of requests while a pool has no worker: they ``wait`` in the queue for one to be started, or are
    refused."""

    interactive_queued_tokens: Positive = 1_048_576
    """Prompt tokens that may wait for prefill, class interactive."""
    interactive_queued_requests: Positive = 2_048
    """Requests that may wait for prefill, class interactive."""
    batch_queued_tokens: Positive = 4_194_304
    """Prompt tokens that may wait for prefill, class batch."""
    batch_queued_requests: Positive = 16_384
    """Requests that may wait for prefill, class batch."""
    interactive_wait_s: Seconds = 60.0
    """Longest estimated wait with which a request of class interactive is accepted. When more comes than can be served, it
    is this wait that everybody has: set it to the time to the first token that you promise."""
    batch_wait_s: Seconds = 3_600.0
    """Longest estimated wait with which a request of class batch is accepted."""
    batch_share: Share = 0.8
    """Batch is refused from this share of decode memory on, so that interactive requests find the rest."""
    batch_turn: Annotated[int, Meta(ge=2)] = 8
    """While both classes wait, every so many-th pull takes batch first: it gives way, but does not starve."""
    decode_overcommit: Annotated[float, Meta(gt=0, le=100)] = 4.0
    """Tokens that may be reserved by everything accepted, as a multiple of the decode pool's KV capacity."""
    handoffs_per_prefill_worker: Positive = 16
    """Prompts that one prefill worker may hold computed and not yet fetched; at that many it does not pull."""
    transfers_per_worker: Positive = 8
    """KV transfers that one decode worker runs at a time."""
    tenant_requests: Positive = 100_000
    """Requests that one tenant may have here at a time."""
    tenant_reserved_tokens: Positive = 1_000_000_000
    """Tokens (prompts and reserved output) that one tenant may have here at a time."""
    tenant_weights: Weights = {}
    """``name=weight`` pairs; every other tenant weighs 1."""
    fair_above: Share = 0.5
    """From this share of what a class may queue or reserve on, a tenant may have no more than its weighted part of it."""
    retry_min_s: Seconds = 1.0
    """Shortest ``Retry-After``, and what is said where nothing was measured."""
    retry_max_s: Seconds = 60.0
    """Longest ``Retry-After``."""


class ScalingSettings(Struct, frozen=True):
    """How the pools follow the load. See ``pdq.core.scaling``; a *target* is aimed at, an *activation* starts growth."""

    period_s: Seconds = 5.0
    """Time between two decisions."""
    prefill_min: Replicas = 1
    """Fewest prefill workers; with ``decode_min`` also 0, both pools go to zero together."""
    prefill_max: Replicas = 8
    """Most prefill workers."""
    decode_min: Replicas = 1
    """Fewest decode workers."""
    decode_max: Replicas = 8
    """Most decode workers."""
    prefill_wait_target_s: Seconds = 0.5
    """How long a prompt may wait for a prefill worker."""
    prefill_wait_activation_s: Seconds = 1.0
    """From this estimated wait on, prefill grows."""
    prefill_utilization_target: Share = 0.55
    """Of the time, what a prefill worker computes."""
    prefill_utilization_activation: Share = 0.75
    """From this utilization on, prefill grows even if nothing waits."""
    decode_sequences_target: Positive = 32
    """Sequences in one decode worker: what the inter-token time allows."""
    decode_sequences_activation: Positive = 44
    """From so many per worker on, decode grows."""
    decode_kv_target: Share = 0.7
    """Of a decode worker's KV memory, what is reserved."""
    decode_kv_activation: Share = 0.9
    """From this share on, decode grows."""
    handoffs_activation: Positive = 4
    """So many handoffs waiting per decode worker are a pile: decode grows, and prefill does not."""
    step_factor: Annotated[float, Meta(gt=1)] = 2.0
    """One decision multiplies or divides a pool by no more than this."""
    out_window_s: Delay = 5.0
    """Growth must have been called for by every observation of this long."""
    in_window_s: Seconds = 300.0
    """A pool shrinks to the most that any observation of this long has called for."""
    out_cooldown_s: Delay = 10.0
    """Least time from one change of a pool to its next growth."""
    in_cooldown_s: Delay = 60.0
    """Least time from one change of a pool to its next shrinking."""
    idle_s: Seconds = 300.0
    """With nothing to do for this long, pools that may go to zero do."""
    startup_s: Seconds = 20.0
    """About how long a new worker takes to become ready: a queue that will be gone by then calls for none."""
    ready_within_s: Seconds = 180.0
    """A worker that takes longer to become ready is no longer counted on."""
    metrics_host: str = "127.0.0.1"
    """Where the autoscaler's own metrics are served."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: a free one, which is logged. Give it a number where something scrapes it."""


class KubernetesSettings(Struct, frozen=True):
    """Where the pools are Deployments. See ``pdq.adapters.kubernetes``."""

    namespace: str = ""
    """Of the two Deployments; not set: the pod's own, or that of the kubeconfig's context."""
    prefill_deployment: str = "pdq-prefill"
    """The Deployment of the prefill workers; the chart's is ``<release>-prefill``."""
    decode_deployment: str = "pdq-decode"
    """The Deployment of the decode workers."""
    context: str = ""
    """Of the kubeconfig; not set: its current one. In a pod, setting it means: use a kubeconfig."""
    kubeconfig: str = ""
    """File; not set: ``KUBECONFIG``, or ``~/.kube/config``. In a pod, setting it means: use it."""
    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """In a pod: the directory with its token, the API server's certificate authority and the namespace."""
    timeout_s: Seconds = 10.0
    """For one request to the API server."""


class Settings(Struct, frozen=True):
    nats: NatsSettings = NatsSettings()
    redis: RedisSettings = RedisSettings()
    lease: LeaseSettings = LeaseSettings()
    queue: QueueSettings = QueueSettings()
    transport: TransportSettings = TransportSettings()
    engine: EngineSettings = EngineSettings()
    sim: SimSettings = SimSettings()
    handoff: HandoffSettings = HandoffSettings()
    policy: Policy = Policy()
    bridge: BridgeSettings = BridgeSettings()
    drain: DrainSettings = DrainSettings()
    admission: AdmissionSettings = AdmissionSettings()
    scaling: ScalingSettings = ScalingSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
