"""Who may do what with a running pdq: credentials, TLS, listeners, and what clients cannot set."""

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import nats
import psutil
import pytest

from pdq.adapters.processes import Server
from pdq.connect import transports
from pdq.core import names
from pdq.core.environment import load
from pdq.core.errors import HandoffUnknown
from pdq.core.handoff import State
from pdq.ports import ChunkPlan, HandoffRef, Record
from tests.e2e.stack import SHORT_LEASES, Stack, running, wait_for
from tests.kv import targets
from tests.secured import NATS_ROLES, REDIS_ROLES, THROUGH_REDIS, Secured, password, secured

SECRETS = [password("nats", role) for role in NATS_ROLES] + [password("redis", role) for role in REDIS_ROLES]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="module")
def stack(servers: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole pdq on the secured servers, its KV through the Redis tier too."""
    environ = {**SHORT_LEASES, **THROUGH_REDIS, **servers.environ("operator", "operator")}
    with running(tmp_path_factory.mktemp("stack") / "state", "--engine", "sim", env=environ) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole pdq as ``pdq up`` starts it by itself, which offers KV on every transport."""
    environ = {**SHORT_LEASES, "PDQ_TRANSPORT_WRITE_THROUGH": "shm,redis", "PDQ_SIM_STEP_MS": "5"}
    with running(tmp_path_factory.mktemp("plain") / "state", "--engine", "sim", env=environ) as found:
        yield found


def pdq(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PDQ_")}
    return subprocess.run(
        [sys.executable, "-m", "pdq.cli", *arguments],
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- Credentials and TLS ----------------------------------------------------------------------------------------------


def test_a_request_works_where_everything_needs_a_password_and_tls(stack: Stack) -> None:
    answer = stack.complete("over TLS", max_tokens=7)
    assert answer["usage"]["completion_tokens"] == 7
    told = stack.cli("trace", answer["request_id"])
    assert told["attempts"][0]["decodings"][0]["transport"] == "redis"
    assert not [child.cmdline() for child in stack.descendants() if "-server" in child.cmdline()[0]]


def test_commands_find_address_and_credentials_of_a_running_system(stack: Stack) -> None:
    place = {"PDQ_STATE_DIR": str(stack.state_dir)}
    assert (stack.state_dir / "env").stat().st_mode & 0o777 == 0o600
    for command in (("status",), ("leases",), ("publish", "hello", "--model", "sim", "--max-tokens", "3")):
        done = pdq(place, *command)
        assert (done.returncode, done.stderr) == (0, ""), command


def test_credentials_of_the_state_directory_are_not_sent_to_another_server(stack: Stack, nats: Server) -> None:
    """Its own TLS setting would keep the connection from being made if it were taken from the file."""
    done = pdq({"PDQ_STATE_DIR": str(stack.state_dir), "PDQ_NATS_URL": nats.url}, "status")
    assert (done.returncode, done.stderr) == (0, "")


def test_passwords_come_from_mounted_files(servers: Secured, stack: Stack, tmp_path: Path) -> None:
    environ = servers.environ("operator", "operator")
    for variable in ("PDQ_NATS_PASSWORD", "PDQ_REDIS_PASSWORD", "PDQ_REDIS_URL"):
        (tmp_path / variable).write_text(environ.pop(variable) + "\n")
        environ[f"{variable}_FILE"] = str(tmp_path / variable)
    done = pdq(environ, "status")
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT: dict[str, tuple[dict[str, str], str]] = {
    "no NATS password": (
        {"PDQ_NATS_USER": "", "PDQ_NATS_PASSWORD": ""},
        r"NATS .*Authorization Violation.*PDQ_NATS_USER",
    ),
    "a wrong NATS password": ({"PDQ_NATS_PASSWORD": "guess"}, r"NATS .*Authorization Violation.*PDQ_NATS_PASSWORD"),
    "a wrong NATS authority": ({"PDQ_NATS_TLS_CA": "STRANGER"}, r"NATS .*not trusted.*PDQ_NATS_TLS_CA"),
    "no certificate for NATS": ({"PDQ_NATS_TLS_CERT": "", "PDQ_NATS_TLS_KEY": ""}, r"NATS at .* took no connection"),
    "a NATS server without TLS": ({"PDQ_NATS_URL": "PLAIN"}, r"NATS .*does not offer TLS"),
    "no Redis password": (
        {"PDQ_REDIS_USERNAME": "", "PDQ_REDIS_PASSWORD": ""},
        r"Redis .*refuses us.*PDQ_REDIS_PASSWORD",
    ),
    "a wrong Redis password": ({"PDQ_REDIS_PASSWORD": "guess"}, r"Redis .*refuses us.*PDQ_REDIS_PASSWORD"),
    "a wrong Redis authority": ({"PDQ_REDIS_TLS_CA": "STRANGER"}, r"Redis .*not trusted.*PDQ_REDIS_TLS_CA"),
    "no certificate for Redis": ({"PDQ_REDIS_TLS_CERT": "", "PDQ_REDIS_TLS_KEY": ""}, r"Redis at .* is not available"),
}


@pytest.mark.parametrize("lack", WITHOUT)
def test_who_lacks_something_is_refused_with_status_3_and_told_what_to_look_at(
    servers: Secured, nats: Server, lack: str
) -> None:
    changes, expected = WITHOUT[lack]
    stand_ins = {"STRANGER": servers.stranger.path("ca.pem"), "PLAIN": nats.url}
    environ = servers.environ("operator", "operator") | {"PDQ_NATS_CONNECT_TIMEOUT_S": "3"}
    done = pdq(environ | {name: stand_ins.get(value, value) for name, value in changes.items()}, "status")
    assert done.returncode == 3, done.stderr
    assert re.search(expected, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not [secret for secret in SECRETS if secret in done.stderr]


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "an authority that is not there": ({"PDQ_NATS_TLS_CA": "/none"}, r"PDQ_NATS_TLS_CA='/none'.*No such file"),
    "a key without certificate": ({"PDQ_REDIS_TLS_CERT": ""}, r"PDQ_REDIS_TLS_CERT is not"),
    "a user without password": ({"PDQ_NATS_PASSWORD": ""}, r"PDQ_NATS_USER and PDQ_NATS_PASSWORD go together"),
    "two ways to authenticate": ({"PDQ_NATS_TOKEN": "t0ken"}, r"PDQ_NATS_USER and PDQ_NATS_TOKEN are both set"),
    "a file of credentials that is not there": (
        {"PDQ_NATS_USER": "", "PDQ_NATS_PASSWORD": "", "PDQ_NATS_CREDENTIALS": "/none"},
        r"PDQ_NATS_CREDENTIALS='/none' cannot be read: No such file",
    ),
    "TLS files for a plain URL": ({"PDQ_REDIS_URL": "redis://h"}, r"PDQ_REDIS_URL does not begin with rediss://"),
    "two passwords": ({"PDQ_REDIS_URL": "rediss://u:hidden@h"}, r"both give a (username|password)"),
    "a Redis URL that is none": ({"PDQ_REDIS_URL": "rediss://:hidden/1@h"}, r"PDQ_REDIS_URL is not a URL like.*%XX"),
    "a NATS URL that is none": ({"PDQ_NATS_URL": "tls://u:hidden/1@h"}, r"PDQ_NATS_URL is not a URL like.*%XX"),
    "a scheme that NATS has not": ({"PDQ_NATS_URL": "https://u:hidden@h"}, r"PDQ_NATS_URL is not a URL like"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_configuration_has_status_2_and_shows_no_secret(servers: Secured, mistake: str) -> None:
    changes, expected = MISTAKES[mistake]
    done = pdq(servers.environ("operator", "operator") | changes, "status")
    assert done.returncode == 2, done.stderr
    assert re.search(expected, done.stderr), done.stderr
    assert not [secret for secret in (*SECRETS, "hidden", "t0ken") if secret in done.stderr]


def test_no_secret_is_in_a_log_a_command_line_or_the_settings(servers: Secured, stack: Stack) -> None:
    shown = [log.read_text() for log in stack.state_dir.glob("logs/*.log")]
    shown += [stack.state_dir.parent.joinpath("state.stderr").read_text()]
    shown += [" ".join(process.cmdline()) for process in [psutil.Process(stack.process.pid), *stack.descendants()]]
    shown.append(pdq(servers.environ("operator", "operator"), "settings").stdout)
    assert "PDQ_NATS_PASSWORD_FILE" in shown[-1]
    assert not [secret for secret in SECRETS if secret in "\n".join(shown)]


# --- Listeners --------------------------------------------------------------------------------------------------------


def test_nothing_listens_beyond_loopback(plain: Stack) -> None:
    """UCX shows as ``0.0.0.0%lo``: any address, but only what comes in through the loopback interface."""
    plain.complete("every part has done something", max_tokens=3)
    pids = {plain.process.pid, *(child.pid for child in plain.descendants())}
    found = subprocess.run(["ss", "-Hltunp"], capture_output=True, text=True, check=True).stdout
    ours = [line for line in found.splitlines() if pids & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]
    assert len(ours) >= 5
    local = [line.split()[4] for line in ours]
    assert not [address for address in local if not re.match(r"127\.|\[::1\]|(0\.0\.0\.0|\*)%lo:", address)], local


# --- KV ---------------------------------------------------------------------------------------------------------------


async def test_the_kv_of_a_running_request_opens_to_its_secret_only(plain: Stack) -> None:
    body = {"model": "sim", "prompt": "keep this to yourself " * 20, "pdq": {"retain": "done"}}
    body |= {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{plain.url}/v1/completions", json=body) as answer,
        transports(load(plain.environ)) as opened,
    ):
        lines = answer.aiter_lines()  # kept: a stream whose reader is gone is closed
        await anext(lines)

        def decoding() -> Record | None:
            return next((record for record in plain.live() if record.state is State.FETCHED), None)

        record = await asyncio.to_thread(wait_for, decoding, "a request that decodes")
        assert record.layout is not None
        plan = ChunkPlan(tuple(record.layout.chunk_lengths(record.prompt_tokens)))
        assert {locator.transport for locator in record.locators} == {"ucx", "shm", "redis"}
        for locator in record.locators:
            transport = opened[locator.transport]
            buffers, into = targets(plan)
            for secret in ("", record.secret[:-1], record.secret[::-1]):
                with pytest.raises(HandoffUnknown):
                    await transport.fetch(locator, HandoffRef(record.key, locator.epoch, secret), plan, into, 10)
                assert not any(map(any, buffers)), locator
            with pytest.raises(HandoffUnknown):
                await transport.fetch(locator, HandoffRef(record.key, locator.epoch + 1, record.secret), plan, into, 10)
            await transport.fetch(locator, HandoffRef(record.key, locator.epoch, record.secret), plan, into, 10)
            assert any(map(any, buffers)), locator
    await asyncio.to_thread(wait_for, lambda: not plain.live(), "no live record")


# --- What clients cannot set ------------------------------------------------------------------------------------------

INTERNAL = {
    "request_id": "mine",
    "reply_to": "pdq.tokens.mine",
    "secret": "mine",
    "output_so_far": [1, 2, 3],
    "sent": [1, 2, 3],
    "tenant": "somebody else",
    "client_id": "somebody else",
    "mode": "aggregated",
    "epoch": 99,
    "attempt": 99,
    "state": "done",
    "locators": [{"transport": "ucx", "address": {}}],
    "deadline": 1,
    "timeout_ms": 1,
    "policy": {"max_attempts": 99, "retain": "done"},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_internal_fields_in_a_body_have_no_effect(plain: Stack, path: str) -> None:
    body = {"model": "sim", "max_tokens": 6, "temperature": 0, "user": "me"}
    body |= {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi", "epoch": 9}]}
    records, texts = [], []
    for extra in ({}, INTERNAL):
        answer = httpx.post(f"{plain.url}{path}", json=body | extra, headers={"x-request-id": "mine"}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-client-request-id"] == "mine"
        request_id = answer.headers["x-request-id"]
        assert uuid.UUID(request_id).version == 7
        record = plain.inside.ask(lambda system, request_id=request_id: system.ledger.find(request_id))  # type: ignore[misc]
        assert record is not None
        records.append(record)
        texts.append(answer.json()["choices"][0])
    without, with_them = records
    assert texts[0] == texts[1]
    assert with_them.secret not in ("mine", without.secret)
    for field in (
        "reply_to",
        "policy",
        "mode",
        "tenant",
        "client_id",
        "state",
        "attempt",
        "epoch",
        "prompt_tokens",
        "emitted",
    ):
        assert getattr(with_them, field) == getattr(without, field), field
    assert (with_them.tenant, with_them.client_id) == ("me", "mine")
    assert plain.inside.ask(lambda system: system.ledger.find("mine")) is None


async def test_a_producer_cannot_choose_an_id(plain: Stack) -> None:
    client = await nats.connect(plain.environ["PDQ_NATS_URL"])
    reply = client.new_inbox()
    told = await client.subscribe(reply)
    job = {
        "model": "sim",
        "prompt_token_ids": [1],
        "reply_to": reply,
        "client_id": "mine",
        "sampling": {"max_tokens": 1},
    }
    await client.jetstream().publish(names.prefill_subject("sim"), json.dumps(job | {"request_id": "mine"}).encode())
    await client.jetstream().publish(names.prefill_subject("sim"), json.dumps(job).encode())
    ends = {}
    while len(ends) < 2:
        (entry,) = json.loads((await told.next_msg(timeout=30)).data)["entries"]
        if "end" in entry:
            ends[entry["end"]["state"]] = entry
    assert ends["failed"]["end"]["error"]["code"] == "record_not_found"
    assert uuid.UUID(ends["done"]["request_id"]).version == 7
    assert ends["done"]["client_id"] == "mine"
    await client.close()
