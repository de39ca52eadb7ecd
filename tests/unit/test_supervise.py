"""The worker processes of ``pdq up``, with small programs in the place of workers: scaled, drained, started again."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from pdq.adapters.memory import MemoryBoard
from pdq.cli import supervise
from pdq.cli.supervise import Worker, Workers
from pdq.core.errors import InvalidSettings, PdqError, Unavailable
from pdq.ports import Pool

MODEL = "m"
SERVES = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
)
HANGS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
FAILS = "import sys; print('no device'); sys.exit(1)"
REFUSES = "import sys; print('bad settings'); sys.exit(2)"


class Bench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.board = MemoryBoard()
        self.program: dict[Pool, str] = {Pool.PREFILL: SERVES, Pool.DECODE: SERVES}
        self.minted: list[str] = []
        self.workers: Workers

    def plan(self, prefill: int = 0, decode: int = 0, deadline_s: float = 30.0) -> Workers:
        def command(pool: Pool, worker: str) -> Sequence[str]:
            self.minted.append(worker)
            return [sys.executable, "-c", self.program[pool], worker]

        self.workers = Workers(
            command,
            {Pool.PREFILL: prefill, Pool.DECODE: decode},
            model=MODEL,
            board=self.board,
            logs=self.directory,
            environ={},
            deadline_s=deadline_s,
        )
        self.workers.start()
        return self.workers

    def all(self, pool: Pool = Pool.PREFILL) -> list[Worker]:
        return [it for it in self.workers._workers if it.pool is pool]

    async def serving(self, pool: Pool = Pool.PREFILL) -> list[Worker]:
        """All of a pool, once each of them listens to signals."""
        await self.until(
            lambda: all(it.child.log_tail(1) == "up" and it.child.returncode is None for it in self.all(pool))
        )
        return self.all(pool)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Supervising."""
        async with asyncio.timeout(30):
            while not condition():
                await self.workers.check()
                await asyncio.sleep(0.01)

    async def sizes(self) -> tuple[int, int]:
        sizes: Mapping[Pool, int] = await self.workers.sizes()
        return sizes[Pool.PREFILL], sizes[Pool.DECODE]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for pool in Pool:
        for child in bench.workers.children(pool):
            child.signal(signal.SIGKILL)
            await child.wait()


async def test_a_pool_grows_by_processes_with_ids_of_their_own_and_shrinks_by_those_that_are_missed_least(
    bench: Bench,
) -> None:
    workers = bench.plan(prefill=1, decode=1)
    await workers.scale(Pool.PREFILL, 3, ())
    first, second, third = await bench.serving()
    assert len({first.worker, second.worker, third.worker}) == 3
    assert await bench.sizes() == (3, 1)
    await workers.scale(Pool.PREFILL, 1, [second.worker, first.worker, third.worker])
    assert await bench.sizes() == (1, 1)
    await bench.until(lambda: bench.all() == [third])
    assert (first.child.returncode, second.child.returncode, third.child.returncode) == (0, 0, None)


async def test_a_size_with_a_digit_too_many_is_approached_in_steps_and_can_be_taken_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "STARTS", 2)
    workers = bench.plan(prefill=1)
    for size in (3, 3, 5):  # no more are started while those that were have not registered
        registered = [it.worker for it in bench.all()] if size == 5 else [bench.all()[0].worker]
        await workers.scale(Pool.PREFILL, 10_000, registered)
        assert await bench.sizes() == (size, 0)
    await bench.serving()
    await workers.scale(Pool.PREFILL, 1, ())
    await bench.until(lambda: len(bench.all()) == 1)


async def test_who_is_not_registered_yet_leaves_before_all_others(bench: Bench) -> None:
    workers = bench.plan(prefill=2)
    known, _ = await bench.serving()
    await workers.scale(Pool.PREFILL, 1, [known.worker])
    await bench.until(lambda: bench.all() == [known])


async def test_a_worker_that_was_killed_or_has_drained_by_itself_comes_again_under_a_new_id(bench: Bench) -> None:
    bench.plan(prefill=1)
    (worker,) = await bench.serving()
    for number in (signal.SIGKILL, signal.SIGTERM):
        before, pid = worker.worker, worker.child.pid
        worker.child.log.unlink()
        worker.child.signal(number)
        await bench.until(lambda pid=pid: worker.child.pid != pid)  # type: ignore[misc]
        await bench.serving()
        assert worker.worker != before
    assert bench.minted[-1] == worker.worker


async def test_a_worker_that_was_sent_away_stays_away_and_comes_back_under_its_id_when_it_is_called(
    bench: Bench,
) -> None:
    workers = bench.plan(prefill=2)
    gone, _ = await bench.serving()
    name, pid = gone.worker, gone.child.pid
    await bench.board.send_away(MODEL, name)
    assert await bench.sizes() == (1, 0)
    assert workers.planned()[Pool.PREFILL] == 1
    gone.child.signal(signal.SIGTERM)
    await bench.until(lambda: gone.away)
    assert gone.child.returncode == 0
    await bench.board.call_back(MODEL, name)
    await bench.until(lambda: gone.child.pid != pid)
    assert gone.worker == name
    assert await bench.sizes() == (2, 0)
    assert workers.planned()[Pool.PREFILL] == 2


async def test_a_worker_that_was_sent_away_is_not_among_those_that_a_size_counts_or_sends_off(bench: Bench) -> None:
    workers = bench.plan(prefill=2)
    gone, other = await bench.serving()
    await bench.board.send_away(MODEL, gone.worker)
    await workers.sizes()
    await workers.scale(Pool.PREFILL, 2, [gone.worker, other.worker])
    assert len(bench.all()) == 3
    await workers.scale(Pool.PREFILL, 1, [gone.worker, other.worker])
    assert not gone.leaving


async def test_nobody_is_started_again_while_the_board_does_not_say_who_is_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "BOARD_POLL_S", 0.05)
    bench.plan(prefill=1)
    (worker,) = await bench.serving()
    pid, asked = worker.child.pid, 0

    async def silent(model: str) -> frozenset[str]:
        nonlocal asked
        asked += 1
        raise Unavailable("redis does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(bench.board, "away", silent)
        worker.child.signal(signal.SIGTERM)
        await bench.until(lambda: asked >= 3)
        assert worker.child.pid == pid
    await bench.until(lambda: worker.child.pid != pid)


async def test_who_does_not_leave_in_time_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "OVERDUE_S", 0.1)
    bench.program[Pool.PREFILL] = HANGS
    workers = bench.plan(prefill=1, deadline_s=0.1)
    (worker,) = await bench.serving()
    await workers.scale(Pool.PREFILL, 0, ())
    await bench.until(lambda: not bench.all())
    assert worker.child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("program", "error"), [(REFUSES, InvalidSettings), (FAILS, Unavailable)])
async def test_before_the_system_is_ready_a_worker_that_cannot_run_ends_it_with_the_end_of_its_log(
    bench: Bench, program: str, error: type[PdqError]
) -> None:
    bench.program[Pool.PREFILL] = program
    bench.plan(prefill=1)
    with pytest.raises(error, match=r"bad settings|no device"):
        await bench.until(lambda: False)


@pytest.mark.parametrize("program", [REFUSES, FAILS])
async def test_later_it_pauses_and_is_reported_and_the_others_go_on(
    bench: Bench, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = bench.plan(prefill=1, decode=1)
    (good,) = await bench.serving()
    workers.settled()
    bench.program[Pool.PREFILL] = program
    await workers.scale(Pool.PREFILL, 2, ())
    bad = bench.all()[1]
    await bench.until(lambda: bad.resting)
    assert "exited with" in await workers.trouble(Pool.PREFILL)
    assert ("bad settings" in bad.trouble) or ("no device" in bad.trouble)
    assert await workers.trouble(Pool.DECODE) == ""
    assert await bench.sizes() == (2, 1)  # it shall run, and nobody else is asked for in its place
    assert good.child.returncode is None
    bench.program[Pool.PREFILL] = SERVES
    bad.pause_until_s = 0.0
    await bench.until(lambda: bad.child.returncode is None)
    await bench.serving()
    monkeypatch.setattr(supervise, "RESTART_WINDOW_S", 0.0)
    await bench.until(lambda: not bad.trouble)


async def test_a_worker_that_cannot_run_can_be_scaled_away(bench: Bench) -> None:
    workers = bench.plan()
    workers.settled()
    bench.program[Pool.DECODE] = REFUSES
    await workers.scale(Pool.DECODE, 1, ())
    await bench.until(lambda: bench.all(Pool.DECODE)[0].resting)
    await workers.scale(Pool.DECODE, 0, ())
    await bench.until(lambda: not bench.all(Pool.DECODE))
    assert await workers.trouble(Pool.DECODE) == ""


async def test_a_program_that_cannot_even_be_started_is_said_to_whoever_asked_for_it(bench: Bench) -> None:
    workers = bench.plan()
    workers._command = lambda pool, worker: ["/nowhere/at/all"]
    with pytest.raises(Unavailable, match="cannot be started"):
        await workers.scale(Pool.DECODE, 1, ())
    assert await bench.sizes() == (0, 0)


async def test_of_those_that_ended_with_the_system_none_is_left_on_the_board(bench: Bench) -> None:
    workers = bench.plan(prefill=1)
    (worker,) = await bench.serving()
    await bench.board.send_away(MODEL, worker.worker)
    await bench.board.send_away(MODEL, "somebody else's")
    await workers.sizes()
    await workers.forget()
    assert await bench.board.away(MODEL) == {"somebody else's"}
