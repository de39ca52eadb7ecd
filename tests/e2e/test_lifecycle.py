"""How the product starts and ends: on embedded servers or on an operator's own, whole or in parts."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from pdq.adapters.processes import Server, dying_with_parent, free_port
from tests.e2e.stack import SHORT_LEASES, running, wait_for

SIM = ("--engine", "sim")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_pdq_up_leaves_no_process_port_segment_or_file_behind(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    env = {"PDQ_TRANSPORT_ORDER": "shm", "TMPDIR": str(work), "HOME": str(work)}
    with running(tmp_path / "state", *SIM, env=env) as stack:
        assert len(stack.complete("hello", max_tokens=5)["choices"][0]["text"]) == 5
        ports = [
            connection.laddr.port
            for process in stack.descendants()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(ports) >= 3
        segments = Path(stack.environ["PDQ_TRANSPORT_SHM_DIR"])
        assert list(segments.iterdir())
    assert not [port for port in ports if listens(port)]
    assert not segments.exists() or not list(segments.iterdir())
    assert not (tmp_path / "state" / "env").exists()
    assert not list(work.rglob("*"))


def test_pdq_up_can_be_stopped_before_it_is_ready(tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    never_ready = ("up", *SIM, "--prefill", "0", "--mode", "auto", "--port", "0", "--state-dir", str(state))
    with program({}, log, *never_ready) as process:
        wait_for(lambda: "no prefill worker" in log.read_text(), "it waits for a worker", 60)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 5
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not (state / "env").exists()


def test_a_killed_pdq_up_takes_everything_with_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit status -9"), running(tmp_path / "state", *SIM) as stack:
        children = stack.descendants()
        assert len(children) >= 6
        stack.process.kill()
        wait_for(
            lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE],
            "all children are gone",
            90,
        )


def test_without_its_broker_pdq_up_ends_soon_says_so_once_and_answers_who_still_waits(tmp_path: Path) -> None:
    slow = {"PDQ_SIM_STEP_MS": "20"}
    with pytest.raises(AssertionError, match="exit status 3"), running(tmp_path / "state", *SIM, env=slow) as stack:
        body = {"model": stack.model, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(httpx.post, f"{stack.url}/v1/completions", json=body, timeout=60)
            wait_for(stack.live, "a request runs")
            next(child for child in stack.descendants() if child.name() == "nats-server").kill()
            answer = asking.result()
        stack.process.wait(60)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    said = (tmp_path / "state.stderr").read_text()
    assert said.count("nats-server exited with -9") == 1


def test_short_prompts_go_whole_to_a_decode_worker_in_auto_mode(tmp_path: Path) -> None:
    with running(tmp_path / "state", *SIM, "--mode", "auto") as stack:
        short = stack.cli("trace", stack.complete("short", max_tokens=4)["request_id"])
        long = stack.cli("trace", stack.complete("long " * 40, max_tokens=4)["request_id"])
    assert short["mode"] == "aggregated"
    assert short["attempts"][0]["worker"].startswith("decode-")
    assert long["mode"] == "disaggregated"
    assert long["attempts"][0]["worker"].startswith("prefill-")


def test_with_the_variables_set_nothing_embedded_starts(nats: Server, valkey: Server, tmp_path: Path) -> None:
    own = {"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url.replace("/0", "/3")}
    with running(tmp_path / "state", *SIM, "--model", "own-servers", env=own) as stack:
        names = {process.name() for process in stack.descendants()}
        assert not names & {"nats-server", "valkey-server"}
        assert stack.environ["PDQ_NATS_URL"] == nats.url
        assert len(stack.complete("hello", max_tokens=5)["choices"][0]["text"]) == 5


@contextmanager
def program(env: dict[str, str], log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of the parts alone; SIGTERM must end it with status 0."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdq.cli", *arguments],
            env={**os.environ, **env},
            stdout=out,
            stderr=out,
            preexec_fn=dying_with_parent(),
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_the_parts_run_alone_and_drain_on_sigterm(nats: Server, valkey: Server, tmp_path: Path) -> None:
    env = {"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url.replace("/0", "/4"), **SHORT_LEASES}
    port, model = free_port(), ("--engine", "sim", "--model", "parts")
    with ExitStack() as parts:
        for name, arguments in {
            "reaper": ("reaper",),
            "prefill": ("worker", "prefill", *model),
            "decode": ("worker", "decode", *model),
            "bridge": ("bridge", *model, "--port", str(port)),
        }.items():
            parts.enter_context(program(env, tmp_path / name, *arguments))

        def ready() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(ready, "the bridge is ready", 60)
        body = {"model": "parts", "prompt": "hello", "max_tokens": 6}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 6


def test_the_health_of_a_bridge_without_workers_says_what_is_missing(
    nats: Server, valkey: Server, tmp_path: Path
) -> None:
    env = {"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url.replace("/0", "/5")}
    port = free_port()
    with program(env, tmp_path / "bridge", "bridge", "--engine", "sim", "--model", "lonely", "--port", str(port)):
        wait_for(lambda: listens(port), "the bridge listens", 60)
        ready = httpx.get(f"http://127.0.0.1:{port}/health/ready")
        assert ready.status_code == 503
        assert "no prefill worker" in ready.text
        assert httpx.get(f"http://127.0.0.1:{port}/health/live").status_code == 200
        body = {"model": "lonely", "prompt": "a", "max_tokens": 1}
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
