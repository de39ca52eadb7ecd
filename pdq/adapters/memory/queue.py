"""The job queues in one process: a verified fake of the broker's work queues (``tests/conformance/test_queue.py``).

Everything that uses one ``MemoryQueue`` shares its jobs. Nothing survives the process.
"""

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pdq.core import names
from pdq.core.errors import InvalidMessage, Overloaded
from pdq.core.messages import MAX_MESSAGE_BYTES, Priority
from pdq.core.settings import QueueSettings
from pdq.ports import Delivery, Queue, StoredJob, Subscription


@dataclass(eq=False, slots=True)
class _Job:
    queue: Queue
    model: str
    priority: Priority
    data: bytes
    sequence: int
    published_ms: int
    expires_at: float | None
    deliveries: int = 0

    def stored(self) -> StoredJob:
        return StoredJob(self.sequence, self.published_ms, self.data)


class _Seen(NamedTuple):
    at: float
    sequence: int


class DeadLetter(NamedTuple):
    queue: Queue
    model: str
    data: bytes
    code: str
    detail: str


class MemoryDelivery:
    """See ``pdq.ports.Delivery``. Only the newest delivery of a job may still decide its fate."""

    def __init__(self, owner: "MemoryQueue", job: _Job) -> None:
        self._owner = owner
        self._job = job
        self.deliveries = job.deliveries

    @property
    def data(self) -> bytes:
        return self._job.data

    @property
    def sequence(self) -> int:
        return self._job.sequence

    @property
    def published_ms(self) -> int:
        return self._job.published_ms

    async def ack(self) -> None:
        self._owner.remove(self._job)

    async def retry(self, delay_s: float) -> None:
        self._owner.return_after(self._job, self.deliveries, delay_s)

    async def in_progress(self) -> None:
        self._owner.prolong(self._job, self.deliveries)

    async def reject(self, code: str, detail: str) -> None:
        job = self._job
        if self._owner.remove(job):
            self._owner.letters.append(DeadLetter(job.queue, job.model, job.data, code, detail))


@dataclass(eq=False, slots=True)
class _Lane:
    """The jobs of one (queue, model): ready ones per priority, those in someone's hands, and who waits."""

    ready: dict[str, deque[_Job]] = field(default_factory=lambda: {priority: deque() for priority in names.PRIORITIES})
    out: dict[_Job, float] = field(default_factory=dict)
    """When each comes back."""
    returns: list[tuple[float, int, _Job]] = field(default_factory=list)
    """Heap of (when, tie, job); an entry counts only if ``out`` still says the same."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryQueue:
    """See ``pdq.ports.JobQueue``."""

    def __init__(self, settings: QueueSettings) -> None:
        self.letters: list[DeadLetter] = []
        self._settings = settings
        self._created_ms = time.time_ns() // 1_000_000
        self._sequences = dict.fromkeys(Queue, 0)
        self._stored = dict.fromkeys(Queue, 0)
        self._lanes: dict[tuple[Queue, str], _Lane] = {}
        self._seen: dict[tuple[Queue, str], _Seen] = {}
        self._ties = itertools.count()
        self._watchers: list[Callable[[Queue, bytes], Awaitable[None]]] = []

    async def ensure_streams(self) -> None:
        """Nothing to set up; here so that either adapter is used the same way."""

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
        if len(data) > MAX_MESSAGE_BYTES - _HEADER_ROOM:
            raise InvalidMessage(f"a job of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES - _HEADER_ROOM}")
        now = time.monotonic()
        if message_id is not None:
            self._forget_old_ids(now)
            if (seen := self._seen.get((queue, message_id))) is not None:
                return seen.sequence
        for lane in self._lanes.values():
            self._expire(lane, now)
        if self._stored[queue] >= self._settings.max_messages:
            raise Overloaded(f"{queue} is full: maximum messages exceeded")
        self._sequences[queue] += 1
        self._stored[queue] += 1
        expires_at = None if ttl_s is None else now + ttl_s
        job = _Job(queue, model, priority, data, self._sequences[queue], time.time_ns() // 1_000_000, expires_at)
        lane = self._lane(queue, model)
        lane.ready[priority].append(job)
        lane.wake.set()
        if message_id is not None:
            self._seen[queue, message_id] = _Seen(now, job.sequence)
        return job.sequence

    async def pull(
        self,
        queue: Queue,
        model: str,
        *,
        limit: int,
        wait_s: float,
        order: Sequence[Priority] = names.PRIORITIES,
    ) -> Sequence[Delivery]:
        lane = self._lane(queue, model)
        deadline = time.monotonic() + wait_s
        while limit > 0:
            now = time.monotonic()
            await self._take_back(lane, now)
            self._expire(lane, now)
            if jobs := self._take(lane, limit, now, order):
                return [MemoryDelivery(self, job) for job in jobs]
            if now >= deadline:
                break
            lane.wake.clear()
            soonest = min(deadline, lane.returns[0][0]) if lane.returns else deadline
            try:
                async with asyncio.timeout(max(soonest - now, 0)):
                    await lane.wake.wait()
            except TimeoutError:
                continue
        return []

    async def depth(self, queue: Queue, model: str) -> tuple[int, int]:
        lane = self._lane(queue, model)
        self._expire(lane, time.monotonic())
        return sum(map(len, lane.ready.values())), len(lane.out)

    async def stored(self, queue: Queue, model: str, limit: int) -> Sequence[StoredJob] | None:
        lane = self._lane(queue, model)
        self._expire(lane, time.monotonic())
        jobs = sorted((*itertools.chain(*lane.ready.values()), *lane.out), key=lambda job: job.sequence)
        if len(jobs) > limit:
            return None
        return [job.stored() for priority in names.PRIORITIES for job in jobs if job.priority == priority]

    async def find(self, queue: Queue, sequence: int) -> StoredJob | None:
        for (place, _), lane in self._lanes.items():
            self._expire(lane, time.monotonic())
            for job in (*itertools.chain(*lane.ready.values()), *lane.out):
                if (place, job.sequence) == (queue, sequence):
                    return job.stored()
        return None

    async def created_ms(self, queue: Queue) -> int:
        return self._created_ms

    async def dead(self, model: str) -> int:
        return sum(letter.model == model for letter in self.letters)

    async def watch_exhausted(self, on_exhausted: Callable[[Queue, bytes], Awaitable[None]]) -> Subscription:
        self._watchers.append(on_exhausted)
        return _Watch(self._watchers, on_exhausted)

    # --- For deliveries ---

    def remove(self, job: _Job) -> bool:
        """The job is out of the queue; False if it was already."""
        lane = self._lane(job.queue, job.model)
        if lane.out.pop(job, None) is None:
            if job not in lane.ready[job.priority]:
                return False
            lane.ready[job.priority].remove(job)
        self._stored[job.queue] -= 1
        return True

    def return_after(self, job: _Job, delivery: int, delay_s: float) -> None:
        lane = self._lane(job.queue, job.model)
        if job in lane.out and job.deliveries == delivery:
            self._put_out(lane, job, time.monotonic() + delay_s)
            lane.wake.set()

    def prolong(self, job: _Job, delivery: int) -> None:
        lane = self._lane(job.queue, job.model)
        if job in lane.out and job.deliveries == delivery:
            self._put_out(lane, job, time.monotonic() + self._settings.ack_wait_s)

    # --- Inside ---

    def _lane(self, queue: Queue, model: str) -> _Lane:
        lane = self._lanes.get((queue, model))
        if lane is None:
            lane = self._lanes[queue, model] = _Lane()
        return lane

    def _take(self, lane: _Lane, limit: int, now: float, order: Sequence[Priority]) -> list[_Job]:
        for priority in order:
            if ready := lane.ready[priority]:
                jobs = [ready.popleft() for _ in range(min(limit, len(ready)))]
                for job in jobs:
                    job.deliveries += 1
                    self._put_out(lane, job, now + self._settings.ack_wait_s)
                return jobs
        return []

    def _put_out(self, lane: _Lane, job: _Job, back_at: float) -> None:
        lane.out[job] = back_at
        heapq.heappush(lane.returns, (back_at, next(self._ties), job))

    async def _take_back(self, lane: _Lane, now: float) -> None:
        """Jobs that nobody acknowledged in time are ready again, first in line; or exhausted."""
        back: list[_Job] = []
        while lane.returns and lane.returns[0][0] <= now:
            back_at, _, job = heapq.heappop(lane.returns)
            if lane.out.get(job) == back_at:
                back.append(job)
        for job in reversed(back):
            if job.deliveries < self._settings.max_deliver:
                del lane.out[job]
                lane.ready[job.priority].appendleft(job)
            elif self._watchers and self.remove(job):
                detail = f"delivered {job.deliveries} times without an acknowledgement"
                self.letters.append(DeadLetter(job.queue, job.model, job.data, "max_deliveries", detail))
                await self._watchers[0](job.queue, job.data)

    def _expire(self, lane: _Lane, now: float) -> None:
        for priority, ready in lane.ready.items():
            kept = deque(job for job in ready if job.expires_at is None or job.expires_at > now)
            if gone := len(ready) - len(kept):
                self._stored[ready[0].queue] -= gone
                lane.ready[priority] = kept

    def _forget_old_ids(self, now: float) -> None:
        for key, seen in list(self._seen.items()):
            if now - seen.at <= self._settings.duplicate_window_s:
                break
            del self._seen[key]


class _Watch:
    def __init__(
        self,
        watchers: list[Callable[[Queue, bytes], Awaitable[None]]],
        watcher: Callable[[Queue, bytes], Awaitable[None]],
    ) -> None:
        self._watchers = watchers
        self._watcher = watcher

    async def close(self) -> None:
        if self._watcher in self._watchers:
            self._watchers.remove(self._watcher)


_HEADER_ROOM: Final = 2048
