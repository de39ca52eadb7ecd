"""One job's handling as something that can be told to stop, with the reason.

Whoever learns that a request must not go on (a cancel message, a lost lease, the deadline) interrupts its work; the
handling sees that reason as an ordinary exception at its next await, frees what it holds, and its verdict follows
from the reason. A shutdown is a plain cancellation without a reason.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from pdq.core.errors import DeadlineExceeded, PdqError

T = TypeVar("T")


class Work:
    """At most one coroutine at a time runs under it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._reason: PdqError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self, reason: PdqError) -> None:
        """The first reason counts."""
        if self._reason is None:
            self._reason = reason
            if self._task is not None:
                self._task.cancel()

    def set_deadline(self, remaining_ms: int) -> None:
        """Interrupt with ``DeadlineExceeded`` when ``remaining_ms`` have passed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(
            max(remaining_ms, 0) / 1000,
            lambda: self.interrupt(DeadlineExceeded("the request's deadline has passed")),
        )

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine``; raises the reason if it is interrupted."""
        if self._reason is not None:
            coroutine.close()
            raise self._reason
        task: asyncio.Task[T] = asyncio.ensure_future(coroutine)
        self._task = task
        try:
            return await task
        except asyncio.CancelledError:
            if self._reason is not None and not cancelling():
                raise self._reason from None
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._task = None


def cancelling() -> bool:
    """Is the current task being cancelled from outside?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
