"""A bad end is told in one way: at once by whoever wins it, and later from its record by whoever is asked."""

from collections.abc import Awaitable, Callable

import pytest

from pdq.bridge.requests import _end_of
from pdq.core import errors
from pdq.core.errors import PdqError
from pdq.core.handoff import Event, State
from pdq.core.lease import RecordKey
from pdq.core.messages import Failure
from pdq.stages.endings import Endings
from pdq.stages.outbox import Outbox
from tests.kv import until
from tests.unit.stages.parts import TTL_MS, World
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
    assert first.error is not None
    said = first.error.message if kind is errors.DeadlineExceeded else "why"
    assert first.error == Failure(kind.code, said, retryable=kind.retryable)
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


DEADLINE_MS = 60_000


async def _queued(world: World) -> RecordKey:
    return await world.queued()


async def _prefilling(world: World) -> RecordKey:
    key = await world.queued()
    await world.ledger.acquire(key, Event.BEGIN, "prefill-0", TTL_MS)
    return key


async def _ready(world: World) -> RecordKey:
    return (await world.ready()).key


async def _fetched(world: World) -> RecordKey:
    return (await world.fetched()).key


@pytest.mark.parametrize(
    ("bring", "where"),
    [
        (_queued, "while it waited for its turn"),
        (_prefilling, "while its prompt was being computed"),
        (_ready, "before its answer could go on"),
        (_fetched, "while its answer was being generated"),
    ],
)
async def test_a_deadline_that_passed_is_told_in_words_for_who_asked(
    bring: Callable[[World], Awaitable[RecordKey]], where: str
) -> None:
    world = World()
    key = await bring(world)
    world.now_ms += DEADLINE_MS
    endings = Endings(world.ledger, world.bus, Outbox(world.bus, "reaper"), "reaper")
    assert await endings.unhappy(key, errors.DeadlineExceeded("noticed by whoever"))
    record = await world.read(key)
    assert record.state is State.EXPIRED
    assert record.ended_message is not None
    assert where in record.ended_message
    assert "give it more time" in record.ended_message
    assert not await endings.unhappy(key, errors.DeadlineExceeded("noticed by another"))


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (errors.DeadlineExceeded, "INFO"),
        (errors.RequestCancelled, "INFO"),
        (errors.InvalidRequest, "INFO"),
        (errors.EngineFailed, "WARNING"),
        (errors.StreamLost, "WARNING"),
    ],
)
async def test_an_end_that_is_the_requesters_own_doing_is_no_warning(
    kind: type[PdqError], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = World()
    key = await world.queued()
    world.now_ms += DEADLINE_MS
    await Endings(world.ledger, world.bus, Outbox(world.bus, "reaper"), "reaper").unhappy(key, made(kind))
    assert [record.levelname for record in caplog.records if key.request_id in record.getMessage()] == [level]
