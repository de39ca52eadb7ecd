"""The reaper between its look at a record and its hand on it: others may have been there in the meantime."""

from collections.abc import Sequence

from pdq.core.handoff import Event, State
from pdq.core.settings import LeaseSettings
from pdq.ports import HandoffLedger, Record
from pdq.stages.endings import Endings
from pdq.stages.reaper import Reaper
from tests.unit.stages.parts import MODEL, TTL_MS, World


class Overtaken:
    """A ledger in which somebody claims what is due, right after the reaper has seen it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._overtaken = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._world.ledger, name)

    async def due(self, model: str, limit: int) -> Sequence[Record]:
        found = await self._world.ledger.due(model, limit)
        if found and not self._overtaken:
            self._overtaken = True
            for record in found:
                await self._world.ledger.acquire(record.key, Event.CLAIM, "another", TTL_MS)
            return found
        return ()


async def test_a_request_that_somebody_claims_in_the_same_moment_does_not_end_the_round() -> None:
    world = World()
    record = await world.ready()
    await world.ledger.acquire(record.key, Event.CLAIM, "dead", TTL_MS)
    world.now_ms += TTL_MS
    ledger: HandoffLedger = Overtaken(world)  # type: ignore[assignment]
    endings = Endings(ledger, world.parts.bus, world.parts.outbox, "reaper")
    assert await Reaper(ledger, world.queue, world.bus, endings, LeaseSettings()).round() == 1
    now = await world.read(record.key)
    assert now.state is State.READY
    assert now.sink is not None
    assert now.sink.worker == "another"
    assert record.key.model == MODEL
