"""Workers that are told to leave: who is meant, what they still have, and waiting until they have left.

The registry says who is there. What a worker still has is asked of the worker itself, because it registers only every few
seconds; one that does not answer is shown as it registered last.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from pdq.cli.find import System
from pdq.core import names
from pdq.core.errors import InvalidRequest, WorkerNotFound
from pdq.core.messages import Drain
from pdq.ports import Pool, WorkerInfo

if TYPE_CHECKING:
    from rich.live import Live

POLL_S: Final = 0.2
ANSWER_S: Final = 1.0
GRACE_S: Final = 15.0
"""From a worker's deadline to its end: it releases what is left, and closes."""
REMIND_S: Final = 1.0
"""A worker that has not said that it drains is told again: control messages may get lost."""


class Seen(Struct, frozen=True):
    worker: str
    pool: Pool
    state: Literal["ready", "draining", "left"]
    held: int
    """Handoffs that somebody still has to fetch from it."""
    running: int
    """Requests on which it works."""

    def __str__(self) -> str:
        if self.state == "left":
            return f"{self.worker} has left"
        return f"{self.worker} {self.state}: {self.held} held, {self.running} running"


Tell = Callable[[Sequence[Seen]], None]


class Order(Struct, frozen=True):
    """How workers shall drain."""

    deadline_s: float
    spill: bool


async def named(system: System, worker: str) -> WorkerInfo:
    """
    Raises:
        WorkerNotFound: it says which there are.
    """
    live = await system.registry.workers()
    for info in live:
        if info.worker == worker:
            return info
    raise WorkerNotFound(f"no live worker {worker!r}; {listing(live)}")


async def pool_of(system: System, model: str, pool: Pool) -> list[WorkerInfo]:
    """
    Raises:
        WorkerNotFound: it is empty.
    """
    live = await system.registry.workers(model)
    if found := [info for info in live if info.pool is pool]:
        return sorted(found, key=lambda info: info.worker)
    raise WorkerNotFound(f"no {pool} worker of {model} lives; {listing(live)}")


def listing(live: Sequence[WorkerInfo]) -> str:
    return f"there are {', '.join(sorted(info.worker for info in live))}" if live else "there is none"


def check_spill(workers: Sequence[WorkerInfo]) -> None:
    """
    Raises:
        InvalidRequest: one has nowhere to move its KV to.
    """
    for info in workers:
        if info.pool is Pool.DECODE:
            raise InvalidRequest(f"{info.worker} decodes and holds no KV for others: leave --spill out", field="spill")
        if not info.spill:
            raise InvalidRequest(
                f"{info.worker} has no tier to move its KV to: start it with PDQ_TRANSPORT_SPILL=redis (or shm), or "
                "leave --spill out",
                field="spill",
            )


async def told(system: System, worker: str, order: Order) -> None:
    message = Drain(deadline_ms=max(0, round(order.deadline_s * 1000)), spill=order.spill)
    await system.bus.control(names.worker_subject(worker), message)


class Teller:
    """Tells workers to drain, until they say that they do; a repetition does not put the deadline off."""

    def __init__(self, system: System, order: Order) -> None:
        self._system = system
        self._order = order
        self._ends = time.monotonic() + order.deadline_s
        self._told: dict[str, float] = {}

    async def __call__(self, info: WorkerInfo) -> None:
        now, before = time.monotonic(), self._told.get(info.worker)
        if before is None or (info.state == "ready" and now - before >= REMIND_S):
            self._told[info.worker] = now
            await told(self._system, info.worker, replace(self._order, deadline_s=self._ends - now))


async def until_gone(
    system: System,
    model: str,
    wanted: Callable[[WorkerInfo], bool],
    each: Callable[[WorkerInfo], Awaitable[None]],
    within_s: float,
    tell: Tell,
    until: Literal["ready", "draining", "left"] = "left",
) -> list[Seen]:
    """Until no worker is ``wanted`` any more, or all that are have come as far as ``until``. The workers in the state in
    which they were seen last; ``each`` is called for every one in every round."""
    give_up = time.monotonic() + within_s
    seen: Mapping[str, Seen] = {}
    while True:
        present = [info for info in await system.registry.workers(model) if wanted(info)]
        for info in present:
            await each(info)
        now = {info.worker: at for info, at in zip(present, await _look(system, present), strict=True)}
        gone = {worker: replace(at, state="left", held=0, running=0) for worker, at in seen.items()}
        seen = gone | now
        tell(list(seen.values()))
        if all(at.state in (until, "left") for at in now.values()) or time.monotonic() >= give_up:
            return list(seen.values())
        await asyncio.sleep(POLL_S)


async def _look(system: System, workers: Sequence[WorkerInfo]) -> list[Seen]:
    accounts = await asyncio.gather(*(system.bus.ask_account(info.worker, ANSWER_S) for info in workers))
    found: list[Seen] = []
    for info, account in zip(workers, accounts, strict=True):
        held, running = info.occupancy.held, info.occupancy.running
        if account is not None:
            held = sum(it.doing in ("held", "releasing") for it in account.holdings)
            running = len(account.holdings) - held
        found.append(Seen(info.worker, info.pool, info.state, held, running))
    return found


class Display:
    """What is left to do, on stderr: a table that changes on a terminal, else a line for each change. Quiet for
    ``--json``."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live: Live | None = None
        self._said: dict[str, str] = {}

    def __enter__(self) -> "Display":
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, seen: Sequence[Seen]) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join(map(str, seen))))
            return
        for at in seen:
            if not self._quiet and self._said.get(at.worker) != str(at):
                print(at, file=sys.stderr, flush=True)
            self._said[at.worker] = str(at)
