"""The commands as an operator runs them: programs with arguments, output and an exit status, on real servers."""

import asyncio
import json
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pdq.core import names
from pdq.core.handoff import Event, Side, State
from pdq.core.messages import Cancel, Control, End, Failure, Resend
from pdq.ports import Changes
from tests.contract.commands import Cli, finish
from tests.contract.scripted import LAYOUT, WORKER, ScriptedWorker, until

REQUEST = "03bb2cc3-d800-7000-8000-0000000000"


# --- Looking at a system ----------------------------------------------------------------------------------------------


async def test_status_shows_workers_queues_and_records(cli: Cli, worker: ScriptedWorker) -> None:
    await worker.accept(REQUEST + "10", "r")
    (found,) = [each for each in (await cli.json("status"))["models"] if each["model"] == worker.model]
    assert [(each["worker"], each["occupancy"]["free_blocks"]) for each in found["workers"]] == [(WORKER, 5)]
    assert set(found["queues"]) == {"prefill", "decode", "local"}
    assert found["records"] == {"queued": 1}
    _, out, _ = await cli.run("status")
    for part in (worker.model, WORKER, "5/8", "1 queued"):
        assert part in out


async def test_leases_shows_who_holds_what_but_no_secret(cli: Cli, worker: ScriptedWorker) -> None:
    record = await worker.accept(REQUEST + "20", "r")
    grant = await worker.system.ledger.acquire(record.key, Event.BEGIN, WORKER, 60_000)
    changes = Changes(layout=LAYOUT)
    await worker.system.ledger.update(record.key, Side.SOURCE, grant.epoch, changes)
    (found,) = [each for each in await cli.json("leases") if each["model"] == worker.model]
    assert (found["state"], found["source"]["worker"], found["sink"]) == ("prefilling", WORKER, None)
    assert 0 < found["source"]["left_ms"] <= 60_000
    assert found["kv_bytes"] == LAYOUT.kv_bytes(20)
    assert "open sesame" not in json.dumps(found)
    _, out, _ = await cli.run("leases")
    assert record.key.request_id in out
    assert WORKER in out


async def test_trace_tells_what_happened_to_a_request(cli: Cli, worker: ScriptedWorker) -> None:
    ledger = worker.system.ledger
    record = await worker.accept(REQUEST + "30", "r")
    grant = await ledger.acquire(record.key, Event.BEGIN, WORKER, 60_000)
    changes = Changes(ended_code="stop", emitted=1)
    note = {"prefill_ms": 12.5, "prompt_tokens": 20, "tokens": 1}
    await ledger.apply(record.key, Event.FINISH, epoch=grant.epoch, worker=WORKER, changes=changes, note=note)
    found = await cli.json("trace", record.key.request_id)
    assert (found["state"], found["tokens"], found["ended_code"]) == ("done", 1, "stop")
    assert found["attempts"][0]["worker"] == WORKER
    assert found["attempts"][0]["prefill_ms"] == 12.5
    _, out, _ = await cli.run("trace", record.key.request_id)
    assert "done (stop)" in out
    assert WORKER in out


async def test_trace_of_an_unknown_request_says_so_with_status_4(cli: Cli) -> None:
    status, out, err = await cli.run("trace", "no-such-request")
    assert (status, out) == (4, "")
    assert err.startswith("pdq: no request 'no-such-request'")
    assert err.count("\n") == 1


# --- Publishing -------------------------------------------------------------------------------------------------------


async def test_publish_streams_the_text_of_a_request(cli: Cli, worker: ScriptedWorker) -> None:
    options = ("--model", worker.model, "--max-tokens", "5", "--temperature", "0", "--seed", "7")
    program = await cli.start("publish", "The sea is", *options)
    job = await worker.take()
    assert (job.prompt, job.sampling.max_tokens, job.sampling.temperature, job.sampling.seed) == ("The sea is", 5, 0, 7)
    await worker.say(job.reply_to, REQUEST + "40", 0, " blue")
    assert program.stdout is not None
    assert await program.stdout.readexactly(5) == b" blue"
    await worker.say(job.reply_to, REQUEST + "40", 1, " and", " wide", end=End("done", "stop", tail="!"))
    assert await finish(program) == (0, " and wide!\n", "")


async def test_publish_reads_a_message_from_standard_input(cli: Cli, worker: ScriptedWorker) -> None:
    program = await cli.start("publish", "-", "--chat", "--model", worker.model, "--json")
    told = asyncio.create_task(finish(program, "Why?\n"))
    job = await worker.take()
    assert job.messages is not None
    assert [(message.role, message.content) for message in job.messages] == [("user", "Why?\n")]
    await worker.say(job.reply_to, REQUEST + "41", 0, "So.", end=End("done", "length"))
    status, out, _ = await told
    assert status == 0
    assert json.loads(out) == {
        "request_id": REQUEST + "41",
        "seq": 0,
        "tokens": [0],
        "pieces": ["So."],
        "end": {"state": "done", "finish_reason": "length"},
    }


async def test_publish_asks_for_what_was_lost_and_says_what_it_has(cli: Cli, worker: ScriptedWorker) -> None:
    asked: list[Control] = []
    listening = await worker.system.bus.on_control(names.worker_subject(WORKER), asked.append)
    program = await cli.start("publish", "a", "--model", worker.model)
    job = await worker.take()
    record = await worker.accept(REQUEST + "42", job.reply_to)
    await worker.system.ledger.acquire(record.key, Event.BEGIN, WORKER, 60_000)
    await worker.say(job.reply_to, REQUEST + "42", 0, "a")
    await worker.say(job.reply_to, REQUEST + "42", 2, "c", end=End("done", "stop"))

    async def was_asked() -> bool:
        return bool(asked)

    await until(was_asked)
    assert asked[0] == Resend(REQUEST + "42", 1, job.reply_to)
    answer = await worker.system.bus.ask_output(job.reply_to, REQUEST + "42", timeout_s=30)
    assert answer is not None
    assert answer.tokens == (0,)
    await worker.say(job.reply_to, REQUEST + "42", 1, "b")
    assert await finish(program) == (0, "abc\n", "")
    await listening.close()


async def test_publish_of_a_request_that_fails_has_status_1_and_the_reason(cli: Cli, worker: ScriptedWorker) -> None:
    program = await cli.start("publish", "", "--model", worker.model)
    job = await worker.take()
    failure = Failure("invalid_request", "the prompt has no tokens")
    await worker.say(job.reply_to, "", 0, end=End("failed", error=failure))
    status, _, err = await finish(program)
    assert (status, err) == (1, "pdq: request failed (invalid_request): the prompt has no tokens\n")


async def test_an_end_that_nobody_sent_is_read_from_the_record(cli: Cli, worker: ScriptedWorker) -> None:
    program = await cli.start("publish", "a", "--model", worker.model, PDQ_BRIDGE_SILENCE_S="0.2")
    job = await worker.take()
    record = await worker.accept(REQUEST + "43", job.reply_to)
    await worker.say(job.reply_to, REQUEST + "43", 0, "a")
    changes = Changes(ended_code="engine_failed", ended_message="out of memory")
    await worker.system.ledger.apply(record.key, Event.FAIL, worker=WORKER, changes=changes)
    status, out, err = await finish(program)
    assert (status, out, err) == (1, "a\n", "pdq: request failed (engine_failed): out of memory\n")


async def test_publish_of_a_job_that_nobody_knows_any_more_does_not_wait_for_it(
    cli: Cli, worker: ScriptedWorker
) -> None:
    program = await cli.start("publish", "a", "--model", worker.model, PDQ_BRIDGE_SILENCE_S="0.2")
    await worker.take()
    status, out, err = await finish(program)
    assert (status, out) == (1, "")
    assert "turned away" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("known", [True, False], ids=["after its first token", "before its first token"])
async def test_ctrl_c_cancels_the_request(cli: Cli, worker: ScriptedWorker, known: bool) -> None:
    told: list[Control] = []
    listening = await worker.system.bus.on_control(names.CANCEL_SUBJECT, told.append)
    program = await cli.start("publish", "a", "--model", worker.model)
    job = await worker.take()
    record = await worker.accept(f"{REQUEST}5{known:d}", job.reply_to)
    if known:
        await worker.say(job.reply_to, record.key.request_id, 0, "a")
        assert program.stdout is not None
        await program.stdout.readexactly(1)
    program.send_signal(signal.SIGINT)
    status, _, _ = await finish(program)
    assert status not in (0, None)
    after = await worker.system.ledger.read(record.key)
    assert after is not None
    assert (after.state, after.ended_code) == (State.CANCELLED, "cancelled")

    async def workers_know() -> bool:
        return Cancel((record.key.request_id,)) in told

    await until(workers_know)
    await listening.close()


# --- Errors -----------------------------------------------------------------------------------------------------------


async def test_without_a_running_system_commands_say_what_to_do_with_status_3(tmp_path: Path) -> None:
    status, out, err = await Cli(tmp_path / "nowhere").run("status")
    assert (status, out) == (3, "")
    assert "pdq up" in err
    assert err.count("\n") == 1


async def test_a_server_that_does_not_answer_is_status_3(cli: Cli) -> None:
    status, _, err = await cli.run("status", PDQ_NATS_URL="nats://127.0.0.1:9", PDQ_NATS_CONNECT_TIMEOUT_S="0.5")
    assert status == 3
    assert "127.0.0.1:9" in err
    assert err.count("\n") == 1


async def test_a_model_that_nobody_can_prepare_is_status_2_and_says_which_are(cli: Cli) -> None:
    status, _, err = await cli.run("up", "--model", "nothing")
    assert status == 2
    assert "nothing" in err
    assert "smollm2-135m-instruct" in err


async def test_the_version_is_told(tmp_path: Path) -> None:
    told = await finish(await Cli(tmp_path / ".pdq").start("--version"))
    assert told == (0, f"pdq {version('pdq')}\n", "")


def test_what_talks_to_servers_is_not_loaded_before_a_command_needs_it() -> None:
    """Every command is a process: what all of them load, each waits for."""
    heavy = "{'nats', 'redis', 'aiohttp', 'torch', 'rich', 'kubernetes_asyncio'}"
    program = f"import sys, pdq.cli.app; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


async def test_a_misspelt_setting_is_status_2(cli: Cli) -> None:
    status, _, err = await cli.run("status", PDQ_LEASE_TLL_MS="5000")
    assert (status, err) == (2, "pdq: unknown setting PDQ_LEASE_TLL_MS; did you mean PDQ_LEASE_TTL_MS?\n")


async def test_a_state_directory_with_a_strange_env_file_is_status_2(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("PATH=/bin\n")
    status, _, err = await Cli(tmp_path).run("leases")
    assert status == 2
    assert "'PATH'" in err


async def test_a_value_out_of_range_is_status_2_and_nothing_is_published(cli: Cli, worker: ScriptedWorker) -> None:
    status, _, err = await cli.run("publish", "a", "--model", worker.model, "--temperature", "-1")
    assert status == 2
    assert "temperature" in err
    assert "Traceback" not in err


async def test_the_schemas_command_finds_drift_and_mends_it(tmp_path: Path) -> None:
    cli = Cli(tmp_path / ".pdq")
    assert (await cli.run("schemas", "--write"))[0] == 0
    assert await cli.run("schemas") == (0, "", "")
    file = tmp_path / "schemas" / "PrefillJob.json"
    file.write_text(file.read_text().replace("PrefillJob", "PrefilJob"))
    status, out, err = await cli.run("schemas")
    assert status == 1
    assert '+  "title": "PrefillJob"' in out
    assert "run `pdq schemas --write`" in err
