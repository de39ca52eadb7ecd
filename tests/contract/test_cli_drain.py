"""Draining and restarting as commands: what they tell workers, show, write down, and end with."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdq.core import names
from pdq.core.messages import Control, Drain, Undrain
from tests.contract.commands import Cli, finish
from tests.contract.scripted import WORKER, ScriptedWorker, until


@pytest.fixture
async def heard(worker: ScriptedWorker) -> AsyncIterator[list[Control]]:
    """What the worker is told."""
    messages: list[Control] = []
    listening = await worker.system.bus.on_control(names.worker_subject(WORKER), messages.append)
    yield messages
    await listening.close()
    await worker.system.board.call_back(worker.model, WORKER)


async def told(heard: list[Control], kind: type[Control] = Drain) -> Control:
    async def once() -> bool:
        return any(isinstance(message, kind) for message in heard)

    await until(once)
    return next(message for message in heard if isinstance(message, kind))


async def away(worker: ScriptedWorker) -> frozenset[str]:
    return await worker.system.board.away(worker.model)


async def test_a_worker_is_sent_away_told_and_followed_until_it_has_left(
    cli: Cli, worker: ScriptedWorker, heard: list[Control]
) -> None:
    program = await cli.start("drain", WORKER, "--deadline", "2m")
    order = await told(heard)
    assert isinstance(order, Drain)
    assert 110_000 < order.deadline_ms <= 120_000
    assert not order.spill
    await worker.announce("draining")
    await worker.system.registry.withdraw(WORKER)
    status, out, err = await finish(program)
    assert status == 0
    assert WORKER in out
    first, *lines = err.splitlines()
    assert first == f"pdq: no other prefill worker of {worker.model} is ready: requests wait until there is one"
    assert lines[-1] == f"{WORKER} has left"
    assert len(set(lines)) == len(lines)  # one for each change
    assert await away(worker) == {WORKER}


async def test_a_worker_that_does_not_listen_is_told_again_and_is_status_1(
    cli: Cli, worker: ScriptedWorker, heard: list[Control]
) -> None:
    status, out, err = await cli.run("drain", WORKER, "--no-wait", "--json")
    assert status == 1
    assert json.loads(out)["workers"] == [
        {"worker": WORKER, "pool": "prefill", "state": "ready", "held": 2, "running": 1}
    ]
    assert "is ready: requests wait" in err
    deadlines = [message.deadline_ms for message in heard if isinstance(message, Drain)]
    assert len(deadlines) > 2
    assert deadlines == sorted(deadlines, reverse=True)  # telling it again puts nothing off
    status, _, err = await cli.run("drain", WORKER, "--no-wait")
    assert status == 1
    assert f"still there: {WORKER} ready: 2 held, 1 running" in err


async def test_a_drain_is_taken_back(cli: Cli, worker: ScriptedWorker, heard: list[Control]) -> None:
    await worker.system.board.send_away(worker.model, WORKER)
    await worker.announce("draining")
    program = await cli.start("undrain", WORKER, "--json")
    await told(heard, Undrain)
    await worker.announce("ready")
    status, out, err = await finish(program)
    assert (status, err) == (0, "")
    assert json.loads(out)["serving"] == [WORKER]
    assert not await away(worker)


async def test_a_worker_that_has_left_is_called_back(cli: Cli, worker: ScriptedWorker, heard: list[Control]) -> None:
    key = (await worker.accept("0197c0de-0000-7000-8000-0000000000d1", "r")).key  # its model is known by its records
    await worker.system.board.send_away(key.model, WORKER)
    await worker.system.registry.withdraw(WORKER)
    status, out, err = await cli.run("undrain", WORKER)
    assert (status, err) == (0, "")
    assert "called back" in out
    assert not await away(worker)
    status, _, err = await cli.run("undrain", WORKER)
    assert status == 4
    assert f"no worker '{WORKER}' drains or was sent away" in err


async def test_a_pool_that_nobody_supervises_is_sent_away_worker_by_worker(
    cli: Cli, worker: ScriptedWorker, heard: list[Control]
) -> None:
    program = await cli.start("drain", "prefill", "--model", worker.model)
    await told(heard)
    await worker.system.registry.withdraw(WORKER)
    status, _, err = await finish(program)
    assert status == 0
    assert "nobody carries out the size" in err
    assert await away(worker) == {WORKER}
    assert not await worker.system.board.fixed(worker.model)
    status, out, _ = await cli.run("undrain", "prefill", "--model", worker.model)
    assert status == 0
    assert f"call each back by its name: {WORKER}" in out  # a name does not say of which pool it was


async def test_a_restart_that_nobody_carries_on_stops_and_is_status_1(
    cli: Cli, worker: ScriptedWorker, heard: list[Control]
) -> None:
    program = await cli.start(
        *("restart", "prefill", "--one-by-one", "--model", worker.model), PDQ_SCALING_READY_WITHIN_S="0.5"
    )
    await told(heard)
    await worker.system.registry.withdraw(WORKER)
    status, _, err = await finish(program)
    assert status == 1
    assert f"{WORKER} left, and after 0.5 s 0 of 1 prefill workers are ready" in err
    assert not await away(worker)


async def test_unknown_workers_and_empty_pools_are_status_4(cli: Cli, worker: ScriptedWorker) -> None:
    status, out, err = await cli.run("drain", "prefill-none")
    assert (status, out) == (4, "")
    assert err.startswith("pdq: no live worker 'prefill-none'; there are ")
    assert WORKER in err
    for command in ("drain", "restart"):
        status, out, err = await cli.run(command, "decode", "--model", worker.model)
        assert (status, out) == (4, "")
        assert err.startswith(f"pdq: no decode worker of {worker.model} lives")


@pytest.mark.parametrize("deadline", ["soon", "-1s", "1 year", "", "8d", "nan", "99999999h"])
async def test_what_is_no_duration_is_status_2(cli: Cli, deadline: str) -> None:
    status, out, err = await cli.run("drain", "prefill-none", "--deadline", deadline)
    assert (status, out) == (2, "")
    assert "--deadline" in err


async def test_a_worker_without_a_tier_cannot_spill_and_goes_on(
    cli: Cli, worker: ScriptedWorker, heard: list[Control]
) -> None:
    for what in (WORKER, "prefill"):
        status, out, err = await cli.run("drain", what, "--spill", "--model", worker.model)
        assert (status, out) == (2, "")
        assert "PDQ_TRANSPORT_SPILL" in err
    assert not heard
    assert not await away(worker)


async def test_a_worker_with_a_tier_is_told_to_spill(cli: Cli, worker: ScriptedWorker, heard: list[Control]) -> None:
    await worker.announce(spill=("redis",))
    program = await cli.start("drain", WORKER, "--spill")
    order = await told(heard)
    assert isinstance(order, Drain)
    assert order.spill
    await worker.system.registry.withdraw(WORKER)
    assert (await finish(program))[0] == 0


async def test_servers_that_do_not_answer_are_status_3(cli: Cli) -> None:
    (cli.state_dir / "env").write_text("PDQ_NATS_URL=nats://127.0.0.1:1\nPDQ_REDIS_URL=redis://127.0.0.1:1/0\n")
    runs = (cli.run(command, "prefill", "--model", "m") for command in ("drain", "undrain", "restart"))
    for status, out, _ in await asyncio.gather(*runs):
        assert (status, out) == (3, "")


# --- Completion -------------------------------------------------------------------------------------------------------


async def completed(cli: Cli, *words: str) -> list[str]:
    """What bash would offer for the last of ``words``."""
    environ = {"_PDQ_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    status, out, err = await cli.run(**environ)
    assert (status, err) == (0, "")
    return out.split()


async def completed_with(cli: Cli, word: str, *words: str) -> list[str]:
    """What bash offers in time: a system that takes longer than a second, on a busy machine, completes nothing."""
    async with asyncio.timeout(60):
        while word not in (offered := await completed(cli, *words)):
            pass
        return offered


async def completes(cli: Cli, *words: str, to: str) -> None:
    """A completion that finds the servers slow gives up quietly, as it should; then the key is pressed again."""

    async def offered() -> bool:
        return to in await completed(cli, *words)

    await until(offered)


async def test_bash_completes_the_names_of_workers_and_pools(cli: Cli, worker: ScriptedWorker) -> None:
    await completes(cli, "pdq", "drain", "pre", to=WORKER)
    await completes(cli, "pdq", "drain", WORKER[:-1], to=WORKER)
    assert {"prefill", "decode"} <= set(await completed(cli, "pdq", "undrain", ""))
    assert await completed(cli, "pdq", "restart", "") == ["prefill", "decode", "all"]
    assert await completed(cli, "pdq", "dra") == ["drain"]


async def test_undrain_completes_workers_that_were_sent_away(
    cli: Cli, worker: ScriptedWorker, heard: list[Control]
) -> None:
    await worker.system.board.send_away(worker.model, "prefill-gone")
    try:
        await completes(cli, "pdq", "undrain", "prefill-g", to="prefill-gone")
        assert await completed(cli, "pdq", "drain", "prefill-g") == []
    finally:
        await worker.system.board.call_back(worker.model, "prefill-gone")


async def test_completion_is_silent_where_no_system_runs(tmp_path: Path, cli: Cli) -> None:
    assert await completed(Cli(tmp_path / "nowhere"), "pdq", "drain", "") == ["prefill", "decode"]
    (cli.state_dir / "env").write_text("PDQ_NATS_URL=nats://127.0.0.1:1\nPDQ_REDIS_URL=redis://127.0.0.1:1/0\n")
    assert await completed(cli, "pdq", "drain", "") == ["prefill", "decode"]
