"""The example producer, as a program of its own, against real servers and a worker that follows a script.

``run_producer`` needs nothing but a NATS URL and a model: a test against a running system uses it the same way.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdq.adapters.processes import Server
from pdq.core import names
from pdq.core.handoff import Event
from pdq.core.messages import Control, End, Failure, Resend, Usage
from pdq.ports import Changes
from tests.contract.scripted import WORKER, ScriptedWorker, scripted_worker, until

SCRIPT = Path(__file__).parents[2] / "examples" / "nats_producer.py"
REQUEST = "03bb2cc3-d800-7000-8000-000000000001"


async def run_producer(nats_url: str, model: str, prompt: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of the example."""
    environ = {**os.environ, "PDQ_NATS_URL": nats_url}
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), model, prompt, stdout=pipe, stderr=pipe, env=environ
    )
    async with asyncio.timeout(60):
        out, err = await program.communicate()
    assert program.returncode is not None
    return program.returncode, out.decode(), err.decode()


@pytest.fixture
async def worker(nats: Server, valkey: Server, model: str) -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker(nats.url, valkey.url, model) as scripted:
        yield scripted


def test_the_example_is_short_and_needs_only_nats_and_the_standard_library() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 45
    assert [line for line in text.splitlines() if "import" in line] == [
        "import asyncio, json, os, re, sys, nats  # noqa: E401, I001"
    ]


async def test_the_producer_prints_the_pieces_and_ends_at_the_end(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    job = await worker.take()
    assert (job.prompt, job.request_id, job.sampling.max_tokens) == ("The sea is", None, 64)
    await worker.say(job.reply_to, REQUEST, 0, " blue")
    await worker.say(job.reply_to, REQUEST, 1, " and", " wide")
    await worker.say(job.reply_to, REQUEST, 1, " and", " wide")
    usage = Usage(prompt_tokens=3, completion_tokens=4)
    await worker.say(job.reply_to, REQUEST, 3, "", end=End("done", "stop", tail=".", usage=usage))
    assert await producer == (0, " blue and wide.\n", "")


async def test_the_producer_tells_a_resuming_worker_what_has_arrived(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    job = await worker.take()
    await worker.say(job.reply_to, REQUEST, 0, " blue", " and")
    answer = await worker.system.bus.ask_output(job.reply_to, REQUEST, timeout_s=30)
    assert answer is not None
    assert (answer.wanted, answer.tokens) == (True, (0, 1))
    await worker.say(job.reply_to, REQUEST, 2, " wide", end=End("done", "length"))
    assert await producer == (0, " blue and wide\n", "")


async def test_the_producer_asks_for_what_comes_after_a_gap(worker: ScriptedWorker, nats: Server) -> None:
    asked: list[Control] = []
    listening = await worker.system.bus.on_control(names.worker_subject(WORKER), asked.append)
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    job = await worker.take()
    record = await worker.accept(REQUEST, job.reply_to)
    await worker.system.ledger.acquire(record.key, Event.BEGIN, WORKER, 60_000)
    await worker.say(job.reply_to, REQUEST, 0, " blue")
    await worker.say(job.reply_to, REQUEST, 2, " wide")

    async def was_asked() -> bool:
        return bool(asked)

    await until(was_asked)
    assert asked[0] == Resend(REQUEST, 1, job.reply_to)
    await worker.say(job.reply_to, REQUEST, 1, " and", " wide", end=End("done", "length"))
    assert await producer == (0, " blue and wide\n", "")
    await listening.close()


async def test_a_producer_that_heard_nothing_at_all_learns_how_its_request_ended(
    worker: ScriptedWorker, nats: Server
) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    job = await worker.take()
    record = await worker.accept(REQUEST, job.reply_to)
    changes = Changes(ended_code="engine_failed", ended_message="out of memory")
    await worker.system.ledger.apply(record.key, Event.FAIL, worker=WORKER, changes=changes)
    assert await producer == (1, "", "out of memory\n")


async def test_a_producer_whose_job_is_gone_does_not_wait_for_it(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    await worker.take()
    status, text, error = await producer
    assert (status, text) == (1, "")
    assert "turned away" in error


async def test_the_producer_reports_an_error(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, ""))
    job = await worker.take()
    end = End("failed", error=Failure("invalid_request", "the prompt has no tokens"))
    await worker.say(job.reply_to, "", 0, end=end)
    assert await producer == (1, "", "the prompt has no tokens\n")
