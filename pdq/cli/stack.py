"""A whole pdq on one machine: embedded servers, workers, bridge and reaper as child processes of this one.

Children are started in the order in which they need each other and stopped in the order in which requests flow: the
bridge first, so that streams can end, then the workers, then the reaper, then the servers. ``pdq.cli.supervise`` keeps
them running; how many workers there are is ``pdq.autoscale``'s to say: as planned or as the load wants it, and as
operators have fixed it.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from pdq.adapters.processes import Child, Server, nats_server, valkey_server
from pdq.adapters.shm_segments import segments, unlink_if_dead
from pdq.autoscale.loop import Autoscaler
from pdq.autoscale.metrics import Metrics
from pdq.autoscale.policies import FollowLoad, FollowPlan
from pdq.cli.find import ENV_FILE, WRITTEN
from pdq.cli.models import prepare
from pdq.cli.plan import Plan
from pdq.cli.programs import bridge_command, worker_command
from pdq.cli.supervise import OVERDUE_S, Part, Workers
from pdq.connect import Connected, connect
from pdq.core import names
from pdq.core.environment import load
from pdq.core.errors import InvalidSettings, PdqError, Unavailable
from pdq.ports import Pool

log = logging.getLogger(__name__)

READY_POLL_S: Final = 0.05
CHECK_S: Final = 0.1
SIGNALS_APART_S: Final = 0.2
"""Two signals of a kind that are sent at once may arrive as one."""
HURRY_S: Final = 5.0
"""For a child to release what it holds, when nothing is waited for any more."""

Progress = Callable[[str], None]


class _NotReady(msgspec.Struct):
    missing: list[str] = []


class Stack:
    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._servers: list[Server] = []
        self._parts: dict[str, Part] = {}
        """All but the workers, by name."""
        self._workers: Workers | None = None
        self._autoscaler: Autoscaler | None = None
        self._metrics = Metrics(plan.model.name)
        self._environ = dict(os.environ)
        self._model = plan.model
        self.url = f"http://{plan.host}:{plan.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the stack's programs."""
        return self._environ

    @contextlib.asynccontextmanager
    async def running(self, hurry: asyncio.Event) -> AsyncIterator["Stack"]:
        """Started, until the block ends; see ``ready``. Then everything drains, unless ``hurry`` is set.

        Raises:
            InvalidSettings: another stack uses the state directory, or the port is taken.
            Unavailable: a part could not be started.
        """
        with _locked(self._plan.state_dir), self._exporting():
            _bindable(self._plan.host, self._plan.port)
            await self._try_given_servers()
            try:
                self._progress(f"preparing model {self._plan.model.name}")
                self._model = await asyncio.to_thread(prepare, self._plan.model)
                await self._start_servers()
                self._write_env()
                async with connect(load(self._environ), "up") as system:
                    try:
                        await self._tell_fixed(system)
                        self._start_parts(system)
                        yield self
                    except PdqError:
                        # A part is broken for good: waiting for others to drain would only hide that. What is wrong
                        # is the program's last word (``runtime.run``).
                        log.info("stopping: a part has failed")
                        hurry.set()
                        raise
                    finally:
                        await self._stop_parts(hurry)
            finally:
                for server in reversed(self._servers):
                    await server.stop()
                (self._plan.state_dir / ENV_FILE).unlink(missing_ok=True)

    async def supervise(self) -> None:
        """Keep everything running, and the pools at their sizes; returns never.

        Raises:
            Unavailable: bridge or reaper keep dying, or an embedded server is gone.
        """
        assert self._workers is not None
        assert self._autoscaler is not None
        self._workers.settled()
        scaling = asyncio.ensure_future(self._autoscaler.run())
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                await self._check()
                if scaling.done():
                    scaling.result()  # it runs forever, so this is a defect
        finally:
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)

    @contextlib.contextmanager
    def _exporting(self) -> Iterator[None]:
        if not self._plan.autoscale:
            yield
            return
        with self._metrics.served(load(self._environ).scaling):
            yield

    # --- start --------------------------------------------------------------------------------------------------------

    async def _try_given_servers(self) -> None:
        """Once and now, rather than in every part again and again.

        Raises:
            Unavailable: one of them does not answer.
            InvalidSettings: a setting is wrong.
        """
        settings = load(self._environ)
        if all(self._environ.get(name) or self._environ.get(f"{name}_FILE") for name in _SERVERS):
            async with connect(settings, "up"):
                pass

    async def _start_servers(self) -> None:
        for variable, make in _SERVERS.items():
            if not (self._environ.get(variable) or self._environ.get(f"{variable}_FILE")):
                server = make(self._plan.state_dir / variable.split("_")[1].lower())
                await server.start()
                self._servers.append(server)
                self._environ[variable] = server.url
                self._progress(f"{server.name} on {server.url}")

    def _write_env(self) -> None:
        self._environ[names.ENV_BRIDGE_URL] = self.url
        wanted = [variable for variable in WRITTEN if self._environ.get(variable)]
        file = self._plan.state_dir / ENV_FILE
        draft = file.with_suffix(".new")
        draft.touch(mode=0o600)  # there may be passwords in it
        draft.write_text("".join(f"{variable}={self._environ[variable]}\n" for variable in wanted))
        draft.replace(file)

    async def _tell_fixed(self, system: Connected) -> None:
        """What was fixed for a system that has long gone is easily forgotten."""
        for pool, size in (await system.board.fixed(self._model.name)).items():
            log.warning("%s goes to %d workers: fixed earlier; `pdq scale %s=auto` releases it", pool, size, pool)

    def _start_parts(self, system: Connected) -> None:
        plan, settings = self._plan, load(self._environ)
        self._environ["PDQ_HANDOFF_MODE"] = plan.mode
        # More compute threads than cores make every one of them several times slower.
        workers = max(1, plan.prefill + plan.decode)
        self._environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        self._environ.setdefault("HF_HUB_OFFLINE", "1")
        logs = self._plan.state_dir / "logs"
        for old in logs.glob("*.log"):
            old.unlink()  # an earlier run's errors would be taken for this one's
        self._part("reaper", [sys.executable, "-m", "pdq.cli", "reaper"])
        self._workers = Workers(
            lambda pool, worker: worker_command(pool, self._model, plan.engine, worker),
            {Pool.PREFILL: plan.prefill, Pool.DECODE: plan.decode},
            model=self._model.name,
            board=system.board,
            logs=logs,
            environ=self._environ,
            deadline_s=settings.drain.deadline_s,
        )
        self._workers.start()
        self._environ["PDQ_BRIDGE_HOST"] = plan.host
        self._environ["PDQ_BRIDGE_PORT"] = str(plan.port)
        self._part("bridge", bridge_command(self._model))
        self._autoscaler = Autoscaler(
            model=self._model.name,
            who=f"pdq up, process {os.getpid()} on {socket.gethostname()}",
            ledger=system.ledger,
            registry=system.registry,
            board=system.board,
            actuator=self._workers,
            policy=FollowLoad(settings.scaling) if plan.autoscale else FollowPlan(self._workers.planned),
            limits=settings.scaling,
            metrics=self._metrics,
        )

    def _part(self, name: str, argv: Sequence[str]) -> None:
        child = Child(name, argv, self._plan.state_dir / "logs" / f"{name}.log", self._environ)
        self._parts[name] = Part(child.start())

    async def ready(self) -> None:
        """Returns when requests can be served.

        Raises:
            Unavailable: a part could not be started.
        """
        last = ""
        while True:
            await self._check()
            missing = await asyncio.to_thread(_missing, self.url)
            if missing is None:
                return
            if missing != last:
                self._progress(missing)
                last = missing
            await asyncio.sleep(READY_POLL_S)

    # --- while it runs ------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        for server in self._servers:
            if (code := server.child.returncode) is not None:
                raise Unavailable(f"{server.name} exited with {code}:\n{server.child.log_tail()}")
        for part in self._parts.values():
            part.check()
        if self._workers is not None:
            await self._workers.check()

    # --- stop ---------------------------------------------------------------------------------------------------------

    async def _stop_parts(self, hurry: asyncio.Event) -> None:
        settings = load(self._environ)
        grace_s = settings.drain.deadline_s + OVERDUE_S
        hurrying = asyncio.ensure_future(self._hurry(hurry))
        for children in self._children():
            await asyncio.gather(*(child.stop(grace_s) for child in children))
        hurrying.cancel()
        if self._workers is not None:
            with contextlib.suppress(PdqError):  # the marks of ids that nobody has any more do no harm
                await self._workers.forget()
        for segment in segments(Path(settings.transport.shm_dir)):
            unlink_if_dead(segment, early=True)  # of workers that had to be killed, and what they kept in the tier

    def _children(self) -> list[list[Child]]:
        """In the order in which they are stopped."""
        workers = [self._workers.children(pool) for pool in Pool] if self._workers is not None else []
        bridge, reaper = ([self._parts[name].child] if name in self._parts else [] for name in ("bridge", "reaper"))
        return [bridge, *workers, reaper]

    async def _hurry(self, hurry: asyncio.Event) -> None:
        """The second SIGTERM ends a program without its drain, whether or not it has had its first by then."""
        await hurry.wait()
        for number, pause_s in (
            (signal.SIGTERM, SIGNALS_APART_S),
            (signal.SIGTERM, HURRY_S),
            (signal.SIGKILL, 0),
        ):
            for child in chain.from_iterable(self._children()):
                child.signal(number)
            await asyncio.sleep(pause_s)


_SERVERS: Final = {names.ENV_NATS_URL: nats_server, names.ENV_REDIS_URL: valkey_server}


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Only one stack at a time in a state directory."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        opened = (state_dir / "lock").open("w")
    except OSError as error:
        raise InvalidSettings(f"--state-dir {state_dir} cannot be used: {error}") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidSettings(
                f"another pdq is running in {state_dir}: stop it, or choose another --state-dir"
            ) from None
        yield


def _bindable(host: str, port: int) -> None:
    """Found out before minutes are spent on a model."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidSettings(f"port {port} on {host} cannot be used ({error}): choose another --port") from None


def _missing(url: str) -> str | None:
    """What the stack still waits for; None when it can serve."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=2) as answer:
            return None if answer.status == 200 else "bridge not ready"
    except urllib.error.HTTPError as error:
        with contextlib.suppress(msgspec.DecodeError):
            said = msgspec.json.decode(error.read(), type=_NotReady)
            return f"waiting for {'; '.join(said.missing)}"
        return "waiting for the bridge"
    except OSError:
        return "waiting for the bridge"
