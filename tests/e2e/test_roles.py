"""The permissions that the documentation gives each role: enough for a whole system, and no more than it says."""

import asyncio
import contextlib
import json
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import nats
import pytest

from pdq.adapters.processes import Child, free_port
from pdq.core import names
from tests.e2e.stack import SHORT_LEASES, wait_for
from tests.secured import THROUGH_REDIS, Secured, password, secured


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Servers on which nobody has set anything up yet."""
    with secured(tmp_path_factory.mktemp("guarded")) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(guarded: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """One program per role, each with its own credentials only; the address of the bridge, and where the logs are."""
    logs, port = tmp_path_factory.mktemp("fleet"), free_port()
    common = {
        "OMP_NUM_THREADS": "1",
        "PDQ_HANDOFF_MODE": "auto",
        "PDQ_BRIDGE_PORT": str(port),
        "PDQ_SIM_STEP_MS": "2",
        "PDQ_SCALING_PERIOD_S": "0.2",
        "PDQ_SCALING_METRICS_PORT": "0",
        **THROUGH_REDIS,
        **SHORT_LEASES,
    }
    programs = {
        "reaper": (["-m", "pdq.cli", "reaper"], "reaper"),
        "prefill": (["-m", "workers.sim", "prefill", "--model", "guarded"], "worker"),
        "decode": (["-m", "workers.sim", "decode", "--model", "guarded"], "worker"),
        "bridge": (["-m", "pdq.bridge", "--model", "guarded"], "bridge"),
        "autoscaler": (["-m", "pdq.cli", "autoscaler", "--model", "guarded"], "autoscaler"),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
    children = [
        Child(role, [sys.executable, *argv], logs / f"{role}.log", inherited | common | guarded.environ(role, redis))
        for role, (argv, redis) in programs.items()
    ]
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
        return False

    try:
        children[0].start()
        wait_for(lambda: asyncio.run(set_up(guarded)), "all streams, which only the reaper may create", 60)
        for child in children[1:]:
            child.start()
        wait_for(ready, "a ready bridge", 60)
        yield url, logs
    finally:
        for child in children:
            asyncio.run(child.stop(20))
    assert [child.returncode for child in children] == [0] * len(children)


async def set_up(guarded: Secured) -> bool:
    client = await log_in(guarded, "operator")
    try:
        return len(await client.jetstream().streams_info()) == 4
    finally:
        await client.close()


def test_the_permissions_in_the_documentation_suffice_for_every_role(fleet: tuple[str, Path]) -> None:
    url, logs = fleet
    for prompt in ("short", "a prompt that is long enough to be prefilled by another worker " * 4):
        body = {"model": "guarded", "prompt": prompt, "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    late = httpx.post(
        f"{url}/v1/completions",
        json={"model": "guarded", "prompt": "late", "max_tokens": 4000, "ignore_eos": True},
        headers={"x-request-timeout-ms": "500"},
        timeout=60,
    )
    assert late.status_code == 504
    decided = logs / "autoscaler.log"
    wait_for(
        lambda: "holding" in decided.read_text() or "steady" in decided.read_text(), "a decision of the autoscaler"
    )
    told = "\n".join(log.read_text() for log in logs.glob("*.log"))
    assert "ermission" not in told, told
    assert "NOPERM" not in told, told


async def test_a_producer_needs_its_own_subjects_only(guarded: Secured, fleet: tuple[str, Path]) -> None:
    client = await log_in(guarded, "producer")
    reply = client.new_inbox()
    tokens = await client.subscribe(reply)
    job = {"model": "guarded", "prompt": "hello", "reply_to": reply, "sampling": {"max_tokens": 4}}
    stored = await client.jetstream().publish(names.prefill_subject("guarded"), json.dumps(job).encode())
    got = 0
    while True:
        (entry,) = json.loads((await tokens.next_msg(timeout=30)).data)["entries"]
        got += len(entry.get("tokens", ()))
        if "end" in entry:
            break
    assert (got, entry["end"]["state"]) == (4, "done")

    mine = {"model": "guarded", "stream": stored.stream, "sequence": stored.seq, "reply_to": reply}
    question = {"type": "status_question", **mine, "next_seq": 2}
    told = await client.request(names.STATUS_SUBJECT, json.dumps(question).encode(), timeout=30)
    assert json.loads(told.data)["state"] == "done"
    (rest,) = json.loads((await tokens.next_msg(timeout=30)).data)["entries"]
    assert (rest["seq"], len(rest["tokens"]), rest["end"]["state"]) == (2, 2, "done")
    await client.close()


FORBIDDEN = [
    names.decode_subject("guarded"),
    names.CANCEL_SUBJECT,
    names.reply_subject("bridge-1"),
    "$JS.API.STREAM.DELETE.PDQ_PREFILL",
]


async def test_a_producer_can_neither_speak_for_workers_nor_listen_to_them(
    guarded: Secured, fleet: tuple[str, Path]
) -> None:
    refused: list[str] = []

    async def hear(error: Exception) -> None:
        refused.append(str(error).lower())

    client = await log_in(guarded, "producer", hear)
    for subject in FORBIDDEN:
        await client.publish(subject, b"{}")
    for subject in ("pdq.tokens.>", "_INBOX.>", "pdq.control.>"):
        await client.subscribe(subject)
    async with asyncio.timeout(20):
        while len(refused) < len(FORBIDDEN) + 3:
            await client.flush()
    assert all("permissions violation" in error for error in refused)
    await client.close()


async def log_in(servers: Secured, role: str, on_error: object = None) -> nats.NATS:
    context = ssl.create_default_context(cafile=servers.authority.path("ca.pem"))
    context.load_cert_chain(servers.authority.path("client.pem"), servers.authority.path("client.key"))
    return await nats.connect(
        f"tls://127.0.0.1:{servers.nats_port}",
        user=role,
        password=password("nats", role),
        tls=context,
        inbox_prefix=f"_INBOX.{role}",
        **({"error_cb": on_error} if on_error else {}),  # type: ignore[arg-type]
    )
