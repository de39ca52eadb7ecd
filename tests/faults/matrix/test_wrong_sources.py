"""A source that is no longer what the record says, and records that point nowhere: that request is computed again, or
fails, and no other one notices."""

import asyncio
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from pdq.core import names
from pdq.core.errors import HandoffUnknown
from pdq.core.lease import RecordKey
from pdq.core.messages import DecodeJob, PrefillJob, encode
from pdq.ports import Queue, Record
from tests.faults.matrix.conftest import Rig
from tests.faults.matrix.plant import DECODE, MODEL, PREFILL, Plant, until
from tests.faults.matrix.run import TIMEOUT_MS
from tests.faults.matrix.traffic import RAW, VOLLEY, Asked, Outcome, over_http

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


async def held_before_fetching(plant: Plant, asked: Asked, delay_ms: int) -> "tuple[asyncio.Task[Outcome], Record]":
    """A request whose decode worker knows where its KV is, and waits ``delay_ms`` before it asks there."""
    sizes = {name: plant.programs[name].log_size() for name in DECODE}
    for name in DECODE:
        await plant.arm(name, f"decode.fetching=delay:{delay_ms}*1")
    request = asyncio.ensure_future(over_http(plant.url, asked, TIMEOUT_MS))

    async def waiting() -> bool:
        return any("failpoint decode.fetching:" in plant.programs[it].log_since(size) for it, size in sizes.items())

    await until(waiting, lambda: "a decode worker is about to fetch")
    for name in DECODE:
        await plant.arm(name, "")
    (record,) = await plant.system.ledger.live(MODEL)
    return request, record


async def nothing_held(plant: Plant) -> None:
    since_ms = await plant.system.ledger.now_ms()
    left: list[str] = []

    async def free() -> bool:
        nonlocal left
        left = await plant.held(since_ms)
        return not left

    await until(free, lambda: "\n".join(left))


def test_a_source_whose_lease_ran_out_and_whose_blocks_were_reused_is_never_read_as_if_it_were_the_old_kv(
    rigs: Callable[[str], Rig],
) -> None:
    rig = rigs("direct")

    async def story() -> None:
        plant, asked = rig.plant, VOLLEY[0]
        for name in PREFILL:  # a heartbeat that fails for longer than a lease, and comes back
            await plant.arm(name, "keepalive.renew=drop*6")
        request, record = await held_before_fetching(plant, asked, delay_ms=6_000)
        assert record.source is not None
        key = record.key

        async def lost() -> bool:
            now = await plant.system.ledger.read(key)
            return now is not None and now.source is None

        await until(lost, lambda: "the source's lease has run out")
        source = record.source.worker

        async def let_go() -> bool:
            info = next(it for it in await plant.system.registry.workers() if it.worker == source)
            return info.occupancy.held == 0 and info.occupancy.free_blocks == info.occupancy.total_blocks

        await until(let_go, lambda: f"{source} has let go")
        others = [asyncio.ensure_future(over_http(plant.url, it, TIMEOUT_MS)) for it in (RAW, VOLLEY[1]) * 3]
        outcomes = [await request, *await asyncio.gather(*others)]
        assert [(it.how, it.text) for it in outcomes] == [("done", rig.texts[it.asked]) for it in outcomes]
        ended = await plant.system.ledger.read(key)
        assert ended is not None
        assert ended.attempt == 2
        for name in PREFILL:
            await plant.arm(name, "")
        await nothing_held(plant)

    rig.runner.run(story())


@pytest.mark.parametrize(
    "locators",
    [
        b"[]",
        b'[{"transport":"ucx","address":{},"epoch":1}]',
        b'[{"transport":"ucx","address":{"host":"127.0.0.1","port":"1"},"epoch":1}]',
        b'[{"transport":"ucx","address":{"host":"no.such.host.invalid","port":"9999"},"epoch":1}]',
        b'[{"transport":"shm","address":{"boot_id":"another","segment":"pdq-kv-none"},"epoch":1}]',
        b'[{"transport":"carrier-pigeon","address":{"loft":"north"},"epoch":1}]',
    ],
    ids=["none", "empty", "closed-port", "no-such-host", "other-host", "unknown-transport"],
)
def test_a_record_with_a_missing_or_wrong_address_costs_that_request_a_second_prefill(
    rigs: Callable[[str], Rig], locators: bytes
) -> None:
    rig = rigs("direct")

    async def story() -> None:
        plant = rig.plant
        sizes = {name: plant.programs[name].log_size() for name in DECODE}
        for name in DECODE:
            await plant.arm(name, "decode.delivered=delay:1500*1")
        request = asyncio.ensure_future(over_http(plant.url, RAW, TIMEOUT_MS))

        async def waiting() -> bool:
            return any("failpoint decode.delivered:" in plant.programs[it].log_since(at) for it, at in sizes.items())

        await until(waiting, lambda: "a decode worker has the job")
        for name in DECODE:
            await plant.arm(name, "")
        (record,) = await plant.system.ledger.live(MODEL)
        async with Redis.from_url(plant.servers["valkey"].url) as client:
            await client.hset(names.record_key(MODEL, record.key.request_id), "locators", locators)
        other = await over_http(plant.url, VOLLEY[1], TIMEOUT_MS)
        outcome = await request
        for each in (outcome, other):
            assert (each.how, each.text) == ("done", rig.texts[each.asked]), each
        ended, untouched = await plant.system.ledger.read_many(
            [RecordKey(MODEL, outcome.request_id), RecordKey(MODEL, other.request_id)]
        )
        assert ended is not None
        assert untouched is not None
        assert (ended.attempt, untouched.attempt) == (2, 1)
        history = await plant.system.ledger.history(record.key)
        assert HandoffUnknown.code in [entry.note.get("reason") for entry in history]
        await nothing_held(plant)

    rig.runner.run(story())


def test_a_decode_job_without_a_record_goes_to_the_dead_letters_and_hurts_no_other(rigs: Callable[[str], Rig]) -> None:
    rig = rigs("direct")

    async def story() -> None:
        plant = rig.plant
        job = PrefillJob(
            model=MODEL, reply_to="pdq.tokens.nobody", prompt_token_ids=(65, 66), request_id="01900000-no-such-record"
        )
        await plant.system.queue.publish(Queue.DECODE, MODEL, encode(DecodeJob(job=job, source="nobody", attempt=1)))
        outcome = await over_http(plant.url, RAW, TIMEOUT_MS)
        assert (outcome.how, outcome.text) == ("done", rig.texts[RAW])
        await nothing_held(plant)

    rig.runner.run(story())
