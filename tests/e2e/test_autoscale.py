"""Pools that follow the load, an operator, or both: a real ``pdq up`` whose workers start and drain while requests run."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from pdq.adapters.processes import free_port
from pdq.core.layout import Fingerprint
from pdq.ports import Pool, ScalingReport
from tests.e2e.audits import assert_clean
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for

SIM = ("--engine", "sim")
FAST = {
    **SHORT_LEASES,
    "PDQ_SIM_PREFILL_MS_PER_TOKEN": "3",
    "PDQ_SIM_STEP_MS": "5",
    "PDQ_SCALING_PERIOD_S": "0.5",
    "PDQ_SCALING_PREFILL_MAX": "3",
    "PDQ_SCALING_DECODE_MAX": "2",
    "PDQ_SCALING_OUT_WINDOW_S": "0.5",
    "PDQ_SCALING_IN_WINDOW_S": "4",
    "PDQ_SCALING_OUT_COOLDOWN_S": "1",
    "PDQ_SCALING_IN_COOLDOWN_S": "2",
    "PDQ_SCALING_STARTUP_S": "3",
    "PDQ_SCALING_IDLE_S": "3",
}
"""Windows of seconds instead of minutes."""
PROMPT = "How do queues make a busy system calm again, and what do they cost us? " * 2
TOKENS = 20


def report(stack: Stack) -> ScalingReport:
    return wait_for(lambda: stack.inside.ask(lambda it: it.board.last_report(stack.model)), "somebody decides")


def ready(stack: Stack, pool: str) -> int:
    return sum(worker.state == "ready" for worker in stack.workers(pool))


def scale(stack: Stack, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "pdq.cli", "scale", *words, "--state-dir", str(stack.state_dir)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env={**os.environ, **stack.environ}
    )
    return done.returncode, done.stdout, done.stderr


async def complete(client: httpx.AsyncClient, stack: Stack) -> str:
    """The streamed text; fails on anything but a full one."""
    text = ""
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    async with client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
    assert len(text) == TOKENS
    return text


@asynccontextmanager
async def offered(stack: Stack, each_s: float) -> AsyncIterator[list[asyncio.Task[str]]]:
    """A request every so many seconds until the block ends; then all of them must have ended well."""
    tasks: list[asyncio.Task[str]] = []
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def offer() -> None:
            while True:
                tasks.append(asyncio.ensure_future(complete(client, stack)))
                await asyncio.sleep(each_s)

        offering = asyncio.ensure_future(offer())
        try:
            yield tasks
        finally:
            offering.cancel()
        await asyncio.gather(*tasks)


async def until(stack: Stack, sizes: dict[str, int], within_s: float) -> None:
    """Polls without holding up the requests of this process."""
    what = f"{sizes} workers are ready"
    await asyncio.to_thread(
        wait_for, lambda: all(ready(stack, pool) == size for pool, size in sizes.items()), what, within_s
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = FAST | {"PDQ_SCALING_METRICS_PORT": str(free_port())}
    with running(tmp_path_factory.mktemp("stack") / "state", *SIM, "--autoscale", env=env) as stack:
        stack.complete(PROMPT, max_tokens=2)
        yield stack


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_workers_follow_a_load_that_rises_and_falls_and_no_request_is_lost_or_cut(stack: Stack) -> None:
    async with offered(stack, each_s=0.12) as requests:  # 8 a second, each of which takes a worker nearly half a second
        await until(stack, {"prefill": 3}, 90)
    assert report(stack).pools[Pool.PREFILL].cause.value in ("limit", "steady", "window", "cooldown")
    everyone = {worker.worker for worker in stack.workers("prefill")}
    assert len(set(requests)) > 8
    async with offered(stack, each_s=1.5) as requests:
        await until(stack, {"prefill": 1}, 240)
    assert requests
    wait_for(lambda: len(stack.workers("prefill")) == 1, "the others have left")
    assert {worker.worker for worker in stack.workers("prefill")} < everyone
    assert_clean(stack)


def test_an_operators_number_stands_while_pools_follow_the_load_until_it_is_released(stack: Stack) -> None:
    status, out, _ = scale(stack, "decode=2")
    assert (status, out) == (0, "decode is fixed at 2, 2 ready\n")
    decided = report(stack).at_ms
    wait_for(lambda: report(stack).at_ms > decided + 8_000, "many decisions later", 40)
    now = stack.cli("status")["models"][0]["scaling"]["pools"]["decode"]
    assert (now["decided"], now["manual"], now["cause"], ready(stack, "decode")) == (2, 2, "manual", 2)
    status, out, _ = scale(stack, "decode=auto")
    assert (status, out) == (0, "decode follows the load again\n")
    wait_for(lambda: len(stack.workers("decode")) == 1, "back to what the load needs", 60)


def test_what_was_decided_is_exported(stack: Stack) -> None:
    metrics = f"http://127.0.0.1:{stack.env['PDQ_SCALING_METRICS_PORT']}/metrics"
    figures = dict(line.rsplit(" ", 1) for line in httpx.get(metrics).text.splitlines() if not line.startswith("#"))
    assert float(figures['pdq_autoscaler_leader{model="sim"}']) == 1
    assert float(figures['pdq_autoscaler_ready{model="sim",pool="prefill"}']) >= 1
    assert float(figures['pdq_autoscaler_last_decision_age_seconds{model="sim"}']) < 30
    assert any(name.startswith("pdq_autoscaler_decisions_total{") for name in figures)


def test_a_second_autoscaler_follows_and_one_that_only_looks_on_leaves_no_trace(stack: Stack) -> None:
    for options, said in ((("--actuator", "advise"), "follows"), (("--dry-run",), "decides for sim")):
        command = [sys.executable, "-m", "pdq.cli", "autoscaler", *options, "--state-dir", str(stack.state_dir)]
        log = stack.state_dir.parent / f"autoscaler{options[-1]}.log"
        with log.open("w") as out:
            environ = {**os.environ, **stack.environ, "PDQ_SCALING_METRICS_PORT": "0"}
            program = subprocess.Popen(command, stdout=out, stderr=out, env=environ)
        try:
            wait_for(lambda log=log, said=said: said in log.read_text(), said, 60)  # type: ignore[misc]
        finally:
            program.terminate()
            assert program.wait(30) == 0
        assert report(stack).by.startswith("pdq up")


def test_a_worker_that_cannot_start_is_reported_and_keeps_nobody_else_from_serving_or_scaling(stack: Stack) -> None:
    (decode,) = wait_for(lambda: stack.workers("decode"), "a decode worker")
    foreign = Fingerprint(model=stack.model, weights="other", tokenizer="t", dtype="float32")
    stranger = replace(
        decode, worker="decode-stranger", contract=replace(decode.contract, fingerprint=foreign), state="draining"
    )
    stack.inside.ask(lambda it: it.registry.announce(stranger, 120_000))
    try:
        had = ready(stack, "prefill")
        status, _, err = scale(stack, f"prefill={had + 1}", "--timeout", "15")
        assert status == 1
        assert f"{had} of {had + 1} ready" in err
        assert "exited with" in err
        assert len(stack.complete(PROMPT, max_tokens=5)["choices"][0]["text"]) == 5
        assert scale(stack, "decode=2")[0] == 0
    finally:
        stack.inside.ask(lambda it: it.registry.withdraw("decode-stranger"))
        assert scale(stack, "decode=auto", "prefill=auto")[0] == 0
    wait_for(lambda: not report(stack).pools[Pool.PREFILL].trouble, "no trouble any more", 60)


def kill_the_bridge(stack: Stack) -> None:
    """Returns when another one has taken its place."""
    (bridge,) = [it for it in stack.descendants() if "pdq.bridge" in it.cmdline()]
    bridge.kill()
    bridge.wait()

    def alive() -> bool:
        try:
            return httpx.get(f"{stack.url}/health/live").status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(alive, "another bridge", 60)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_idle_pools_go_to_zero_and_requests_that_wait_bring_them_back_whatever_becomes_of_the_bridge(
    tmp_path: Path,
) -> None:
    env = FAST | {"PDQ_SCALING_PREFILL_MIN": "0", "PDQ_SCALING_DECODE_MIN": "0"}
    with running(tmp_path / "state", *SIM, "--autoscale", env=env) as stack:
        for bridge_dies in (False, True):
            await asyncio.to_thread(wait_for, lambda: not stack.workers(), "nobody is left", 60)
            if bridge_dies:
                await asyncio.to_thread(kill_the_bridge, stack)
            async with httpx.AsyncClient(timeout=120) as client:
                lacking = await client.get(f"{stack.url}/health/ready")
                assert lacking.status_code == 503
                assert "no prefill worker" in lacking.text
                await asyncio.gather(*(complete(client, stack) for _ in range(4)))
        assert_clean(stack)


def test_without_autoscaling_sizes_are_those_of_the_start_and_of_operators(tmp_path: Path) -> None:
    with running(tmp_path / "state", *SIM, env=FAST) as stack:
        shown = stack.cli("scale")
        assert (shown["actuator"], shown["automatic"]) == ("local", False)
        assert scale(stack, "prefill=2", "decode=2")[0] == 0
        assert (ready(stack, "prefill"), ready(stack, "decode")) == (2, 2)
        assert scale(stack, "prefill=0")[0] == 0
        status, out, _ = scale(stack, "prefill=auto", "decode=auto")
        assert status == 0
        assert "the number with which the system was started" in out
        wait_for(lambda: len(stack.workers("prefill")) == len(stack.workers("decode")) == 1, "as started", 60)
        assert len(stack.complete(PROMPT, max_tokens=5)["choices"][0]["text"]) == 5
