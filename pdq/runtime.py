"""How every pdq program lives and ends: one event loop, one logging set-up, one two-stage shutdown.

    serving ──told to, or first SIGTERM or SIGINT──▶ draining ──work done, or deadline, or second signal──▶ stopped
       ▲                                                 │
       └──────────told to, unless a signal came──────────┘

*Draining*: pull nothing new, finish what runs. *Stopped*: cancel what is left, release it, close. Programs get a
``Lifecycle`` and never install signal handlers themselves. A signal is final, because whoever sent it will kill the
process when its patience is over.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

from pdq.core.environment import load
from pdq.core.errors import PdqError
from pdq.core.exits import exit_status
from pdq.core.settings import DrainSettings

log = logging.getLogger(__name__)


class Lifecycle:
    """The stages as events to wait for. ``serving`` is the contrary of ``draining``."""

    def __init__(self, deadline_s: float = DrainSettings().deadline_s) -> None:
        self.serving = asyncio.Event()
        self.serving.set()
        self.draining = asyncio.Event()
        self.stopped = asyncio.Event()
        self._deadline_s = deadline_s
        self._deadline: tuple[float, asyncio.TimerHandle] | None = None
        self._signalled = False

    def signal(self) -> None:
        """SIGTERM or SIGINT: drain, and do not come back; the second one stops."""
        if self._signalled:
            self.stop()
        else:
            self._signalled = True
            self.drain()

    def drain(self, deadline_s: float | None = None) -> None:
        """Finish, and stop after ``deadline_s`` at the latest. Asked again, the new deadline counts; after a signal only if
        it is earlier."""
        loop = asyncio.get_running_loop()
        at = loop.time() + (self._deadline_s if deadline_s is None else deadline_s)
        if self._deadline is not None:
            former, timer = self._deadline
            at = min(at, former) if self._signalled else at
            timer.cancel()
        log.info("draining: finishing what runs, for at most %.0f s", at - loop.time())
        self._deadline = at, loop.call_at(at, self.stop)
        self.serving.clear()
        self.draining.set()

    def undrain(self) -> bool:
        """Serve again. False: it does already, or has to leave."""
        if self._deadline is None or self._signalled or self.stopped.is_set():
            return False
        log.info("draining no more: serving again")
        self._deadline[1].cancel()
        self._deadline = None
        self.draining.clear()
        self.serving.set()
        return True

    def stop(self) -> None:
        if self._deadline is not None:
            self._deadline[1].cancel()
        self.serving.clear()
        self.draining.set()
        self.stopped.set()

    async def until(self, stage: asyncio.Event, work: Awaitable[None]) -> None:
        """Wait for ``work``, or until ``stage`` is reached; then ``work`` is cancelled and awaited."""
        task = asyncio.ensure_future(work)
        reached = asyncio.ensure_future(stage.wait())
        try:
            await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
            task.cancel()
            # Not `await task` with its cancellation suppressed: that would suppress our own, too.
            await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


class Trouble:
    """Of what is tried again until it works, the log has a line when it begins to fail and one when that is over."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._code = ""

    def fails(self, error: PdqError) -> None:
        level = logging.DEBUG if error.code == self._code else logging.WARNING
        self._log.log(level, "%s fails (%s), trying again: %s", self._what, error.code, error)
        self._code = error.code

    def works(self) -> None:
        if self._code:
            self._log.info("%s works again", self._what)
        self._code = ""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure_logging(program: str) -> None:
    """To stderr. ``PDQ_LOG_LEVEL`` (default ``info``); ``PDQ_LOG_FORMAT=json`` for one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("PDQ_LOG_FORMAT") == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {program} %(name)s: %(message)s"))
    level = os.environ.get("PDQ_LOG_LEVEL", "info").upper()
    logging.basicConfig(level=level if level in logging.getLevelNamesMapping() else "INFO", handlers=[handler])


def run(program: str, main: Callable[[Lifecycle], Coroutine[Any, Any, None]]) -> int:
    """Run one program to its end; its exit status.

    0 after a clean drain; otherwise see ``pdq.core.exits``.
    """
    configure_logging(program)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_with_signals(main))
    except PdqError as error:
        log.error("%s: %s", error.code, error)
        return exit_status(error)
    return 0


async def _with_signals(main: Callable[[Lifecycle], Coroutine[Any, Any, None]]) -> None:
    lifecycle = Lifecycle(load(os.environ).drain.deadline_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.signal)
    await main(lifecycle)
