"""Strangers and junk at every door: a clear error for them, and nothing for anybody else."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.aio.msg import Msg

from pdq.core import names
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

PRODUCER = Path(__file__).parents[2] / "examples" / "nats_producer.py"


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {**SHORT_LEASES, "PDQ_SIM_STEP_MS": "5"}
    with running(tmp_path_factory.mktemp("stack") / "state", "--engine", "sim", env=env) as stack:
        yield stack


def still_serves(stack: Stack) -> None:
    assert len(stack.complete("still there?", max_tokens=5)["choices"][0]["text"]) == 5


async def dead_letters(client: nats.NATS, stack: Stack, count: int) -> list[Msg]:
    subscription = await client.jetstream().subscribe(names.dead_subject("prefill", stack.model), ordered_consumer=True)
    return [await subscription.next_msg(timeout=20) for _ in range(count)]


JUNK_JOBS: dict[str, bytes] = {
    "not JSON": b"\x00\xff not json",
    "not an object": b"[1, 2, 3]",
    "half a job": b'{"model": "sim", "reply_to": "REPLY", "prompt": ',
    "no prompt": b'{"model": "sim", "reply_to": "REPLY"}',
    "two prompts": b'{"model": "sim", "reply_to": "REPLY", "prompt": "a", "prompt_token_ids": [1]}',
    "empty prompt": b'{"model": "sim", "reply_to": "REPLY", "prompt_token_ids": []}',
    "token out of range": b'{"model": "sim", "reply_to": "REPLY", "prompt_token_ids": [99999]}',
    "negative token": b'{"model": "sim", "reply_to": "REPLY", "prompt_token_ids": [-1]}',
    "wrong type": b'{"model": "sim", "reply_to": "REPLY", "prompt": "a", "sampling": {"temperature": "hot"}}',
    "too long": b'{"model": "sim", "reply_to": "REPLY", "prompt": "a", "sampling": {"max_tokens": 1000000}}',
    "other model": b'{"model": "other", "reply_to": "REPLY", "prompt": "a"}',
    "internal field": b'{"model": "sim", "reply_to": "REPLY", "prompt": "a", "output_so_far": [1]}',
    "made-up id": b'{"model": "sim", "reply_to": "REPLY", "prompt_token_ids": [1], "request_id": "mine"}',
    "deep nesting": b'{"model": ' + b"[" * 50_000,
}


async def test_junk_jobs_end_in_the_dead_letters_with_a_reason_and_tell_their_requester(sim: Stack) -> None:
    client = await nats.connect(sim.environ["PDQ_NATS_URL"])
    reply = client.new_inbox()
    told = await client.subscribe(reply)
    for junk in JUNK_JOBS.values():
        await client.jetstream().publish(names.prefill_subject("sim"), junk.replace(b"REPLY", reply.encode()))
    dead = await dead_letters(client, sim, len(JUNK_JOBS))
    expected = {junk.replace(b"REPLY", reply.encode()) for junk in JUNK_JOBS.values()}
    assert {letter.data for letter in dead} == expected
    for letter in dead:
        assert letter.headers is not None
        assert letter.headers[names.HEADER_DEAD_REASON] != "internal_error"
        assert letter.headers[names.HEADER_DEAD_DETAIL]
    readable = [junk for junk in JUNK_JOBS.values() if _reply_to_can_be_read(junk)]
    for _ in readable:
        frame = json.loads((await told.next_msg(timeout=20)).data)
        (entry,) = frame["entries"]
        assert entry["end"]["state"] == "failed"
        assert entry["end"]["error"]["message"]
    await client.close()
    await asyncio.to_thread(still_serves, sim)
    assert not sim.live()


def _reply_to_can_be_read(junk: bytes) -> bool:
    try:
        return isinstance(json.loads(junk), dict)
    except (ValueError, RecursionError):
        return False


async def test_a_producer_cannot_make_workers_publish_to_internal_subjects(sim: Stack) -> None:
    client = await nats.connect(sim.environ["PDQ_NATS_URL"])
    job = {"model": "sim", "prompt": "a", "reply_to": names.CANCEL_SUBJECT, "sampling": {"max_tokens": 3}}
    heard = await client.subscribe(names.CANCEL_SUBJECT)
    await client.jetstream().publish(names.prefill_subject("sim"), json.dumps(job).encode())
    (letter,) = (await dead_letters(client, sim, 1 + len(JUNK_JOBS)))[-1:]
    assert json.loads(letter.data) == job
    assert not heard.pending_msgs
    await client.close()


HTTP_JUNK: dict[str, tuple[str, bytes]] = {
    "not JSON": ("/v1/completions", b"{"),
    "invalid UTF-8": ("/v1/completions", b'{"model": "sim", "prompt": "\xff\xfe"}'),
    "NaN": ("/v1/completions", b'{"model": "sim", "prompt": "a", "temperature": NaN}'),
    "a string for a number": ("/v1/completions", b'{"model": "sim", "prompt": "a", "max_tokens": "ten"}'),
    "a huge number": ("/v1/completions", b'{"model": "sim", "prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}"),
    "deep nesting": ("/v1/chat/completions", b'{"model": "sim", "messages": ' + b"[" * 100_000),
    "no messages": ("/v1/chat/completions", b'{"model": "sim", "messages": []}'),
    "unknown model": ("/v1/completions", b'{"model": "nobody", "prompt": "a"}'),
    "over the context": ("/v1/completions", b'{"model": "sim", "prompt": "a", "max_tokens": 9999999}'),
    "ten megabytes": ("/v1/completions", b'{"model": "sim", "prompt": "' + b"a" * 10_000_000 + b'"}'),
}


def test_junk_over_http_gets_an_openai_error(sim: Stack) -> None:
    for what, (path, body) in HTTP_JUNK.items():
        answer = httpx.post(f"{sim.url}{path}", content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, (what, answer.status_code)
        assert answer.json()["error"]["message"], what
        assert answer.headers["x-request-id"], what
    assert httpx.get(f"{sim.url}/nowhere").status_code == 404
    assert httpx.put(f"{sim.url}/v1/completions").status_code == 405
    still_serves(sim)


def test_a_stranger_on_the_ucx_port_disturbs_nobody(sim: Stack) -> None:
    (prefill,) = sim.workers("prefill")
    # The port shows in the locators of a live handoff only; a stranger scans for it.
    import psutil

    ports = [c.laddr.port for c in psutil.Process(prefill.pid).net_connections("tcp") if c.status == "LISTEN"]
    assert ports
    choose = random.Random(1)
    strangers = []
    for port in ports:
        for size in (0, 1, 7, 64, 4096, 100_000):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            strangers.append(stranger)
            try:
                stranger.sendall(choose.randbytes(size))
            except OSError:
                continue  # thrown out already
            still_serves(sim)
    for stranger in strangers:
        stranger.close()
    still_serves(sim)
    assert prefill.pid in [worker.pid for worker in sim.workers("prefill")]
    told = sim.cli("trace", sim.complete("over ucx?", max_tokens=4)["request_id"])
    assert told["attempts"][0]["decodings"][0]["transport"] == "ucx"


def test_the_producer_script_gets_its_tokens_from_the_running_product(sim: Stack) -> None:
    done = subprocess.run(
        [sys.executable, str(PRODUCER), "sim", "Tell me about queues"],
        env={**os.environ, "PDQ_NATS_URL": sim.environ["PDQ_NATS_URL"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("\n")) == 64


def test_pdq_publish_streams_the_same_tokens_as_the_bridge(sim: Stack) -> None:
    bridge = sim.complete("the same", max_tokens=9, temperature=0)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pdq.cli", "publish", "the same", "--model", "sim"),
            *("--max-tokens", "9", "--temperature", "0", "--state-dir", str(sim.state_dir)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == bridge["choices"][0]["text"]


def test_a_deadline_that_passes_ends_the_request_and_frees_everything(sim: Stack) -> None:
    answer = httpx.post(
        f"{sim.url}/v1/completions",
        json={"model": "sim", "prompt": "too slow", "max_tokens": 4000},
        headers={"x-request-timeout-ms": "300"},
        timeout=30,
    )
    assert answer.status_code == 504
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    wait_for(lambda: not sim.live(), "no live record")
