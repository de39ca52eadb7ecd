"""The child processes of ``pdq up``: kept running, and the worker pools scaled.

A part that ends by itself is started again. Until the system is ready, one that keeps ending ends everything, with the
end of its log: that is the soonest that anybody learns of it. Later, workers get a pause instead, since the others go on
serving.

A worker's process is minted with its id, and a new process gets a new one: so that part and registration are known to
belong together, and nothing of an earlier process is taken for the later one's. Only a worker that an operator has sent
away keeps its id, by which it is called back.
"""

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from pdq.adapters.processes import Child
from pdq.core.errors import InvalidSettings, PdqError, Unavailable
from pdq.core.exits import BAD_INPUT
from pdq.core.ids import mint_worker_id
from pdq.ports import Board, Pool

log = logging.getLogger(__name__)

RESTARTS: Final = 5
"""A part that ends by itself this often within ``RESTART_WINDOW_S`` is not started again at once. One that was killed
always is: whoever kills it, or the kernel for want of memory, says nothing of the part."""
RESTART_WINDOW_S: Final = 30.0
BOARD_POLL_S: Final = 1.0
"""How often the board is asked whether a worker that was sent away may come back."""
STARTS: Final = 8
"""Workers of a pool that may be starting at a time, after the first ones: a size with a digit too many can be taken back
before the machine is full of them."""
OVERDUE_S: Final = 5.0
"""A child that has not left this long after its own deadline is killed."""


@dataclass
class Part:
    """A supervised child and when it ended by itself."""

    child: Child
    failures: list[float] = field(default_factory=list)

    def check(self) -> None:
        """Start it again if it has ended.

        Raises:
            InvalidSettings: it says that its settings are wrong.
            Unavailable: it keeps ending.
        """
        if (code := self.child.returncode) is not None:
            if (hopeless := self.ended(code)) is not None:
                raise hopeless
            log.warning("%s exited with %d, starting it again", self.child.name, code)
            self.child.start()

    def ended(self, code: int) -> PdqError | None:
        """With exit status ``code``; negative: by a signal. Says why starting it again would not help."""
        now = time.monotonic()
        self.failures = [at for at in self.failures if now - at < RESTART_WINDOW_S] + [now] * (code > 0)
        if code == BAD_INPUT:
            return InvalidSettings(f"{self.child.name} refuses to run:\n{self.child.log_tail()}")
        if len(self.failures) >= RESTARTS:
            return Unavailable(f"{self.child.name} exited with {code}:\n{self.child.log_tail()}")
        return None


@dataclass(kw_only=True)
class Worker(Part):
    pool: Pool
    number: int
    worker: str
    kill_s: float | None = None
    """It was told to leave: it is killed then, and forgotten when it has ended."""
    away: bool = False
    """It has ended because an operator sent it away."""
    pause_until_s: float = 0.0
    """When to look at it again, after it has ended."""
    resting: bool = False
    """It is started again after the pause, whatever else."""
    trouble: str = ""
    """Why it does not run, or did not lately."""

    @property
    def leaving(self) -> bool:
        return self.kill_s is not None


class Workers:
    """The worker processes of one model on this machine: an ``Actuator``, and their supervisor."""

    name: Final = "local"

    def __init__(
        self,
        command: Callable[[Pool, str], Sequence[str]],
        plan: Mapping[Pool, int],
        *,
        model: str,
        board: Board,
        logs: Path,
        environ: Mapping[str, str],
        deadline_s: float,
    ) -> None:
        self._command = command
        self._plan = plan
        self._model = model
        self._board = board
        self._logs = logs
        self._environ = environ
        self._deadline_s = deadline_s
        self._workers: list[Worker] = []
        self._away: frozenset[str] = frozenset()
        """As last read."""
        self._settled = False

    def start(self) -> None:
        """All that are planned."""
        for pool, planned in self._plan.items():
            for _ in range(planned):
                self._add(pool)

    def settled(self) -> None:
        """From now on a worker that cannot run is no reason to end everything."""
        self._settled = True

    def children(self, pool: Pool) -> list[Child]:
        return [it.child for it in self._workers if it.pool is pool]

    def planned(self) -> Mapping[Pool, int]:
        """As started, less those that operators have sent away: they are not replaced."""
        missing = Counter(it.pool for it in self._workers if not it.leaving and it.worker in self._away)
        return {pool: max(0, planned - missing[pool]) for pool, planned in self._plan.items()}

    async def forget(self) -> None:
        """When all have ended: nobody can call these back any more."""
        for it in self._workers:
            if it.worker in self._away:
                await self._board.call_back(self._model, it.worker)

    # --- Actuator -----------------------------------------------------------------------------------------------------

    async def sizes(self) -> Mapping[Pool, int]:
        self._away = await self._board.away(self._model)
        found = Counter(it.pool for it in self._staying())
        return {pool: found[pool] for pool in Pool}

    async def scale(self, pool: Pool, replicas: int, leaving_first: Sequence[str]) -> None:
        staying = [it for it in self._staying() if it.pool is pool]
        places = {worker: place for place, worker in enumerate(leaving_first)}
        starting = sum(it.worker not in places for it in staying)
        for _ in range(min(replicas - len(staying), STARTS - starting)):
            self._add(pool)
        staying.sort(key=lambda it: places.get(it.worker, -1))  # who is not registered yet holds nothing
        for it in staying[: max(0, len(staying) - replicas)]:
            log.info("%s is told to leave", it.worker)
            it.kill_s = time.monotonic() + self._deadline_s + OVERDUE_S
            it.child.signal(signal.SIGTERM)

    async def trouble(self, pool: Pool) -> str:
        return "; ".join(it.trouble for it in self._workers if it.pool is pool and it.trouble)

    def _staying(self) -> list[Worker]:
        return [it for it in self._workers if not it.leaving and it.worker not in self._away]

    # --- Supervisor ---------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Look after all of them once.

        Raises:
            InvalidSettings, Unavailable: one cannot run, and they have not settled yet.
        """
        for it in list(self._workers):
            now = time.monotonic()
            code = it.child.returncode
            if code is None:
                if it.kill_s is not None and now >= it.kill_s:
                    it.child.signal(signal.SIGKILL)
                if it.trouble and now >= it.pause_until_s + RESTART_WINDOW_S:
                    it.trouble = ""  # it runs, and has for long enough
            elif it.leaving:
                self._workers.remove(it)
                log.info("%s has left (exit status %d)", it.worker, code)
            elif now >= it.pause_until_s:
                await self._come_again(it, code)

    async def _come_again(self, it: Worker, code: int) -> None:
        try:
            self._away = await self._board.away(self._model)
        except PdqError as error:  # nobody is started against an operator's orders
            log.debug("%s has ended; whether it was sent away cannot be read: %s", it.worker, error)
            it.pause_until_s = time.monotonic() + BOARD_POLL_S
            return
        if it.worker in self._away:
            if not it.away:
                log.info("%s has left: it was sent away", it.worker)
            it.away, it.pause_until_s = True, time.monotonic() + BOARD_POLL_S
        elif it.away:
            log.info("%s is called back", it.worker)
            self._launch(it, it.worker)
        elif it.resting:
            self._launch(it, mint_worker_id(it.pool))
        elif (hopeless := it.ended(code)) is None:
            level = logging.WARNING if code else logging.INFO  # 0: it was asked to leave
            log.log(level, "%s (%s) exited with %d, starting it again", it.child.name, it.worker, code)
            self._launch(it, mint_worker_id(it.pool))
        elif not self._settled:
            raise hopeless
        else:
            log.error("%s", hopeless)
            self._rest(it, f"{it.worker} exited with {code}: {it.child.log_tail(1)}")

    def _add(self, pool: Pool) -> None:
        taken = {it.number for it in self._workers if it.pool is pool}
        number = next(number for number in count() if number not in taken)
        name = f"{pool}-{number}"
        child = Child(name, (), self._logs / f"{name}.log", self._environ)
        it = Worker(child, pool=pool, number=number, worker=mint_worker_id(pool))
        self._launch(it, it.worker)
        if it.resting:  # there is no process yet of which anybody could take care
            raise Unavailable(it.trouble)
        self._workers.append(it)

    def _launch(self, it: Worker, worker: str) -> None:
        it.worker, it.away, it.resting = worker, False, False
        it.child.argv = list(self._command(it.pool, worker))
        try:
            it.child.start()
        except OSError as error:
            log.error("%s cannot be started: %s", it.child.name, error)
            self._rest(it, f"{it.child.name} cannot be started: {error}")

    def _rest(self, it: Worker, trouble: str) -> None:
        it.trouble, it.resting, it.pause_until_s = trouble, True, time.monotonic() + RESTART_WINDOW_S
