"""``pdq audit`` and ``pdq cancel`` on a running system: silent while all is well, and right about what is not."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from pdq.core import names
from pdq.core.audit import Finding, Kind
from pdq.core.lease import RecordKey
from pdq.ports import NewRecord
from tests.e2e.audits import assert_clean, findings_of, told
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for


@pytest.fixture(scope="module", params=["disaggregated", "auto"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two of each, with a tier that is written through, and (auto) short prompts that one worker serves alone."""
    options = ("--engine", "sim", "--prefill", "2", "--decode", "2", "--mode", request.param)
    env = {
        **SHORT_LEASES,
        "PDQ_SIM_STEP_MS": "2",
        "PDQ_SIM_PREFILL_MS_PER_TOKEN": "0.1",
        "PDQ_TRANSPORT_WRITE_THROUGH": "redis",
    }
    with running(tmp_path_factory.mktemp("stack") / "state", *options, env=env) as stack:
        wait_for(lambda: len(stack.workers()) == 4, "all four workers registered")
        yield stack


def audit(stack: Stack, *options: str, **env: str) -> tuple[int, Any]:
    """Exit status and report of ``pdq audit``."""
    done = cli(stack, "audit", "--json", *options, **env)
    return done.returncode, json.loads(done.stdout)


def cli(stack: Stack, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdq.cli", *arguments, "--state-dir", str(stack.state_dir)]
    environ = {**os.environ, **stack.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


async def mixed_load(stack: Stack, count: int, seed: int, cut: float, width: int = 12) -> None:
    """Streams of all lengths, of which a share is cut off somewhere by its client."""
    choose, gate = random.Random(seed), asyncio.Semaphore(width)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=64)) as client:

        async def one(prompt: str, tokens: int, cut_after: float | None) -> None:
            body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": True}
            async with gate:
                try:
                    async with asyncio.timeout(cut_after):
                        async with client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer:
                            assert answer.status_code == 200, await answer.aread()
                            async for line in answer.aiter_lines():
                                assert '"error"' not in line, line
                except TimeoutError:
                    assert cut_after is not None

        await asyncio.gather(
            *(
                one(
                    "x" * choose.randint(1, 1500),
                    choose.randint(1, 60),
                    choose.uniform(0.001, 0.3) if choose.random() < cut else None,
                )
                for _ in range(count)
            )
        )


def test_an_idle_system_is_clean(stack: Stack) -> None:
    status, report = audit(stack)
    assert (status, report["findings"]) == (0, [])
    assert report["looked_at"]["workers"] == 4


async def test_nothing_is_left_after_50_requests_of_which_some_were_cut_off(stack: Stack) -> None:
    await mixed_load(stack, 50, seed=1, cut=0.4)
    await asyncio.to_thread(assert_clean, stack)


async def test_20_audits_under_steady_load_find_nothing(stack: Stack) -> None:
    stop = asyncio.Event()

    async def load() -> None:
        seed = 100
        while not stop.is_set():
            await mixed_load(stack, 30, seed, cut=0.2)
            seed += 1

    loading = asyncio.create_task(load())
    seen: list[Finding] = []
    for _ in range(20):
        seen += await asyncio.to_thread(findings_of, stack)
    stop.set()
    await loading
    assert not seen, told(seen)


async def test_a_long_answer_whose_prompt_lies_in_a_tier_is_no_trouble(stack: Stack) -> None:
    body = {"model": "sim", "prompt": "x" * 500, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        while any(record.state != "fetched" for record in stack.live()):
            await anext(lines)
        findings = await asyncio.to_thread(findings_of, stack)
        assert stack.live(), "it has ended before it was looked at"
        assert not findings, told(findings)
    await asyncio.to_thread(assert_clean, stack)


# --- What was done to it by hand --------------------------------------------------------------------------------------


def kinds(shown: list[dict[str, Any]]) -> set[str]:
    return {each["kind"] for each in shown}


@pytest.fixture
def no_reaper(stack: Stack) -> Iterator[None]:
    """It would end a request without a job before an audit is sure of it."""
    [reaper] = [child for child in stack.descendants() if "reaper" in child.cmdline()]
    reaper.suspend()
    yield
    reaper.resume()


@pytest.mark.usefixtures("no_reaper")
def test_what_was_left_behind_by_hand_is_found_and_reclaimed(stack: Stack, tmp_path: Path) -> None:
    assert_clean(stack)
    server = redis.Redis.from_url(stack.environ["PDQ_REDIS_URL"], decode_responses=True)
    ghost = "0197c0de-0000-7000-8000-00000000dead"
    server.hset(names.tier_key("sim", ghost, 1, "head"), mapping={"pass": "x", "lengths": "[5]"})
    server.set(names.tier_key("sim", ghost, 1, "0.0"), "bytes")
    server.hset(names.load_key("sim"), "queued:batch:nobody", "3 30 45")
    server.zadd(names.due_key("sim"), {ghost + "1": 2**52})
    lost = NewRecord(RecordKey("sim", ghost + "2"), "pdq.tokens.nobody", 10, 5, 600_000, "secret")
    stack.inside.ask(lambda system: system.ledger.enqueue(lost))

    # Where no worker sweeps before the audit comes by.
    segment = tmp_path / f"{names.SHM_PREFIX}dead"
    segment.write_bytes(bytes(4096))
    elsewhere = {"PDQ_TRANSPORT_SHM_DIR": str(tmp_path)}

    expected = {Kind.ORPHANED_OBJECT, Kind.COUNTER_DRIFT, Kind.STRAY_DUE_ENTRY, Kind.RECORD_WITHOUT_JOB}
    # The lost request's record must be older than a publish may take.
    wait_for(lambda: expected <= {finding.kind for finding in findings_of(stack)}, "all of it is found")
    status, report = audit(stack, **elsewhere)
    assert status == 1
    assert kinds(report["findings"]) == expected
    assert all(each["detail"] and each["reclaim"] and each["since_ms"] > 0 for each in report["findings"])
    assert {each["subject"] for each in report["findings"] if each["kind"] == Kind.ORPHANED_OBJECT} == {
        f"redis object pdq:{{sim}}:kv:{ghost}:1",
        f"shm object {segment.name}",
    }

    status, report = audit(stack, "--reclaim", **elsewhere)
    assert (status, report["findings"]) == (0, [])
    assert kinds(report["reclaimed"]) == expected
    assert not segment.exists()
    assert not server.keys(f"pdq:*{ghost}:*")
    ended = stack.inside.ask(lambda system: system.ledger.read(lost.key))
    assert ended is not None
    assert (ended.state, ended.ended_code) == ("failed", "job_lost")
    server.close()


@pytest.mark.usefixtures("no_reaper")
def test_a_live_request_that_is_off_the_due_list_is_put_back(stack: Stack) -> None:
    server = redis.Redis.from_url(stack.environ["PDQ_REDIS_URL"], decode_responses=True)
    key = RecordKey("sim", "0197c0de-0000-7000-8000-00000000cafe")
    stack.inside.ask(
        lambda system: system.ledger.enqueue(NewRecord(key, "pdq.tokens.nobody", 10, 5, 600_000, "secret"))
    )
    server.zrem(names.due_key("sim"), key.request_id)
    status, report = audit(stack)
    assert status == 1
    assert Kind.RECORD_NOT_DUE in kinds(report["findings"])
    audit(stack, "--reclaim")
    assert Kind.RECORD_NOT_DUE not in kinds(audit(stack)[1]["findings"])
    assert cli(stack, "cancel", key.request_id).returncode == 0
    assert_clean(stack)
    server.close()


# --- Workers that stop ------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Stack]:
    """Leases long enough to look at, steps slow enough to be in the middle of something."""
    env = {**SHORT_LEASES, "PDQ_LEASE_TTL_MS": "12000", "PDQ_QUEUE_ACK_WAIT_S": "12", "PDQ_SIM_STEP_MS": "100"}
    with running(tmp_path / "state", "--engine", "sim", "--prefill", "1", "--decode", "1", env=env) as stack:
        wait_for(lambda: len(stack.workers()) == 2, "both workers registered")
        yield stack


def test_a_stopped_worker_is_named_with_what_it_holds_until_it_goes_on(slow: Stack) -> None:
    answers: list[dict[str, Any]] = []
    request = threading.Thread(target=lambda: answers.append(slow.complete("s" * 40, max_tokens=80)))
    request.start()
    (record,) = wait_for(lambda: [it for it in slow.live() if it.state == "fetched"], "it is being decoded")
    (worker,) = slow.workers("decode")
    psutil.Process(worker.pid).suspend()
    try:
        found = findings_of(slow)
    finally:
        psutil.Process(worker.pid).resume()
    assert {(each.kind, each.subject, each.worker) for each in found} == {
        (Kind.SILENT_WORKER, f"worker {worker.worker}", worker.worker),
        (Kind.SILENT_HOLDER, f"request {record.key.request_id}", worker.worker),
    }
    request.join(60)
    assert len(answers) == 1
    assert_clean(slow)


def test_a_cancelled_request_ends_for_its_client_and_a_second_time_there_is_nothing_to_cancel(slow: Stack) -> None:
    seen: list[httpx.Response] = []
    body = {"model": "sim", "prompt": "c" * 40, "max_tokens": 500}
    url = f"{slow.url}/v1/completions"
    request = threading.Thread(target=lambda: seen.append(httpx.post(url, json=body, timeout=60)))
    request.start()
    (record,) = wait_for(lambda: [it for it in slow.live() if it.state == "fetched"], "it is being decoded")
    done = cli(slow, "cancel", record.key.request_id, "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, outcome["cancelled"], outcome["before"], outcome["state"]) == (
        0,
        True,
        "fetched",
        "cancelled",
    )
    assert outcome["holders"] == [slow.workers("decode")[0].worker]
    request.join(30)
    assert seen[0].status_code >= 400
    assert "cancelled" in seen[0].text
    again = cli(slow, "cancel", record.key.request_id)
    assert (again.returncode, again.stdout) == (1, "nothing to cancel: it is cancelled (cancelled) already\n")
    unknown = cli(slow, "cancel", "no-such-request")
    assert (unknown.returncode, unknown.stdout) == (4, "")
    assert "no-such-request" in unknown.stderr
    assert_clean(slow)
