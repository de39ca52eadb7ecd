"""The Redis adapter when its server is restarted, silent, unreachable, or says no; and what it leaves behind."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdq.adapters.processes import Server, free_port, valkey_server
from pdq.adapters.redis import RedisLedger, RedisRegistry, connect
from pdq.core import names
from pdq.core.errors import InvalidSettings, PdqError, Unavailable
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.settings import LeaseSettings, RedisSettings
from pdq.ports import NewRecord

LEASE = LeaseSettings(ended_ttl_s=77)


def new(key: RecordKey) -> NewRecord:
    return NewRecord(key, "pdq.tokens.me", 10, 5, 60_000, "secret")


@pytest.fixture
async def client(valkey: Server) -> AsyncIterator[Redis]:
    opened = await connect(RedisSettings(url=valkey.url))
    yield opened
    await opened.aclose()


@pytest.fixture
async def ledger(client: Redis) -> AsyncIterator[RedisLedger]:
    opened = RedisLedger(client, LEASE)
    yield opened
    await opened.close()


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[Server]:
    server = await valkey_server(tmp_path).start()
    yield server
    await server.stop()


async def until_answered(ledger: RedisLedger) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await ledger.now_ms()
                return
            except Unavailable:
                await asyncio.sleep(0.02)


async def test_records_and_scripts_survive_a_restart_of_the_server(own_server: Server, model: str) -> None:
    ledger = RedisLedger(own_server.url, LEASE)
    key = RecordKey(model, "r1")
    await ledger.enqueue(new(key))
    grant = await ledger.acquire(key, Event.BEGIN, "p1", 60_000)
    await own_server.stop()
    with pytest.raises(Unavailable):
        await ledger.read(key)
    with pytest.raises(Unavailable):
        await ledger.apply(key, Event.READY, epoch=grant.epoch)
    await own_server.start()
    await until_answered(ledger)
    assert (await ledger.apply(key, Event.READY, epoch=grant.epoch)).state is State.READY
    await ledger.close()


async def test_every_call_in_flight_ends_when_the_server_dies(own_server: Server, model: str) -> None:
    ledger = RedisLedger(own_server.url, LEASE)
    await ledger.now_ms()
    own_server.child.signal(signal.SIGSTOP)  # the calls stay in flight
    calls = [asyncio.create_task(ledger.enqueue(new(RecordKey(model, f"r{i}")))) for i in range(100)]
    await asyncio.sleep(0)
    own_server.child.signal(signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert {type(outcome) for outcome in outcomes} == {Unavailable}
    await ledger.close()


async def test_a_silent_server_is_given_up_after_the_timeout_and_found_again(own_server: Server, model: str) -> None:
    client = await connect(RedisSettings(url=own_server.url, timeout_s=0.2))
    ledger = RedisLedger(client, LEASE)
    await ledger.now_ms()
    own_server.child.signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
        await asyncio.wait_for(ledger.now_ms(), 10)
    own_server.child.signal(signal.SIGCONT)
    await until_answered(ledger)
    await ledger.close()
    await client.aclose()


async def test_a_script_that_the_server_forgot_is_sent_again(ledger: RedisLedger, client: Redis, model: str) -> None:
    key = RecordKey(model, "r1")
    await ledger.enqueue(new(key))
    await client.script_flush()
    assert (await ledger.acquire(key, Event.BEGIN, "p1", 1000)).record.attempt == 1


async def test_a_cancelled_call_disturbs_no_other(ledger: RedisLedger, model: str) -> None:
    keys = [RecordKey(model, f"r{i}") for i in range(50)]
    calls = [asyncio.create_task(ledger.enqueue(new(key))) for key in keys]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for key, outcome in zip(keys[1::2], outcomes[1::2], strict=True):
        assert isinstance(outcome, tuple)
        assert outcome[0].key == key
    assert await ledger.read(keys[1]) is not None


async def test_nobody_at_the_address_is_unavailable_and_the_password_stays_secret() -> None:
    url = f"redis://user:hunter2@127.0.0.1:{free_port()}/0"
    ledger, registry = RedisLedger(url, LEASE), RedisRegistry(url)
    calls: list[Callable[[], object]] = [
        lambda: connect(RedisSettings(url=url)),
        ledger.models,
        ledger.now_ms,
        registry.workers,
    ]
    for call in calls:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1") as caught:
            await call()  # type: ignore[misc]
        assert "hunter2" not in str(caught.value)
    await ledger.close()
    await registry.close()


async def test_a_url_that_is_none_is_a_setting_error() -> None:
    with pytest.raises(InvalidSettings, match="PDQ_REDIS_URL"):
        await connect(RedisSettings(url="http://nowhere"))


async def test_a_wrong_type_in_the_database_is_our_error_not_a_retry(
    ledger: RedisLedger, client: Redis, model: str
) -> None:
    await client.set(names.record_key(model, "r1"), "text")
    with pytest.raises(PdqError, match="WRONGTYPE") as caught:
        await ledger.enqueue(new(RecordKey(model, "r1")))
    assert not caught.value.retryable


async def test_an_ended_record_and_its_log_expire_and_leave_the_index(
    ledger: RedisLedger, client: Redis, model: str
) -> None:
    key = RecordKey(model, "r1")
    record, log, due = names.record_key(model, "r1"), names.log_key(model, "r1"), names.due_key(model)
    await ledger.enqueue(new(key))
    assert await client.ttl(record) == -1
    assert await client.zscore(due, "r1") is not None
    await ledger.apply(key, Event.CANCEL)
    assert 0 < await client.ttl(record) <= 77
    assert 0 < await client.ttl(log) <= 77
    assert await client.zscore(due, "r1") is None


async def test_a_due_member_without_a_record_is_taken_off(ledger: RedisLedger, client: Redis, model: str) -> None:
    await client.zadd(names.due_key(model), {"ghost": 1})
    assert await ledger.due(model, 10) == []
    assert await client.zcard(names.due_key(model)) == 0


async def test_an_operator_can_read_a_record(ledger: RedisLedger, client: Redis, model: str) -> None:
    await ledger.enqueue(new(RecordKey(model, "r1")))
    await ledger.acquire(RecordKey(model, "r1"), Event.BEGIN, "p1", 1000)
    stored = await client.hgetall(names.record_key(model, "r1"))
    assert (stored[b"state"], stored[b"source_worker"], stored[b"attempt"]) == (b"prefilling", b"p1", b"1")
    assert b"sink_worker" not in stored


async def test_all_keys_of_a_script_share_one_cluster_slot(model: str) -> None:
    keys = [names.record_key(model, "a"), names.log_key(model, "b"), names.load_key(model), names.due_key(model)]
    assert {key[key.index("{") : key.index("}")] for key in keys} == {"{" + model}
