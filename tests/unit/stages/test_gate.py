"""The gate over a live ledger and registry, in memory: what it reads, how often, and what it remembers in between."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from pdq.adapters.memory.ledger import MemoryLedger
from pdq.adapters.memory.registry import MemoryRegistry
from pdq.core.admission import Request
from pdq.core.errors import Overloaded, Refused, TenantLimit, Unavailable
from pdq.core.handoff import Event
from pdq.core.lease import RecordKey
from pdq.core.load import Load
from pdq.core.routing import Why
from pdq.core.settings import AdmissionSettings, HandoffSettings, LeaseSettings, Settings
from pdq.ports import Changes, NewRecord, Pool, WorkerInfo
from pdq.stages.census import Census
from pdq.stages.gate import FRESH_S, Gate
from pdq.stages.kept import Kept
from tests.unit.bridge.harness import MODEL, worker_info

SMALL = Request(prompt_tokens=10, max_new_tokens=10)
CAP = 5
LIMITS = AdmissionSettings(interactive_queued_requests=CAP, without_workers="refuse")
"""A tenant that is alone gets four of the five."""


class Ledger(MemoryLedger):
    readings = 0
    away = False
    pause = 0

    async def load(self, model: str) -> Load:
        self.readings += 1
        for _ in range(self.pause):
            await asyncio.sleep(0)
        if self.away:
            raise Unavailable("the ledger does not answer")
        return await super().load(model)


@dataclass
class World:
    settings: Settings = field(default_factory=lambda: Settings(admission=LIMITS))
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.ledger = Ledger(LeaseSettings())
        self.registry = MemoryRegistry()
        self.gate = Gate(self.ledger, Census(self.registry, self.clock), self.settings, self.clock)
        self._written = 0

    def clock(self) -> float:
        return self.now_s

    async def staffed(self, *infos: WorkerInfo) -> "World":
        for info in infos or (worker_info(Pool.PREFILL), worker_info(Pool.DECODE)):
            await self.registry.announce(info, 600_000)
        return self

    async def enter(self, request: Request = SMALL, *, write: bool = True) -> None:
        async with self.gate.entering(MODEL, request):
            if write:
                await self.write(request)

    async def write(self, request: Request = SMALL) -> RecordKey:
        self._written += 1
        key = RecordKey(MODEL, f"r{self._written}")
        new = NewRecord(key, "pdq.tokens.test", request.prompt_tokens, request.max_new_tokens, 60_000, "secret")
        await self.ledger.enqueue(replace(new, tenant=request.tenant, priority=request.priority))
        return key

    async def refusal(self, request: Request = SMALL) -> Refused:
        with pytest.raises(Refused) as caught:
            await self.enter(request)
        return caught.value


async def test_a_request_is_let_in_until_the_ledgers_own_counts_say_no() -> None:
    world = await World().staffed()
    for tenant in "abcde":
        world.now_s += 1
        await world.enter(replace(SMALL, tenant=tenant))
    world.now_s += 1
    refused = await world.refusal(replace(SMALL, tenant="f"))
    assert type(refused) is Overloaded
    assert refused.reason == "queued_requests"
    assert refused.retry_after_s >= 1
    assert str(CAP) in str(refused)


async def test_the_ledger_is_read_once_for_all_who_come_within_a_moment() -> None:
    world = await World().staffed()
    for _ in range(3):
        await world.enter()
    assert world.ledger.readings == 1
    world.now_s += FRESH_S
    await world.enter()
    assert world.ledger.readings == 2


async def test_a_burst_within_one_reading_meets_the_same_limit() -> None:
    world = await World().staffed()
    world.ledger.pause = 3
    outcomes = await asyncio.gather(
        *(world.enter(replace(SMALL, tenant=str(number))) for number in range(3 * CAP)), return_exceptions=True
    )
    assert [type(it) for it in outcomes] == [type(None)] * CAP + [Overloaded] * (2 * CAP)
    assert world.ledger.readings == 1


async def test_who_was_let_in_and_has_no_record_yet_still_counts_after_the_next_reading() -> None:
    world = await World().staffed()
    written = asyncio.Event()

    async def slowly(tenant: str) -> None:
        async with world.gate.entering(MODEL, replace(SMALL, tenant=tenant)):
            await written.wait()

    entering = [asyncio.create_task(slowly(tenant)) for tenant in "abcde"]
    await asyncio.sleep(0)
    world.now_s += 10 * FRESH_S
    assert (await world.refusal()).reason == "queued_requests"
    written.set()
    await asyncio.gather(*entering)
    world.now_s += FRESH_S
    await world.enter()  # nobody has written a record, so the next reading shows an empty queue


async def test_who_was_let_in_is_not_counted_twice_once_the_ledger_counts_it() -> None:
    world = await World().staffed()
    for tenant in "abcd":
        await world.enter(replace(SMALL, tenant=tenant))
    world.now_s += FRESH_S
    await world.enter(replace(SMALL, tenant="e"))


async def test_a_tenant_over_its_share_is_told_so_and_another_gets_in() -> None:
    world = await World().staffed()
    for _ in range(CAP - 1):
        await world.enter(replace(SMALL, tenant="flood"))
    assert type(await world.refusal(replace(SMALL, tenant="flood"))) is TenantLimit
    await world.enter(replace(SMALL, tenant="calm"))


async def test_pools_without_workers_refuse_or_wait_as_configured() -> None:
    refused = await World().refusal()
    assert type(refused) is Unavailable
    assert refused.reason == "no_workers"
    await World(Settings(admission=AdmissionSettings(without_workers="wait"))).enter()


async def test_a_worker_that_drains_is_no_capacity() -> None:
    world = await World().staffed(worker_info(Pool.PREFILL), replace(worker_info(Pool.DECODE), state="draining"))
    assert (await world.refusal()).reason == "no_workers"


async def test_quarantined_blocks_are_no_decode_memory() -> None:
    decode = worker_info(Pool.DECODE)
    half = replace(decode, occupancy=replace(decode.occupancy, quarantined_blocks=decode.occupancy.total_blocks // 2))
    room = decode.occupancy.total_blocks * decode.contract.layout.block_size * LIMITS.decode_overcommit
    large = replace(SMALL, max_new_tokens=int(0.6 * room))
    for info, fits in ((decode, True), (half, False)):
        world = await World().staffed(worker_info(Pool.PREFILL), info)
        await world.enter(replace(SMALL, tenant="other"))
        if fits:
            await world.enter(large)
        else:
            assert (await world.refusal(large)).reason == "decode_memory"


async def test_in_aggregated_mode_the_workers_that_take_whole_requests_are_the_prefill_pool() -> None:
    settings = Settings(admission=LIMITS, handoff=HandoffSettings(mode="aggregated"))
    whole, half = worker_info(Pool.DECODE, aggregated=True), worker_info(Pool.DECODE)
    await (await World(settings).staffed(whole)).enter()
    assert (await (await World(settings).staffed(half)).refusal()).reason == "no_workers"


async def test_a_ledger_that_is_away_makes_the_gate_unavailable_and_says_nothing_of_admission() -> None:
    world = await World().staffed()
    world.ledger.away = True
    refused = await world.refusal()
    assert type(refused) is Unavailable
    assert refused.reason == ""
    world.ledger.away = False
    await world.enter()


async def test_what_was_measured_of_prefill_workers_refuses_what_would_be_late() -> None:
    world = await World(Settings()).staffed()
    prefill = worker_info(Pool.PREFILL)
    for tokens in (0, 100, 200):  # a hundred tokens a second
        busy = replace(prefill.occupancy, tokens=tokens, busy_s=tokens / 100)
        await world.registry.announce(replace(prefill, occupancy=busy), 600_000)
        await world.enter(write=False)
        world.now_s += 1
    for _ in range(9):
        await world.write(replace(SMALL, prompt_tokens=100))
    world.now_s += FRESH_S
    late = await world.refusal(replace(SMALL, deadline_s=5.0))
    assert late.reason == "deadline"
    assert "9." in str(late)
    await world.enter(replace(SMALL, deadline_s=60.0))


async def test_auto_sends_to_a_decode_worker_what_would_wait_for_prefill_longer() -> None:
    world = await World(Settings(handoff=HandoffSettings(mode="auto", auto_local_tokens=5))).staffed()
    prefill = worker_info(Pool.PREFILL)
    for tokens in (0, 100):
        busy = replace(prefill.occupancy, tokens=tokens, busy_s=tokens / 100)
        await world.registry.announce(replace(prefill, occupancy=busy), 600_000)
        assert (await world.gate.route(MODEL, 50, "interactive")).reason is Why.LONG_PROMPT
        world.now_s += 1
    key = await world.write(replace(SMALL, prompt_tokens=100))
    world.now_s += FRESH_S
    assert (await world.gate.route(MODEL, 50, "interactive")).reason is Why.PREFILL_BUSY
    begun = await world.ledger.acquire(key, Event.BEGIN, "prefill-0", 60_000)
    await world.ledger.apply(key, Event.READY, epoch=begun.epoch, changes=Changes())
    world.now_s += FRESH_S
    assert (await world.gate.route(MODEL, 50, "interactive")).reason is Why.LONG_PROMPT


# --- Readings that are shared -----------------------------------------------------------------------------------------


async def test_who_asks_while_a_reading_runs_gets_that_one_and_its_error_too() -> None:
    outcomes: list[Any] = [Unavailable("away"), 7]
    readings = 0

    async def read() -> int:
        nonlocal readings
        readings += 1
        await asyncio.sleep(0)
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return int(outcome)

    kept = Kept(read, 1.0, lambda: 0.0)
    assert [type(it) for it in await asyncio.gather(*(kept.get() for _ in range(5)), return_exceptions=True)] == [
        Unavailable
    ] * 5
    assert await asyncio.gather(*(kept.get() for _ in range(5))) == [7] * 5
    assert readings == 2


async def test_one_who_goes_away_does_not_take_the_reading_from_the_others() -> None:
    go = asyncio.Event()

    async def read() -> int:
        await go.wait()
        return 7

    kept = Kept(read, 1.0, lambda: 0.0)
    first, second = (asyncio.create_task(kept.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    go.set()
    assert await second == 7
    assert first.cancelled()
