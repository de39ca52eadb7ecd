"""Work queues: jobs that are stored, delivered, and delivered again until somebody is done with them."""

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Final, Protocol

from msgspec import Struct

from pdq.core import names
from pdq.core.messages import Priority
from pdq.ports.bus import Subscription


class Queue(StrEnum):
    """The three work queues. Each is one JetStream work-queue stream."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"

    @property
    def stream(self) -> str:
        return _STREAMS[self]


_STREAMS: Final = {
    Queue.PREFILL: names.PREFILL_STREAM,
    Queue.DECODE: names.DECODE_STREAM,
    Queue.LOCAL: names.LOCAL_STREAM,
}


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
    ) -> int:
        """Store a job durably; returns its sequence once the broker has it.

        ``message_id`` makes a repeated publish within the broker's window a no-op. ``ttl_s`` bounds the wait in the queue.

        Raises:
            Overloaded: the stream's limit is reached.
            Unavailable: the broker does not answer. It may have the job all the same, or get it when it is back: try
                again with the same ``message_id``.
            InvalidMessage: over the broker's size limit.
        """

    async def pull(
        self,
        queue: Queue,
        model: str,
        *,
        limit: int,
        wait_s: float,
        order: Sequence[Priority] = names.PRIORITIES,
    ) -> Sequence[Delivery]:
        """Between 0 and ``limit`` jobs of one priority, the first in ``order`` that has any; returns as soon as there is at
        least one, or after ``wait_s``. ``order`` names every priority once. Cancellable: a job that was on its way to a
        cancelled pull is delivered again, after ``ack_wait`` at the latest.

        Raises:
            Unavailable: the broker was away, or did not answer, until ``wait_s`` had passed.
        """

    async def depth(self, queue: Queue, model: str) -> tuple[int, int]:
        """(waiting, delivered and not yet acknowledged)."""

    async def stored(self, queue: Queue, model: str, limit: int) -> Sequence[StoredJob] | None:
        """All jobs that nobody has acknowledged, each priority's oldest first (for operators; one round trip each).
        None: they are more than ``limit``."""

    async def find(self, queue: Queue, sequence: int) -> StoredJob | None:
        """The job at that place, delivered or not; None: somebody is done with it, or there never was one."""

    async def created_ms(self, queue: Queue) -> int:
        """When the queue's stream was made, Unix milliseconds on the broker's clock. Sequences count from then on."""

    async def dead(self, model: str) -> int:
        """How many dead letters there are."""

    async def watch_exhausted(self, on_exhausted: Callable[[Queue, bytes], Awaitable[None]]) -> Subscription:
        """Jobs that were delivered ``max_deliver`` times in vain go to the dead letters (reason ``max_deliveries``); then
        one of the watchers is called with the queue and the job's bytes. Somebody must always watch."""
