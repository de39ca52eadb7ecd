"""The example producer, as a program of its own, against a real broker and a worker that follows a script.

``run_producer`` needs nothing but a NATS URL and a model: a test against a running system uses it the same way.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdq.adapters.nats import Connection, NatsBus, NatsQueue, connect
from pdq.adapters.processes import Server
from pdq.core.messages import End, Failure, PrefillJob, TokenEntry, TokenFrame, Usage, decode
from pdq.core.settings import Settings, load
from pdq.ports import Delivery, Queue

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


class ScriptedWorker:
    def __init__(self, connection: Connection, settings: Settings, model: str) -> None:
        self.queue = NatsQueue(connection, settings.queue)
        self.bus = NatsBus(connection)
        self.model = model

    async def take(self) -> tuple[Delivery, PrefillJob]:
        async with asyncio.timeout(30):
            while not (taken := await self.queue.pull(Queue.PREFILL, self.model, limit=1, wait_s=5)):
                pass
        await taken[0].ack()
        return taken[0], decode(taken[0].data, PrefillJob)

    async def say(self, job: PrefillJob, seq: int, *pieces: str, end: End | None = None) -> None:
        tokens = tuple(range(seq, seq + len(pieces)))
        entry = TokenEntry(REQUEST, seq, tokens, pieces, end=end)
        await self.bus.send(job.reply_to, TokenFrame("scripted", (entry,)))


@pytest.fixture
async def worker(nats: Server, model: str) -> AsyncIterator[ScriptedWorker]:
    settings = load({"PDQ_NATS_URL": nats.url})
    connection = await connect(settings.nats, "scripted")
    scripted = ScriptedWorker(connection, settings, model)
    await scripted.queue.ensure_streams()
    yield scripted
    await connection.close()


def test_the_example_is_short_and_needs_only_nats_and_the_standard_library() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 25
    assert "pdq." not in "".join(line for line in text.splitlines() if "import" in line)


async def test_the_producer_prints_the_pieces_and_ends_at_the_end(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    _, job = await worker.take()
    assert (job.prompt, job.request_id, job.sampling.max_tokens) == ("The sea is", None, 64)
    await worker.say(job, 0, " blue")
    await worker.say(job, 1, " and", " wide")
    await worker.say(job, 1, " and", " wide")
    usage = Usage(prompt_tokens=3, completion_tokens=4)
    await worker.say(job, 3, "", end=End("done", "stop", tail=".", usage=usage))
    assert await producer == (0, " blue and wide.\n", "")


async def test_the_producer_tells_a_resuming_worker_what_has_arrived(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, "The sea is"))
    _, job = await worker.take()
    await worker.say(job, 0, " blue", " and")
    answer = await worker.bus.ask_output(job.reply_to, REQUEST, timeout_s=30)
    assert answer is not None
    assert (answer.wanted, answer.tokens) == (True, (0, 1))
    await worker.say(job, 2, " wide", end=End("done", "length"))
    assert await producer == (0, " blue and wide\n", "")


async def test_the_producer_reports_an_error(worker: ScriptedWorker, nats: Server) -> None:
    producer = asyncio.create_task(run_producer(nats.url, worker.model, ""))
    _, job = await worker.take()
    await worker.say(job, 0, end=End("failed", error=Failure("invalid_request", "the prompt has no tokens")))
    assert await producer == (1, "", "the prompt has no tokens\n")
