"""The autoscaler's loop over the in-memory adapters, on a steered clock: what is read, who decides, what is carried out."""

import pytest
from msgspec.structs import replace

from pdq.autoscale.advise import Advise, Onlooker
from pdq.autoscale.observe import missed_least_first
from pdq.autoscale.policies import FollowLoad, FollowPlan
from pdq.core.errors import Unavailable
from pdq.core.load import Load
from pdq.core.pacing import Cause
from pdq.ports import Occupancy, Pool, WorkerInfo
from tests.conformance.test_registry import info
from tests.unit.scaled import LIMITS, MODEL, TO_ZERO, World


@pytest.fixture
def world() -> World:
    return World()


def shut(what: str) -> object:
    async def refuse(*_: object) -> None:
        raise Unavailable(f"{what} does not answer")

    return refuse


# --- Following the load -----------------------------------------------------------------------------------------------


async def test_a_queue_that_will_last_makes_prefill_grow_and_the_new_workers_are_asked_for_once(world: World) -> None:
    autoscaler = world.autoscaler()
    await world.rounds(autoscaler, 3)
    await world.accept(60)
    report = await world.rounds(autoscaler, 1)
    assert report is not None
    assert (report.pools[Pool.PREFILL].replicas, report.pools[Pool.PREFILL].decided) == (1, 2)
    assert report.pools[Pool.PREFILL].cause is Cause.OUT
    assert [call[:2] for call in world.levers.calls if call[0] is Pool.PREFILL] == [(Pool.PREFILL, 2)]
    assert report.rates.prefill_tokens_per_s == pytest.approx(1_000)


async def test_idle_pools_are_scaled_to_zero_and_a_waiting_request_brings_both_back(world: World) -> None:
    autoscaler = world.autoscaler(limits=TO_ZERO)
    await world.rounds(autoscaler, 40)
    assert not world.levers.workers
    await world.accept(1, prompt_tokens=10)
    await world.rounds(autoscaler, 1)
    assert sorted(world.levers.workers.values()) == [Pool.DECODE, Pool.PREFILL]


async def test_nothing_is_asked_of_the_actuator_while_nothing_changes(world: World) -> None:
    await world.rounds(world.autoscaler(), 50)
    assert not world.levers.calls


# --- What cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blind", ["ledger.load", "registry.workers", "board.fixed", "levers.sizes"])
async def test_what_cannot_be_read_holds_the_pools_and_the_report_says_what_it_was(
    blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(prefill=3, decode=3)
    autoscaler = world.autoscaler(limits=TO_ZERO)
    await world.rounds(autoscaler, 3)
    where, method = blind.split(".")
    monkeypatch.setattr(getattr(world, where), method, shut(blind))
    report = await world.rounds(autoscaler, 100)
    assert report is not None
    assert {said.cause for said in report.pools.values()} == {Cause.NO_METRICS}
    assert all("holding" in said.why for said in report.pools.values())
    assert not world.levers.calls
    if blind != "ledger.load":
        assert f"{blind} does not answer" in report.pools[Pool.PREFILL].why
        assert {(said.replicas, said.ready, said.decided) for said in report.pools.values()} == {(None, None, 3)}
        assert 'pdq_autoscaler_replicas{model="m",pool="prefill"}' not in world.exported()


async def test_a_reading_that_failed_once_does_not_make_workers_look_slow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoscaler = world.autoscaler()
    await world.rounds(autoscaler, 3)
    with monkeypatch.context() as blind:
        blind.setattr(world.registry, "workers", shut("registry"))
        await world.rounds(autoscaler, 5)
    report = await world.rounds(autoscaler, 2)
    assert report is not None
    assert report.rates.prefill_tokens_per_s == pytest.approx(1_000)


async def test_only_ready_workers_count_and_quarantined_memory_does_not(world: World) -> None:
    seen: list[object] = []

    class Watch(FollowLoad):
        def decide(self, it, now_s):  # type: ignore[no-untyped-def]
            seen.append(it)
            return super().decide(it, now_s)

    await world.registry.announce(
        replace(info("decode-b", MODEL, Pool.DECODE), occupancy=Occupancy(8, 8, 0, 0, quarantined_blocks=3)), 99_000
    )
    await world.registry.announce(replace(info("decode-c", MODEL, Pool.DECODE), state="draining"), 99_000)
    await world.registry.announce(info("decode-d", "another model", Pool.DECODE), 99_000)
    await world.autoscaler(Watch(LIMITS)).once()
    decode = seen[0].decode  # type: ignore[attr-defined]
    assert (decode.replicas, decode.ready, decode.kv_tokens) == (1, 1, 5 * 4)


# --- Operators --------------------------------------------------------------------------------------------------------


async def test_an_operators_size_stands_against_the_load_until_it_is_released(world: World) -> None:
    autoscaler = world.autoscaler()
    await world.rounds(autoscaler, 3)
    await world.board.fix(MODEL, Pool.PREFILL, 3)
    await world.accept(200)
    report = await world.rounds(autoscaler, 5)
    assert report is not None
    assert (report.pools[Pool.PREFILL].decided, report.pools[Pool.PREFILL].manual) == (3, 3)
    assert report.pools[Pool.PREFILL].cause is Cause.MANUAL
    assert list(world.levers.workers.values()).count(Pool.PREFILL) == 3
    await world.board.fix(MODEL, Pool.PREFILL, None)
    await world.rounds(autoscaler, 3)
    assert list(world.levers.workers.values()).count(Pool.PREFILL) > 3


async def test_without_automatic_control_sizes_are_the_operators_and_else_the_plans(world: World) -> None:
    plan = {Pool.PREFILL: 1, Pool.DECODE: 1}
    autoscaler = world.autoscaler(FollowPlan(lambda: plan))
    await world.accept(500)
    report = await world.rounds(autoscaler, 10)
    assert not world.levers.calls
    assert report is not None
    assert not report.automatic
    await world.board.fix(MODEL, Pool.DECODE, 4)
    await world.rounds(autoscaler, 1)
    assert list(world.levers.workers.values()).count(Pool.DECODE) == 4
    await world.board.fix(MODEL, Pool.DECODE, None)
    await world.rounds(autoscaler, 1)
    assert list(world.levers.workers.values()).count(Pool.DECODE) == 1


async def test_a_plan_is_not_carried_out_on_a_pool_that_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoscaler = world.autoscaler(FollowPlan(lambda: {Pool.PREFILL: 5, Pool.DECODE: 5}))
    monkeypatch.setattr(world.board, "fixed", shut("board"))
    report = await world.rounds(autoscaler, 2)
    assert report is not None
    assert {said.decided for said in report.pools.values()} == {None}
    assert not world.levers.calls


# --- Carrying it out --------------------------------------------------------------------------------------------------


async def test_an_actuator_that_fails_for_one_pool_is_reported_and_tried_again_and_the_other_pool_goes_on(
    world: World,
) -> None:
    autoscaler = world.autoscaler()
    await world.rounds(autoscaler, 2)
    world.levers.broken = {Pool.PREFILL}
    await world.board.fix(MODEL, Pool.PREFILL, 2)
    await world.board.fix(MODEL, Pool.DECODE, 2)
    report = await world.rounds(autoscaler, 3)
    assert report is not None
    assert report.pools[Pool.PREFILL].trouble == "no more prefill workers: quota exceeded"
    assert report.pools[Pool.PREFILL].changed_ms is None
    assert (report.pools[Pool.DECODE].trouble, report.pools[Pool.DECODE].replicas) == ("", 2)
    assert [call[0] for call in world.levers.calls].count(Pool.PREFILL) == 3
    assert world.exported()['pdq_autoscaler_trouble{model="m",pool="prefill"}'] == 1
    world.levers.broken = set()
    await world.rounds(autoscaler, 1)
    report = await world.rounds(autoscaler, 1)
    assert report is not None
    assert (report.pools[Pool.PREFILL].replicas, report.pools[Pool.PREFILL].trouble) == (2, "")


async def test_workers_that_do_not_run_are_told_of_with_what_the_actuator_knows(world: World) -> None:
    world.levers.said = {Pool.DECODE: "decode-0 exited with 3"}
    report = await world.rounds(world.autoscaler(), 1)
    assert report is not None
    assert report.pools[Pool.DECODE].trouble == "decode-0 exited with 3"
    assert report.pools[Pool.PREFILL].trouble == ""


async def test_a_worker_that_never_becomes_ready_is_replaced_and_does_not_keep_the_other_pool_waiting() -> None:
    world = World(prefill=2, decode=1)
    world.asleep = {"prefill-a1"}
    autoscaler = world.autoscaler()
    for _ in range(20):
        await world.accept(1, prompt_tokens=700)
        await world.rounds(autoscaler, 1)
    assert list(world.levers.workers.values()).count(Pool.PREFILL) >= 3
    await world.board.fix(MODEL, Pool.DECODE, 2)
    await world.rounds(autoscaler, 1)
    assert list(world.levers.workers.values()).count(Pool.DECODE) == 2


def holding(
    worker: str, *, running: int = 0, held: int = 0, used: int = 0, state: str = "ready", started: int = 0
) -> WorkerInfo:
    return replace(
        info(worker, MODEL, Pool.PREFILL),
        occupancy=Occupancy(8, 8 - used, running, held),
        state=state,
        started_ms=started,
    )


VICTIMS = [
    ("who drains already", [holding("a"), holding("b", held=3, state="draining")], ["b", "a"]),
    ("who holds nothing", [holding("a", held=2), holding("b"), holding("c", running=1)], ["b", "c", "a"]),
    ("held and running together", [holding("a", held=2, running=2), holding("b", held=3)], ["b", "a"]),
    ("fewest blocks of equals", [holding("a", held=1, used=5), holding("b", held=1, used=2)], ["b", "a"]),
    ("the youngest of equals", [holding("a", started=1), holding("b", started=9)], ["b", "a"]),
]


@pytest.mark.parametrize("case", VICTIMS, ids=lambda case: case[0])
def test_first_to_leave_is(case: tuple[str, list[WorkerInfo], list[str]]) -> None:
    _, workers, order = case
    assert missed_least_first(Pool.PREFILL, [*workers, info("d", MODEL, Pool.DECODE)]) == order


# --- Who decides ------------------------------------------------------------------------------------------------------


async def test_of_two_only_one_decides_and_the_other_takes_over_when_it_resigns_or_falls_silent(world: World) -> None:
    one, two = world.autoscaler(who="one"), world.autoscaler(who="two")
    assert await one.once() is not None
    assert await two.once() is None
    await world.board.resign(MODEL, "one")
    assert await two.once() is not None
    assert await one.once() is None
    world.now_s += 6
    assert await one.once() is not None


async def test_while_the_board_does_not_say_who_decides_nobody_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoscaler = world.autoscaler(FollowPlan(lambda: {Pool.PREFILL: 2, Pool.DECODE: 2}))
    monkeypatch.setattr(world.board, "lead", shut("board"))
    assert await world.rounds(autoscaler, 3) is None
    assert not world.levers.calls
    assert world.exported()['pdq_autoscaler_leader{model="m"}'] == 0


async def test_who_has_read_for_so_long_that_another_may_lead_decides_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = world.ledger.load

    async def slowly(model: str) -> Load:
        world.now_s += 10
        return await read(model)

    monkeypatch.setattr(world.ledger, "load", slowly)
    assert await world.autoscaler(FollowPlan(lambda: {Pool.PREFILL: 2, Pool.DECODE: 2})).once() is None
    assert not world.levers.calls


async def test_who_took_over_knows_the_rates_that_it_measured_while_it_followed(world: World) -> None:
    one, two = world.autoscaler(who="one"), world.autoscaler(who="two")
    for _ in range(3):
        await world.rounds(one, 1)
        assert await two.once() is None
    await world.board.resign(MODEL, "one")
    report = await two.once()
    assert report is not None
    assert report.rates.prefill_tokens_per_s == pytest.approx(1_000)


# --- What is told -----------------------------------------------------------------------------------------------------


async def test_the_last_decision_is_on_the_board_until_its_author_has_been_silent_for_long(world: World) -> None:
    report = await world.rounds(world.autoscaler(), 1)
    assert await world.board.last_report(MODEL) == report
    world.now_s += 6
    assert await world.board.last_report(MODEL) is None


async def test_a_board_that_takes_no_report_does_not_stop_the_decision(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.board, "report", shut("board"))
    await world.board.fix(MODEL, Pool.DECODE, 2)
    await world.rounds(world.autoscaler(), 1)
    assert list(world.levers.workers.values()).count(Pool.DECODE) == 2


async def test_the_last_decision_is_exported_with_its_inputs_cause_and_age(world: World) -> None:
    autoscaler = world.autoscaler()
    await world.rounds(autoscaler, 4)
    world.now_s += 2.5
    exported = world.exported()
    assert exported['pdq_autoscaler_leader{model="m"}'] == 1
    assert exported['pdq_autoscaler_last_decision_age_seconds{model="m"}'] == 2.5
    assert exported['pdq_autoscaler_desired{model="m",pool="prefill"}'] == 1
    assert exported['pdq_autoscaler_ready{model="m",pool="decode"}'] == 1
    assert exported['pdq_autoscaler_cause{cause="steady",model="m",pool="decode"}'] == 1
    assert exported['pdq_autoscaler_input{input="tokens_per_s_per_worker",model="m",pool="prefill"}'] == pytest.approx(
        1_000
    )
    assert exported['pdq_autoscaler_decisions_total{cause="steady",model="m",pool="decode"}'] == 4
    assert 'pdq_autoscaler_fixed{model="m",pool="decode"}' not in exported


async def test_a_change_is_logged_as_news_and_what_stays_as_it_is_only_for_whoever_looks_closely(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "pdq.autoscale")
    autoscaler = world.autoscaler()
    await world.rounds(autoscaler, 10)
    await world.board.fix(MODEL, Pool.DECODE, 3)
    await world.rounds(autoscaler, 5)
    lines = [(it.levelname, it.getMessage()) for it in caplog.records if it.getMessage().startswith("decode ")]
    assert len(lines) == 15
    news = [message for level, message in lines if level == "INFO"]
    assert [message.split(":")[0] for message in news] == ["decode 1 -> 1, steady", "decode 1 -> 3, manual"]
    assert "sequences=0" in news[0]


# --- Advice -----------------------------------------------------------------------------------------------------------


async def test_advice_is_reported_and_nothing_is_changed(world: World) -> None:
    await world.announce()
    autoscaler = world.autoscaler(actuator=Advise(MODEL, world.registry))
    await world.board.fix(MODEL, Pool.DECODE, 4)
    report = await world.rounds(autoscaler, 2)
    assert report is not None
    assert report.actuator == "advise"
    assert (report.pools[Pool.DECODE].replicas, report.pools[Pool.DECODE].decided) == (1, 4)
    assert not world.levers.calls


async def test_an_onlooker_decides_beside_the_one_that_leads_and_leaves_no_trace(world: World) -> None:
    leader, onlooker = world.autoscaler(), world.autoscaler(who="two", board=Onlooker(world.board))
    report = await world.rounds(leader, 1)
    assert await onlooker.once() is not None
    assert await world.board.last_report(MODEL) == report
    assert await world.rounds(leader, 1) is not None
