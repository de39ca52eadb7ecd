"""What a source holds, and when it lets go of what."""

from collections.abc import Callable
from typing import Any

import pytest

from pdq.adapters.memory.registry import MemoryRegistry
from pdq.adapters.memory.transport import MemoryTransport, TransportWorld
from pdq.adapters.tokenizer import load_tokenizer
from pdq.core.errors import InvalidSettings
from pdq.core.handoff import Event, Side
from pdq.core.lease import Hold
from pdq.core.messages import Policy, Sampling
from pdq.core.settings import EngineSettings, LeaseSettings, QueueSettings, SimSettings, TransportSettings
from pdq.ports import Changes, HandoffRef, PromptWork
from pdq.stages.keepalive import Keepalive
from pdq.stages.offers import Held, Offers, offering
from tests.kv import until
from tests.unit.stages.parts import TTL_MS, World
from workers.sim.engine import SimEngine

WORK = PromptWork("r", tuple(range(100)), 0, Sampling(temperature=0, seed=0), 10)


class Named(MemoryTransport):
    """The transport of one process under another's name."""

    def __init__(self, name: str) -> None:
        super().__init__(TransportWorld())
        self._name = name

    @property
    def name(self) -> str:
        return self._name


class Source:
    """A source with its own memory (``ucx``) and a tier (``redis``), and one handoff of one request."""

    def __init__(self) -> None:
        self.world = World()
        self.memory, self.tier = Named("ucx"), Named("redis")
        settings = TransportSettings(write_through=("redis",))
        no_info: Callable[[], Any] = lambda: None  # noqa: E731
        self.keepalive = Keepalive(
            self.world.ledger, MemoryRegistry(), LeaseSettings(ttl_ms=TTL_MS), QueueSettings(), no_info
        )
        transports = {"ucx": self.memory, "redis": self.tier}
        self.offers = Offers(transports, settings, self.keepalive, self.world.ledger, lambda: None)
        self.engine = SimEngine("sim", EngineSettings(kv_tokens=1024), SimSettings(), load_tokenizer(None))

    async def hold(self, policy: Policy | None = None) -> Hold:
        key = await self.world.queued(policy)
        grant = await self.world.ledger.acquire(key, Event.BEGIN, "prefill-0", TTL_MS)
        ref, run, chunks = HandoffRef(key, grant.epoch, "secret"), self.engine.admit(WORK), []
        async for index, parts in run.chunks():
            _, locators = await self.offers.offer(ref, run.plan, index, parts)
            chunks.append(parts)
        await self.world.ledger.apply(key, Event.READY, epoch=grant.epoch, changes=Changes(locators=locators))
        hold = Hold(key, Side.SOURCE, grant.epoch)
        self.offers.keep(Held(ref, run, hold, chunks, locators, policy is not None and policy.retain != "fetched"))
        return hold

    @property
    def blocks_free(self) -> bool:
        return self.engine.pool.free == self.engine.pool.total


async def test_fetched_kv_leaves_the_memory_and_stays_in_the_tier_until_the_end() -> None:
    source = Source()
    hold = await source.hold()
    assert not source.blocks_free
    source.offers.let_go(hold.key.request_id)
    await until(lambda: source.blocks_free and not len(source.offers))
    assert not source.memory.holding()
    assert source.tier.holding()
    source.offers.end(hold.key.request_id)
    await until(lambda: not source.tier.holding())


async def test_the_end_of_a_request_frees_both_at_once() -> None:
    source = Source()
    hold = await source.hold()
    source.offers.end(hold.key.request_id)
    await until(lambda: source.blocks_free and not source.memory.holding() and not source.tier.holding())


async def test_a_lease_that_outlived_the_fetch_is_given_back() -> None:
    source = Source()
    hold = await source.hold(Policy(retain="first_token"))
    source.offers.let_go(hold.key.request_id)
    await until(lambda: not len(source.offers))
    assert (await source.world.read(hold.key)).source is None


async def test_a_second_attempt_at_the_same_source_lets_go_of_the_first() -> None:
    source = Source()
    first = await source.hold()
    source.world.now_ms += TTL_MS
    key = first.key
    await source.world.ledger.apply(key, Event.REQUEUE)
    grant = await source.world.ledger.acquire(key, Event.BEGIN, "prefill-0", TTL_MS)
    run = source.engine.admit(WORK)
    chunks = [parts async for _, parts in run.chunks()]
    again = Held(HandoffRef(key, grant.epoch, "s"), run, Hold(key, Side.SOURCE, grant.epoch), chunks, (), False)
    source.offers.keep(again)
    await until(lambda: not source.memory.holding() and not source.tier.holding())
    source.offers.end(key.request_id)
    await until(lambda: source.blocks_free)


@pytest.mark.parametrize("setting", ["write_through", "spill"])
def test_what_dies_with_its_source_is_no_tier(setting: str) -> None:
    settings: Any = {setting: ("ucx",)}
    with pytest.raises(InvalidSettings, match="ucx does not outlive"):
        offering(TransportSettings(**settings))
