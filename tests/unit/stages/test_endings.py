"""A bad end is told in one way: at once by whoever wins it, and later from its record by whoever is asked."""

import pytest

from pdq.bridge.requests import _end_of
from pdq.core import errors
from pdq.core.errors import PdqError
from pdq.core.handoff import State
from pdq.core.messages import Failure
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox
from tests.kv import until
from tests.unit.stages.parts import World
from tests.unit.test_lease_delivery import EVERY_ERROR, made

OVERDUE_MS = 120_000


@pytest.mark.parametrize("kind", [PdqError, *EVERY_ERROR], ids=lambda kind: kind.__name__)
async def test_a_repeated_end_says_the_same_as_the_first_one(kind: type[PdqError]) -> None:
    world = World()
    await world.listen()
    endings = Endings(world.ledger, world.bus, Outbox(world.bus, "reaper"), "reaper")
    key = await world.queued()
    world.now_ms += OVERDUE_MS
    assert await endings.unhappy(key, made(kind))
    record = await world.read(key)
    await endings.again(record, record.emitted)
    await until(lambda: len(world.got) == 2)
    first, again = (entry.end for entry in world.got)
    assert first is not None
    assert first.error == Failure(kind.code, "why", retryable=kind.retryable)
    assert first == again == _end_of(record, record.emitted)


def test_a_code_of_another_release_is_not_retried() -> None:
    assert not errors.may_retry("no_such_code")


def test_every_error_has_a_code_of_its_own() -> None:
    assert set(errors.BY_CODE.values()) == {PdqError, *EVERY_ERROR}


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (errors.DeadlineExceeded, State.EXPIRED),
        (errors.RequestCancelled, State.CANCELLED),
        (errors.EngineFailed, State.FAILED),
    ],
)
async def test_the_error_decides_which_bad_end_it_is(kind: type[PdqError], state: State) -> None:
    world = World()
    key = await world.queued()
    world.now_ms += OVERDUE_MS
    await Endings(world.ledger, world.bus, Outbox(world.bus, "reaper"), "reaper").unhappy(key, made(kind))
    assert (await world.read(key)).state is state
