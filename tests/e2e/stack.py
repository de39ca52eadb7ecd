"""A running pdq for black-box tests: the real ``pdq up`` as a child process, and the CLI to look into it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import psutil

from pdq.adapters.processes import dying_with_parent
from pdq.connect import Connected, connect
from pdq.core.environment import load
from pdq.ports import Record, WorkerInfo

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

STARTUP_S = 60
SHORT_LEASES = {
    "PDQ_LEASE_TTL_MS": "1500",
    "PDQ_LEASE_REAPER_PERIOD_MS": "200",
    "PDQ_QUEUE_ACK_WAIT_S": "1.5",
    "PDQ_TRANSPORT_FETCH_TIMEOUT_S": "10",
}


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = 20.0) -> T:
    """The first true result of ``condition``; fails with ``what`` after ``timeout_s``."""
    give_up = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < give_up, f"still not: {what}"
        time.sleep(0.02)
    return result


class Inside:
    """A connection to a stack's own servers, for tests that must see a state before it is over."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        opening = self._stack.enter_async_context(connect(load(environ), "test"))
        self.system: Connected = self._await(opening)

    def _await(self, work: Coroutine[Any, Any, T], within_s: float = 30) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def ask(self, question: Callable[[Connected], Coroutine[Any, Any, T]], within_s: float = 30) -> T:
        return self._await(question(self.system), within_s)

    def close(self) -> None:
        self._await(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Stack:
    """One ``pdq up``."""

    def __init__(self, process: subprocess.Popen[str], state_dir: Path, url: str, env: dict[str, str]) -> None:
        self.process = process
        self.env = env
        self.state_dir = state_dir
        self.url = url
        self.inside = Inside(self.environ)

    @property
    def environ(self) -> dict[str, str]:
        """The settings with which its programs run, for those that look into it."""
        return self.env | dict(line.split("=", 1) for line in (self.state_dir / "env").read_text().splitlines())

    def live(self) -> Sequence[Record]:
        """All records that have not ended."""
        return self.inside.ask(lambda system: system.ledger.live(self.model))

    def workers(self, pool: str | None = None) -> list[WorkerInfo]:
        """What the live workers said of themselves last."""
        found = self.inside.ask(lambda system: system.registry.workers())
        return [worker for worker in found if pool is None or worker.pool == pool]

    def cli(self, *arguments: str) -> Any:
        """The JSON that a ``pdq`` command prints."""
        command = [sys.executable, "-m", "pdq.cli", *arguments, "--state-dir", str(self.state_dir), "--json"]
        environ = {**os.environ, **self.environ}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def client(self) -> "AsyncOpenAI":
        from openai import AsyncOpenAI  # takes as long to import as all else together, and few tests need it

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, **options}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json() | {"request_id": answer.headers["x-request-id"]}
        return result

    @cached_property
    def model(self) -> str:
        name: str = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]
        return name

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.state_dir.glob("logs/*.log"))


@contextmanager
def running(state_dir: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Stack]:
    """``pdq up`` until the block ends; then it must stop cleanly and leave nothing behind."""
    # Segments of other stacks on this machine, or of those that were killed, are none of this one's business.
    shm_dir = tempfile.mkdtemp(prefix="pdq-test-", dir="/dev/shm")
    env = {"PDQ_TRANSPORT_SHM_DIR": shm_dir, **(env or {})}
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-m", "pdq.cli", "up", "--port", "0", "--state-dir", str(state_dir), *options]
    errors = (state_dir.parent / f"{state_dir.name}.stderr").open("w+")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ, preexec_fn=dying_with_parent()
    )
    assert process.stdout is not None
    stack: Stack | None = None
    try:
        line = process.stdout.readline()
        errors.seek(0)
        assert "ready" in line, errors.read()
        url = next(word for word in line.split() if word.startswith("http://")).removesuffix("/v1")
        stack = Stack(process, state_dir, url, env)
        yield stack
    except BaseException:
        if stack is not None:
            print(stack.logs())
        raise
    finally:
        children = stack.descendants() if stack is not None and process.poll() is None else []
        if stack is not None:
            stack.inside.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        finally:
            process.kill()
            errors.close()
            shutil.rmtree(shm_dir)
    assert process.returncode == 0, f"exit status {process.returncode}"
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
