"""What every board promises, over the in-memory one and a real Valkey."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from pdq.adapters.memory import MemoryBoard
from pdq.adapters.processes import Server
from pdq.adapters.redis import RedisBoard, connect
from pdq.core import names
from pdq.core.errors import Unavailable
from pdq.core.load import Rates
from pdq.core.pacing import Cause
from pdq.core.settings import RedisSettings
from pdq.ports import Board, Pool, PoolReport, ScalingReport
from tests.conformance.conftest import Time

LONG = 60_000
SHORT = 100


@dataclass
class Scene:
    board: Board
    until: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
    """Lets time pass until the condition holds."""


@pytest.fixture
async def scene(url: str | None, time: Time) -> AsyncIterator[Scene]:
    if url is None:
        yield Scene(MemoryBoard(clock=time.clock), time.until)
        return
    client = await connect(RedisSettings(url=url))
    board = RedisBoard(client)
    yield Scene(board, time.until)
    await board.close()
    await client.aclose()


def report(by: str = "autoscaler-1") -> ScalingReport:
    prefill = PoolReport(
        replicas=2,
        ready=None,
        decided=3,
        cause=next(iter(Cause)),
        why="the queue waits 4.2 s",
        inputs={"wait_s": 4.2, "target_s": 2.0},
        manual=3,
        changed_ms=1_700_000_000_000,
        trouble="nobody answers",
    )
    pools = {Pool.PREFILL: prefill, Pool.DECODE: PoolReport(None, 1, None, next(iter(Cause)), "")}
    rates = Rates(prefill_tokens_per_s=812.5, ended_requests_per_s=0.0)
    return ScalingReport(1_700_000_000_123, by, "local", automatic=True, period_ms=5000, pools=pools, rates=rates)


async def test_a_pool_keeps_the_size_an_operator_fixed_until_it_is_released(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.fixed(model) == {}
    await board.fix(model, Pool.PREFILL, 3)
    await board.fix(model, Pool.DECODE, 0)
    assert await board.fixed(model) == {Pool.PREFILL: 3, Pool.DECODE: 0}
    await board.fix(model, Pool.PREFILL, 5)
    assert await board.fixed(model) == {Pool.PREFILL: 5, Pool.DECODE: 0}
    await board.fix(model, Pool.PREFILL, None)
    await board.fix(model, Pool.PREFILL, None)
    assert await board.fixed(model) == {Pool.DECODE: 0}


async def test_a_worker_sent_away_is_away_until_it_is_called_back(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.away(model) == frozenset()
    await board.send_away(model, "w-1")
    await board.send_away(model, "w-1")
    await board.send_away(model, "w-2")
    assert await board.away(model) == {"w-1", "w-2"}
    assert await board.call_back(model, "w-1")
    assert await board.away(model) == {"w-2"}


async def test_calling_back_a_worker_that_was_not_away_says_so(scene: Scene, model: str) -> None:
    assert not await scene.board.call_back(model, "w-1")


async def test_boards_of_two_models_do_not_mix(scene: Scene, model: str) -> None:
    board, other = scene.board, model + "x"
    await board.fix(model, Pool.PREFILL, 3)
    await board.send_away(model, "w-1")
    assert await board.lead(model, "a", LONG)
    await board.report(model, report(), LONG)
    assert await board.fixed(other) == {}
    assert await board.away(other) == frozenset()
    assert await board.lead(other, "b", LONG)
    assert await board.last_report(other) is None


async def test_of_many_that_want_to_lead_exactly_one_does(scene: Scene, model: str) -> None:
    led = await asyncio.gather(*[scene.board.lead(model, f"a-{n}", LONG) for n in range(20)])
    assert sum(led) == 1


async def test_a_leader_stays_leader_while_it_renews(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.lead(model, "a", LONG)
    assert await board.lead(model, "a", LONG)
    assert not await board.lead(model, "b", LONG)


async def test_renewing_prolongs_the_lead(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.lead(model, "a", SHORT)
    assert await board.lead(model, "a", LONG)
    probe = model + "x"
    assert await board.lead(probe, "a", 3 * SHORT)

    async def probe_is_free() -> bool:
        return await board.lead(probe, "b", SHORT)

    await scene.until(probe_is_free)
    assert not await board.lead(model, "b", LONG)


async def test_when_a_leader_falls_silent_another_one_leads(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.lead(model, "a", SHORT)

    async def taken_over() -> bool:
        return await board.lead(model, "b", LONG)

    await scene.until(taken_over)
    assert not await board.lead(model, "a", LONG)


async def test_who_resigns_lets_another_one_lead_at_once(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.lead(model, "a", LONG)
    await board.resign(model, "a")
    assert await board.lead(model, "b", LONG)


async def test_who_does_not_lead_cannot_resign_for_the_leader(scene: Scene, model: str) -> None:
    board = scene.board
    await board.resign(model, "b")
    assert await board.lead(model, "a", LONG)
    await board.resign(model, "b")
    assert not await board.lead(model, "b", LONG)


async def test_the_last_report_is_read_back_as_it_was_written(scene: Scene, model: str) -> None:
    board = scene.board
    assert await board.last_report(model) is None
    await board.report(model, report("autoscaler-1"), LONG)
    await board.report(model, report("autoscaler-2"), LONG)
    assert await board.last_report(model) == report("autoscaler-2")


async def test_a_report_that_nobody_renews_is_gone(scene: Scene, model: str) -> None:
    await scene.board.report(model, report(), SHORT)

    async def gone() -> bool:
        return await scene.board.last_report(model) is None

    await scene.until(gone)


async def test_a_size_that_was_mistyped_by_hand_is_named_and_can_be_replaced(valkey: Server) -> None:
    client = await connect(RedisSettings(url=valkey.url))
    board = RedisBoard(client)
    await client.hset(names.board_key("by-hand", "fixed"), "prefill", "three")
    with pytest.raises(Unavailable, match="three"):
        await board.fixed("by-hand")
    await board.fix("by-hand", Pool.PREFILL, 3)
    assert await board.fixed("by-hand") == {Pool.PREFILL: 3}
    await board.close()
    await client.aclose()
