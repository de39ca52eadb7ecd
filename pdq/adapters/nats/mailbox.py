"""Pulling: one process's requests for the jobs of one (queue, model), over all its priorities.

A pull first *sweeps* each priority's consumer, in the order that the caller wants: "give me up to N now, or say that
there is none". The broker ends every answer by its count or by a status, so a sweep knows when it has all. Only if all
are empty does the pull *linger*: one standing request for a single job per consumer, answered the moment a job
arrives. Standing requests outlive the pull that made them and serve the next one, so an idle worker costs the broker
one message per ``LINGER_S`` and priority, and a job that comes in meanwhile takes one hop. A consumer with an open
standing request is not swept: it has nothing, or the request would have ended.

A job that arrives for nobody (its pull was cancelled, or ended by another priority's job) is handed back at once, and
the broker gives it to another worker. What was asked before the connection was lost is forgotten on both sides.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
from nats.aio.msg import Msg

from pdq.adapters.nats.connection import Connection, description, status
from pdq.adapters.nats.jetstream import API
from pdq.core.errors import Unavailable
from pdq.core.messages import Priority

LINGER_S: Final = 10.0
SWEEP_S: Final = 2.0
PAUSE_S: Final = 0.1
NAK: Final = b"-NAK"

_LINGER: Final = msgspec.json.encode({"batch": 1, "expires": int(LINGER_S * 1e9), "no_wait": True})


class _ConsumerGone(Unavailable):
    """The broker does not know the consumer: deleted, or lost with the broker's data."""


class Tap:
    """One priority's consumer. A job arrives under its own subject and does not say which request it answers, so there
    is at most one open request: a sweep, or a standing request for one job."""

    def __init__(
        self, connection: Connection, stream: str, consumer: str, settle: Callable[[Msg | None], None]
    ) -> None:
        self.standing_until = 0.0
        self._connection = connection
        self._subject = f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._settle = settle
        """Told how a standing request ended."""
        self._inbox = connection.new_inbox() + "."
        self._requests = 0
        self._sweep: _Sweep | None = None

    async def open(self) -> None:
        await self._connection.subscribe(self._inbox + "*", self._arrived)

    async def sweep(self, limit: int) -> list[Msg]:
        """Up to ``limit`` jobs that are there now. Called by one pull at a time."""
        if self._sweep is not None:  # of a pull that was cancelled: its answer has to end first
            await self._sweep.ended.wait()
        sweep = self._sweep = _Sweep(self._connection, limit)
        timer = asyncio.get_running_loop().call_later(SWEEP_S, self._give_up, sweep)
        try:
            await self._ask(b'{"batch":%d,"no_wait":true}' % limit)
            jobs = await sweep.jobs
        except BaseException:
            sweep.abandon()
            raise
        timer.cancel()
        return jobs

    async def stand(self, now: float) -> None:
        # A second more than the broker's own limit: normally the broker's "expired" comes first.
        self.standing_until = now + LINGER_S + 1.0
        await self._ask(_LINGER)

    def forget(self) -> None:
        """The connection was lost."""
        self.standing_until = 0.0
        if self._sweep is not None:
            self._give_up(self._sweep)

    async def _ask(self, request: bytes) -> None:
        self._requests += 1
        await self._connection.publish(self._subject, request, self._inbox + str(self._requests))

    def _arrived(self, message: Msg) -> None:
        if status(message) and message.subject != self._inbox + str(self._requests):
            return  # the end of an earlier request
        if self._sweep is not None:
            if self._sweep.take(message):
                self._sweep = None
        elif self.standing_until:
            self.standing_until = 0.0
            self._settle(message)
        elif not status(message):
            self._connection.post(message.reply, NAK)

    def _give_up(self, sweep: "_Sweep") -> None:
        sweep.stop()
        if self._sweep is sweep:
            self._sweep = None


class Mailbox:
    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumers: Mapping[Priority, str],
        create: Callable[[], Awaitable[None]],
    ) -> None:
        """``consumers``: the names of those of ``stream``. ``create`` makes sure that the broker has them."""
        self._connection = connection
        self._taps = {each: Tap(connection, stream, name, self._settle) for each, name in consumers.items()}
        self._create = create
        self._opened = False
        self._created = False
        self._sweeping = asyncio.Lock()
        self._waiters: deque[asyncio.Future[Msg | None]] = deque()
        self._loop = asyncio.get_running_loop()
        connection.on_lost(self._lost)

    async def pull(self, limit: int, wait_s: float, order: Sequence[Priority]) -> list[Msg]:
        """Up to ``limit`` jobs of the first priority in ``order`` that has any, as soon as there is one.

        Raises:
            Unavailable: the broker was away, or did not answer, until ``wait_s`` had passed.
        """
        deadline = self._loop.time() + wait_s
        while True:
            try:
                if jobs := await self._attempt(limit, deadline, order):
                    return jobs
                if self._loop.time() >= deadline:
                    return []
            except Unavailable as error:
                if isinstance(error, _ConsumerGone):
                    self._created = False
                left_s = deadline - self._loop.time()
                if left_s <= 0 or self._connection.closed:
                    raise
                if self._connection.connected:  # JetStream itself is on its way up or down
                    await asyncio.sleep(min(PAUSE_S, left_s))
                else:
                    await self._connection.until_connected(left_s)

    async def _attempt(self, limit: int, deadline: float, order: Sequence[Priority]) -> list[Msg]:
        """The jobs that are there, or the first that comes; none when there is reason to look again, or time is up."""
        if not self._connection.connected:
            raise Unavailable(f"not connected to NATS at {self._connection.where}")
        async with self._sweeping:
            if not self._created:
                await self._prepare()
            for tap in map(self._taps.__getitem__, order):
                if self._loop.time() >= tap.standing_until and (jobs := await tap.sweep(limit)):
                    return jobs
            now = self._loop.time()
            if now >= deadline:
                return []
            for tap in self._taps.values():
                if now >= tap.standing_until:
                    await tap.stand(now)
        job = await self._linger(deadline)
        return [job] if job else []

    async def _prepare(self) -> None:
        if not self._opened:
            for tap in self._taps.values():
                await tap.open()
            self._opened = True
        await self._create()
        self._created = True

    async def _linger(self, deadline: float) -> Msg | None:
        waiter: asyncio.Future[Msg | None] = self._loop.create_future()
        self._waiters.append(waiter)
        soonest = min(deadline, *(tap.standing_until for tap in self._taps.values()))
        timer = self._loop.call_at(soonest, _wake, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and not waiter.exception() and (job := waiter.result()):
                self._connection.post(job.reply, NAK)
            raise
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _settle(self, message: Msg | None) -> None:
        """A standing request has ended. With a job, one waiter gets it; all others have to look again."""
        job = message if message is not None and not status(message) else None
        trouble = _trouble(message) if message is not None else None
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.done():
                continue
            if trouble is not None:
                waiter.set_exception(trouble)
            else:
                waiter.set_result(job)
                job = None
        if job is not None:
            self._connection.post(job.reply, NAK)

    def _lost(self) -> None:
        for tap in self._taps.values():
            tap.forget()
        self._settle(None)


class _Sweep:
    """Collects one answer: up to ``limit`` jobs, or fewer and a status."""

    def __init__(self, connection: Connection, limit: int) -> None:
        self.jobs: asyncio.Future[list[Msg]] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self._connection = connection
        self._missing = limit
        self._collected: list[Msg] = []

    def take(self, message: Msg) -> bool:
        """Whether that was the last of it."""
        code = status(message)
        if not code:
            self._missing -= 1
            if self.jobs.done():  # too late for who asked
                self._connection.post(message.reply, NAK)
            else:
                self._collected.append(message)
            if self._missing:
                return False
        self.ended.set()
        if not self.jobs.done():
            if not self._collected and (trouble := _trouble(message)):
                self.jobs.set_exception(trouble)
            else:
                self.jobs.set_result(self._collected)
        return True

    def stop(self) -> None:
        """The end of the answer did not come."""
        self.ended.set()
        if not self.jobs.done():
            if self._collected:
                self.jobs.set_result(self._collected)
            else:
                self.jobs.set_exception(Unavailable("the broker did not answer a pull"))

    def abandon(self) -> None:
        """Nobody waits any more. What has come goes back; ``jobs`` is done, so what still comes does, too."""
        self.jobs.cancel()
        for message in self._collected:
            self._connection.post(message.reply, NAK)


def _trouble(message: Msg) -> Exception | None:
    """What a status means beyond "there is nothing"."""
    match status(message):
        case 0 | 404 | 408:
            return None
        case code if code == 503 or (code == 409 and "Deleted" in description(message)):
            return _ConsumerGone("the consumer of this queue is gone; the next pull makes it again")
        case code:
            return Unavailable(f"the broker refused a pull: {code} {description(message)}")


def _wake(waiter: asyncio.Future[Msg | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
