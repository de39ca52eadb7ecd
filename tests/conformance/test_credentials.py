"""Credentials files, with a NATS server in operator mode: who comes in with one, and what is said to who does not."""

import builtins
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdq.adapters import nats
from pdq.core import names
from pdq.core.errors import InvalidSettings, Unavailable
from pdq.core.messages import Cancel, Control
from pdq.core.settings import NatsSettings, QueueSettings
from pdq.ports import Queue
from tests.conformance.brokers import eventually
from tests.conformance.test_queue import one
from tests.kv import until
from tests.operated import UNLIMITED, Operated, Party, credentials, papers


@pytest.fixture
async def operated(tmp_path: Path) -> AsyncIterator[Operated]:
    found = Operated(tmp_path / "nats")
    await found.server.start()
    yield found
    await found.server.stop()


def settings(operated: Operated, file: Path) -> NatsSettings:
    return NatsSettings(url=operated.server.url, credentials=str(file), connect_timeout_s=2)


async def refusal(operated: Operated, file: Path) -> str:
    with pytest.raises((Unavailable, InvalidSettings)) as caught:
        await nats.connect(settings(operated, file), "refused")
    assert str(file) in str(caught.value)
    return str(caught.value)


async def test_jobs_and_messages_go_round_with_the_right_file(operated: Operated, tmp_path: Path, model: str) -> None:
    file = credentials(tmp_path / "worker.creds", operated.account)
    there, here = [await nats.connect(settings(operated, file), name) for name in ("there", "here")]
    queue = nats.NatsQueue(there, QueueSettings())
    await queue.ensure_streams()
    await queue.publish(Queue.PREFILL, model, b"a job")
    job = await one(nats.NatsQueue(here, QueueSettings()), model)
    assert job.data == b"a job"
    await job.ack()
    heard: list[Control] = []
    subscription = await nats.NatsBus(here).on_control(names.CANCEL_SUBJECT, heard.append)
    await nats.NatsBus(there).control(names.CANCEL_SUBJECT, Cancel(("1",)))
    await until(lambda: heard == [Cancel(("1",))])
    await subscription.close()
    await here.close()
    await there.close()


async def test_a_user_whom_the_server_does_not_take_is_told_what_must_be_true_of_the_file(
    operated: Operated, tmp_path: Path
) -> None:
    stranger = credentials(tmp_path / "stranger.creds", Party("account", "stranger"))
    expired = credentials(tmp_path / "expired.creds", operated.account, expires_s=-10)
    for file in (stranger, expired):
        text = await refusal(operated, file)
        assert "account that this server knows" in text
        assert "expired" in text
        assert "PDQ_NATS_USER" not in text


async def test_a_file_that_nobody_could_connect_with_is_refused_without_showing_what_is_in_it(
    operated: Operated, tmp_path: Path
) -> None:
    user, other = Party("user", "one"), Party("user", "other")
    jwt = operated.account.issue(user, **UNLIMITED)
    seed = user.seed.decode()
    contents = {
        "": "does not hold a user's JWT and NKey seed",
        jwt: "does not hold",
        papers(jwt, user.seed).partition("****")[0]: "does not hold",
        papers(jwt, other.seed): f"its seed is of {other.public}, its JWT of {user.public}",
        papers(jwt, user.seed[:-9]): "damaged",
        papers(jwt, b"not a seed".replace(b" ", b"-")): "damaged",
        papers("e30.e30.e30", user.seed): "damaged",
        papers("no-jwt", user.seed): "damaged",
    }
    for number, (content, complaint) in enumerate(contents.items()):
        file = tmp_path / f"{number}.creds"
        file.write_text(content)
        text = await refusal(operated, file)
        assert complaint in text
        assert not [secret for secret in (seed, seed[:-9], other.seed.decode(), jwt) if secret in text]


async def test_a_file_that_cannot_be_read_is_refused(operated: Operated, tmp_path: Path) -> None:
    assert "No such file" in await refusal(operated, tmp_path / "none.creds")
    assert "Is a directory" in await refusal(operated, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_a_file_that_may_not_be_read_is_refused(operated: Operated, tmp_path: Path) -> None:
    file = credentials(tmp_path / "hidden.creds", operated.account)
    file.chmod(0)
    assert "Permission denied" in await refusal(operated, file)


async def test_without_the_package_that_signs_it_is_named(
    operated: Operated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = credentials(tmp_path / "user.creds", operated.account)
    find = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "nkeys":
            raise ImportError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidSettings, match=r"needs the package nkeys: `pip install 'nats-py\[nkeys\]'`"):
        await nats.connect(settings(operated, file), "refused")


async def test_a_file_that_is_being_replaced_while_the_broker_comes_back_is_read_again(
    operated: Operated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = credentials(tmp_path / "user.creds", operated.account)
    connection = await nats.connect(settings(operated, file), "patient")
    file.write_text("")
    await operated.server.stop()
    await operated.server.start()
    await until(lambda: "does not hold" in caplog.text)
    credentials(file, operated.account)
    assert await connection.until_connected(30)
    await connection.close()


async def test_when_its_jwt_runs_out_a_connection_waits_for_another_one(
    operated: Operated, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    file = credentials(tmp_path / "brief.creds", operated.account, expires_s=2)
    connection = await nats.connect(settings(operated, file), "brief")
    queue = nats.NatsQueue(connection, QueueSettings())
    await queue.ensure_streams()

    async def tried_in_vain() -> bool:
        return not connection.connected and "Authorization Violation" in caplog.text

    await eventually(tried_in_vain)
    (lost,) = [record.getMessage() for record in caplog.records if "lost NATS" in record.getMessage()]
    assert "user authentication expired" in lost
    with pytest.raises(Unavailable):
        await queue.publish(Queue.PREFILL, model, b"a job")
    credentials(file, operated.account)
    assert await connection.until_connected(30)
    await queue.publish(Queue.PREFILL, model, b"a job")
    await connection.close()
