"""The seams: what stages, bridge and CLI ask of the world, one Protocol per foreign concern.

Each port has one conformance suite (``tests/conformance``) that runs over the in-memory adapter and every real one.
All methods are coroutines on the event loop's thread and none blocks it for more than a few milliseconds. Adapters
translate foreign errors into ``pdq.core.errors`` exactly once: an unreachable server is ``Unavailable``.
"""

from pdq.core.load import Load
from pdq.ports.bus import Subscription, TokenBus
from pdq.ports.engines import DecodeEngine, DecodeSeat, Drawn, PrefillEngine, PrefillRun, PromptWork, Step
from pdq.ports.kv import Buffer, ChunkPlan, Fetched, HandoffRef, KvStore, KvTransport
from pdq.ports.ledger import Changes, Grant, HandoffLedger, Locator, LogEntry, NewRecord, Record
from pdq.ports.queues import Delivery, JobQueue, Queue, StoredJob
from pdq.ports.steering import Actuator, Board, PoolReport, ScalingReport
from pdq.ports.text import Tokenizer
from pdq.ports.workers import BackendContract, Occupancy, Pool, WorkerInfo, WorkerRegistry

__all__ = [
    "Actuator",
    "BackendContract",
    "Board",
    "Buffer",
    "Changes",
    "ChunkPlan",
    "DecodeEngine",
    "DecodeSeat",
    "Delivery",
    "Drawn",
    "Fetched",
    "Grant",
    "HandoffLedger",
    "HandoffRef",
    "JobQueue",
    "KvStore",
    "KvTransport",
    "Load",
    "Locator",
    "LogEntry",
    "NewRecord",
    "Occupancy",
    "Pool",
    "PoolReport",
    "PrefillEngine",
    "PrefillRun",
    "PromptWork",
    "Queue",
    "Record",
    "ScalingReport",
    "Step",
    "StoredJob",
    "Subscription",
    "TokenBus",
    "Tokenizer",
    "WorkerInfo",
    "WorkerRegistry",
]
