"""JetStream's JSON API, as far as the queues need it: typed requests, the streams, and what its refusals mean."""

import logging
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from pdq.adapters.nats.connection import Connection, status
from pdq.core import names
from pdq.core.errors import InvalidMessage, InvalidSettings, Overloaded, PdqError, Unavailable
from pdq.core.settings import QueueSettings
from pdq.ports import Queue

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 5.0
DEAD_MAX_AGE_S: Final = 7 * 24 * 3600
SUBJECTS: Final = {
    Queue.PREFILL: names.prefill_subject,
    Queue.DECODE: names.decode_subject,
    Queue.LOCAL: names.local_subject,
}
"""(model, priority) -> where a job is published."""

STREAM_NOT_FOUND: Final = 10059
CONSUMER_NOT_FOUND: Final = 10014
MESSAGE_NOT_FOUND: Final = 10037
_NAME_IN_USE: Final = 10058
_STORE_FAILED: Final = 10077
_MESSAGE_TOO_LARGE: Final = 10054
_STORAGE_EXHAUSTED: Final = frozenset({10023, 10028, 10047})

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Fault(Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Answer(Struct):
    """What every API answer and publish acknowledgement may carry."""

    error: Fault | None = None


class ApiRefused(Exception):
    """JetStream said no. Translated by whoever asked: what it means depends on the question."""

    def __init__(self, subject: str, fault: Fault) -> None:
        super().__init__(f"{subject}: {fault.description} ({fault.err_code})")
        self.fault = fault


async def ask(connection: Connection, verb: str, request: Any = None, kind: type[T] | None = None) -> T:
    """One API call; the answer as ``kind`` (a ``dict`` by default).

    Raises:
        ApiRefused: JetStream answered with an error.
        Unavailable: no answer, or no JetStream there.
    """
    subject = f"{API}.{verb}"
    body = b"" if request is None else msgspec.json.encode(request)
    message = await connection.request(subject, body, timeout_s=API_TIMEOUT_S)
    if status(message) == 503:
        raise Unavailable(f"NATS at {connection.where} runs without JetStream, or it is still starting")
    fault = msgspec.json.decode(message.data, type=Answer).error
    if fault is not None:
        raise ApiRefused(subject, fault)
    return msgspec.json.decode(message.data, type=kind or dict[str, Any])  # type: ignore[return-value]


def refusal_of_publish(fault: Fault, stream: str) -> PdqError:
    """What a publisher shall do about a refusal."""
    if fault.err_code == _MESSAGE_TOO_LARGE:
        return InvalidMessage(f"{stream} takes no message of this size: {fault.description}")
    if fault.err_code in _STORAGE_EXHAUSTED or (
        fault.err_code == _STORE_FAILED and fault.description.startswith("maximum")
    ):
        return Overloaded(f"{stream} is full: {fault.description}")
    return Unavailable(f"{stream} did not store the message: {fault.description} ({fault.err_code})")


def stream_configs(settings: QueueSettings) -> list[dict[str, Any]]:
    window_ns = _ns(settings.duplicate_window_s)
    common = {
        "storage": "file",
        "max_msgs": settings.max_messages,
        "num_replicas": settings.replicas,
        "duplicate_window": window_ns,
    }
    work = [
        {
            "name": queue.stream,
            # Per known priority, not ">": a job for a priority that nobody serves is refused, not kept for ever.
            "subjects": [SUBJECTS[queue]("", priority).replace("..", ".*.") for priority in names.PRIORITIES],
            "retention": "workqueue",
            "discard": "new",
            "allow_msg_ttl": True,
            **common,
        }
        for queue in Queue
    ]
    dead = {
        "name": names.DEAD_STREAM,
        "subjects": [names.DEAD_SUBJECTS],
        "retention": "limits",
        "discard": "old",
        "max_age": _ns(DEAD_MAX_AGE_S),
        **common,
    }
    return [*work, dead]


async def ensure_stream(connection: Connection, config: dict[str, Any]) -> None:
    """Create the stream, or bring an existing one to ``config``. Safe when several processes do it at once.

    Raises:
        InvalidSettings: JetStream refuses this configuration (the message says why and what differs).
        Unavailable: JetStream does not answer.
    """
    name = config["name"]
    try:
        try:
            found: dict[str, Any] = await ask(connection, f"STREAM.INFO.{name}")
        except ApiRefused as error:
            if error.fault.err_code != STREAM_NOT_FOUND:
                raise
            try:
                await ask(connection, f"STREAM.CREATE.{name}", config)
                return
            except ApiRefused as lost_race:
                if lost_race.fault.err_code != _NAME_IN_USE:
                    raise
            found = await ask(connection, f"STREAM.INFO.{name}")
        existing: dict[str, Any] = found["config"]
        changes = {key: value for key, value in config.items() if existing.get(key) != value}
        if changes:
            before = {key: existing.get(key) for key in changes}
            await ask(connection, f"STREAM.UPDATE.{name}", {**existing, **changes})
            _log.warning("stream %s: changed from %s to %s", name, before, changes)
    except ApiRefused as error:
        fault = error.fault
        if fault.code == 503:
            raise Unavailable(f"JetStream cannot set up stream {name} now: {fault.description}") from error
        raise InvalidSettings(
            f"stream {name} cannot be given the configuration {config}: {fault.description}; "
            "change the PDQ_QUEUE_ settings, or remove the stream if nothing in it is needed"
        ) from error


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
