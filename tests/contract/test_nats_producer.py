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
from pdq.core.messages import End, Failure, Usage
from tests.contract.scripted import ScriptedWorker, scripted_worker

SCRIPT = Path(__file__).parents[2] / "examples" / "nats_producer.py"
REQUEST = "0197c0de-0000-7000-8000-000000000001"


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
    assert len(text.splitlines()) <= 25
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


async def test_the_producer_reports_an_error(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, ""))
    job = await worker.take()
    end = End("failed", error=Failure("invalid_request", "the prompt has no tokens"))
    await worker.say(job.reply_to, "", 0, end=end)
    assert await producer == (1, "", "the prompt has no tokens\n")
