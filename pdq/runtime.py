"""How every pdq program lives and ends: one event loop, one logging set-up, one two-stage shutdown.

    running ──first SIGTERM or SIGINT──▶ draining ──work done, or deadline, or second signal──▶ stopped

*Draining*: pull nothing new, finish what runs. *Stopped*: cancel what is left, release it, close. Programs get a
``Lifecycle`` and never install signal handlers themselves.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import uvloop

from pdq.core.errors import PdqError
from pdq.core.exits import exit_status

DRAIN_DEADLINE_S: Final = 60.0

log = logging.getLogger(__name__)


class Lifecycle:
    """The two stages of shutdown as events to wait for."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.stopped = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def drain(self, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        """First stage; the second follows after ``deadline_s`` at the latest. Asking again is the second stage."""
        if self.draining.is_set():
            self.stop()
            return
        log.info("draining: finishing what runs, for at most %.0f s", deadline_s)
        self.draining.set()
        self._deadline = asyncio.get_running_loop().call_later(deadline_s, self.stop)

    def stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
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
            with contextlib.suppress(asyncio.CancelledError):
                await task


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
    lifecycle = Lifecycle()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.drain)
    await main(lifecycle)
