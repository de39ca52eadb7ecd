"""The loop between a work queue and a worker: pull while there is room and the worker serves, handle, give the verdict.

What becomes of a job is ``pdq.core.delivery.verdict`` of the error that ended its handling, and is carried out here
and nowhere else. A job whose handling is cut by shutdown goes back to the queue at once.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from pdq import failpoints
from pdq.core import admission
from pdq.core.delivery import Ack, Leave, Reject, Retry, verdict
from pdq.core.errors import PdqError
from pdq.core.messages import JobInHand
from pdq.ports import Delivery, Queue
from pdq.runtime import Lifecycle, Trouble
from pdq.stages.account import elapsed_ms
from pdq.stages.keepalive import Keepalive
from pdq.stages.parts import Parts
from pdq.stages.room import Room

log = logging.getLogger(__name__)

PULL_WAIT_S = 5.0

FAILPOINTS: Final = {
    Queue.PREFILL: ("prefill.delivered", "prefill.before_ack"),
    Queue.DECODE: ("decode.delivered", "decode.before_ack"),
    Queue.LOCAL: ("local.delivered", "local.before_ack"),
}

Handle = Callable[[Delivery], Awaitable[None]]


class Consumer:
    """Pulls one queue for one model, and runs every job's handling as a task of its own."""

    def __init__(
        self,
        parts: Parts,
        queue: Queue,
        room: Room,
        free: Callable[[], int],
        handle: Handle,
        keepalive: Keepalive,
    ) -> None:
        """``free``: how many jobs of this queue may be pulled now; ``room`` knows when to ask again."""
        self._parts = parts
        self._queue = queue
        self._room = room
        self._free = free
        self._handle = handle
        self._keepalive = keepalive
        self._pulls = 0
        self._pulling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_hand: dict[Delivery, float] = {}

    def __len__(self) -> int:
        """How many jobs were pulled and have no verdict yet."""
        return len(self._in_hand)

    @property
    def idle(self) -> bool:
        """It does not pull, and has no job in hand."""
        return not self._pulling and not self._in_hand

    def in_hand(self) -> list[JobInHand]:
        """The jobs that have no verdict yet."""
        return [
            JobInHand(self._queue.value, delivery.sequence, elapsed_ms(since))
            for delivery, since in self._in_hand.items()
        ]

    async def run(self, lifecycle: Lifecycle) -> None:
        """Pull while the worker serves, and not while it drains; forever. Cancelling cuts the jobs in hand off."""
        try:
            while True:
                await lifecycle.serving.wait()
                self._pulling = True
                try:
                    await lifecycle.until(lifecycle.draining, self._pull_forever())
                finally:
                    self._pulling = False
                    self._room.changed()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pull_forever(self) -> None:
        trouble = Trouble(log, f"pulling from {self._queue}")
        while True:
            await self._room.until(lambda: self._free() > 0)
            order = admission.pull_order(self._pulls, self._parts.settings.admission)
            try:
                deliveries = await self._parts.jobs.pull(
                    self._queue, self._parts.model, limit=self._free(), wait_s=PULL_WAIT_S, order=order
                )
            except PdqError as error:
                trouble.fails(error)
                await asyncio.sleep(0.5)
                continue
            trouble.works()
            self._pulls += 1
            for delivery in deliveries:
                task = asyncio.create_task(self._one(delivery))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            # Let the new handlings take their room before it is asked for again.
            await asyncio.sleep(0)

    async def _one(self, delivery: Delivery) -> None:
        self._in_hand[delivery] = time.monotonic()
        try:
            with self._keepalive.in_progress(delivery):
                error = await self._outcome(delivery)
            await self._conclude(delivery, error)
        except asyncio.CancelledError:
            with contextlib.suppress(PdqError):
                await delivery.retry(0)
            raise
        except PdqError as error:
            # The broker or ledger is away: the job comes back by itself after ack_wait.
            log.warning("no verdict for job %s/%d (%s): %s", self._queue, delivery.sequence, error.code, error)
        finally:
            del self._in_hand[delivery]
            self._room.changed()

    async def _outcome(self, delivery: Delivery) -> Exception | None:
        delivered, _ = FAILPOINTS[self._queue]
        try:
            if failpoints.armed:
                await failpoints.hit(delivered)
            await self._handle(delivery)
        except Exception as error:
            return error
        return None

    async def _conclude(self, delivery: Delivery, error: Exception | None) -> None:
        _, before_ack = FAILPOINTS[self._queue]
        if failpoints.armed and await failpoints.hit(before_ack):
            return
        match verdict(error, delivery.deliveries):
            case Ack():
                if error is not None:
                    log.debug("job %s/%d let go: %s", self._queue, delivery.sequence, error)
                await delivery.ack()
            case Leave():
                log.debug("job %s/%d left to whoever has it: %s", self._queue, delivery.sequence, error)
            case Retry(delay_s):
                log.info("job %s/%d again in %.2f s: %s", self._queue, delivery.sequence, delay_s, error)
                await delivery.retry(delay_s)
            case Reject(code, detail):
                expected = isinstance(error, PdqError)
                log.error(
                    "job %s/%d rejected (%s): %s",
                    *(self._queue, delivery.sequence, code, detail),
                    exc_info=None if expected else error,
                )
                await delivery.reject(code, detail)
