"""``pdq scale`` and what ``pdq status`` says of sizes, on real servers, with an autoscaler that the test plays."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from pdq.adapters.processes import Server
from pdq.connect import Connected, connect
from pdq.core.environment import load
from pdq.core.pacing import Cause
from pdq.ports import Pool, PoolReport, ScalingReport
from tests.conformance.test_registry import info
from tests.contract.commands import Cli, finish
from tests.contract.scripted import until

LONG_MS = 60_000


@pytest.fixture
async def system(nats: Server, valkey: Server) -> AsyncIterator[Connected]:
    async with connect(load({"PDQ_NATS_URL": nats.url, "PDQ_REDIS_URL": valkey.url}), "test") as system:
        yield system


def said(pool: PoolReport, *, actuator: str = "local", automatic: bool = True) -> ScalingReport:
    return ScalingReport(
        at_ms=time.time_ns() // 1_000_000,
        by="the test",
        actuator=actuator,
        automatic=automatic,
        period_ms=1000,
        pools={Pool.PREFILL: pool, Pool.DECODE: PoolReport(1, 1, 1, Cause.STEADY, "1 are enough")},
    )


STEADY = PoolReport(1, 1, 1, Cause.STEADY, "1 are enough")


async def present(system: Connected, model: str, *workers: str, state: str = "ready") -> None:
    for worker in workers:
        it = replace(info(worker, model, Pool(worker.split("-")[0])), state=state)
        await system.registry.announce(it, LONG_MS)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["prefil=3"], "'prefil=3'"),
        (["prefill"], "'prefill'"),
        (["prefill="], "neither a whole number"),
        (["prefill=-1"], "neither a whole number"),
        (["prefill=2.5"], "neither a whole number"),
        (["decode=many"], "'many'"),
        (["decode=10001"], "more than 10000"),
        (["decode=" + "9" * 5000], "more than 10000"),
        (["prefill=1", "prefill=auto"], "was given a size before"),
        (["decode=1", "--dry-run"], "--kubernetes"),
    ],
)
async def test_a_size_that_cannot_be_meant_is_refused_and_written_nowhere(
    cli: Cli, system: Connected, model: str, words: list[str], why: str
) -> None:
    status, out, err = await cli.run("scale", "--model", model, *words)
    assert (status, out) == (2, "")
    assert why in err
    assert not await system.board.fixed(model)


async def test_a_size_is_written_down_and_the_command_waits_until_so_many_are_ready(
    cli: Cli, system: Connected, model: str
) -> None:
    await system.board.report(model, said(STEADY), LONG_MS)
    await present(system, model, f"prefill-1-{model}")
    waiting = await cli.start("scale", "--model", model, "prefill=2")

    async def asked() -> bool:
        return (await system.board.fixed(model)).get(Pool.PREFILL) == 2

    await until(asked)
    assert waiting.stderr is not None
    assert b"prefill: 1 of 2 ready" in await waiting.stderr.readline()
    await present(system, model, f"prefill-2-{model}")
    status, out, _ = await finish(waiting)
    assert (status, out) == (0, "prefill is fixed at 2, 2 ready\n")


async def test_a_size_that_is_not_reached_in_time_stays_asked_for_and_the_reason_is_told(
    cli: Cli, system: Connected, model: str
) -> None:
    await system.board.report(model, said(replace(STEADY, trouble="prefill-0 exited with 3: no device")), LONG_MS)
    await present(system, model, f"prefill-1-{model}")
    status, out, err = await cli.run("scale", "--model", model, "prefill=2", "--timeout", "0.5", "--json")
    assert status == 1
    assert "1 of 2 ready (prefill-0 exited with 3: no device)" in err
    assert json.loads(out)["pools"]["prefill"] == {
        "fixed": 2,
        "ready": 1,
        "draining": 0,
        "decided": 1,
        "cause": "steady",
        "why": "1 are enough",
        "trouble": "prefill-0 exited with 3: no device",
    }
    assert await system.board.fixed(model) == {Pool.PREFILL: 2}


async def test_who_does_not_wait_is_told_at_once_how_far_it_is(cli: Cli, system: Connected, model: str) -> None:
    await system.board.report(model, said(STEADY), LONG_MS)
    assert await cli.run("scale", "--model", model, "decode=5", "--no-wait") == (
        0,
        "decode is fixed at 5, 0 ready\n",
        "",
    )


@pytest.mark.parametrize(("automatic", "whom"), [(True, "the load"), (False, "the number with which")])
async def test_auto_releases_what_was_fixed_and_says_what_the_size_follows_then(
    cli: Cli, system: Connected, model: str, automatic: bool, whom: str
) -> None:
    await system.board.report(model, said(STEADY, automatic=automatic), LONG_MS)
    await system.board.fix(model, Pool.PREFILL, 7)
    status, out, _ = await cli.run("scale", "--model", model, "prefill=auto")
    assert status == 0
    assert f"prefill follows {whom}" in out
    assert not await system.board.fixed(model)


async def test_where_nobody_carries_it_out_the_command_says_so_and_what_to_do(
    cli: Cli, system: Connected, model: str
) -> None:
    await present(system, model, f"prefill-1-{model}")
    status, _, err = await cli.run("scale", "--model", model, "prefill=2")
    assert status == 3
    assert "nobody carries out" in err
    assert "pdq autoscaler" in err
    await system.board.report(model, said(STEADY, actuator="advise"), LONG_MS)
    status, _, err = await cli.run("scale", "--model", model, "prefill=2")
    assert status == 3
    assert "only advises" in err


async def test_a_model_that_nobody_ever_served_gets_no_size(cli: Cli, system: Connected, model: str) -> None:
    status, _, err = await cli.run("scale", "--model", model, "prefill=2")
    assert status == 2
    assert model in err
    assert not await system.board.fixed(model)


async def test_of_several_models_one_must_be_named(cli: Cli, system: Connected, model: str) -> None:
    await present(system, model, f"prefill-1-{model}")
    await present(system, model + "b", f"decode-2-{model}")
    status, _, err = await cli.run("scale")
    assert status == 2
    assert "--model" in err
    assert model in err


async def test_without_words_the_sizes_are_shown_with_who_is_ready_and_who_drains(
    cli: Cli, system: Connected, model: str
) -> None:
    await present(system, model, f"prefill-1-{model}")
    await present(system, model, f"prefill-2-{model}", state="draining")
    await system.board.fix(model, Pool.DECODE, 4)
    found = await cli.json("scale", "--model", model)
    assert (found["actuator"], found["automatic"]) == (None, False)
    assert (found["pools"]["prefill"]["ready"], found["pools"]["prefill"]["draining"]) == (1, 1)
    assert (found["pools"]["decode"]["fixed"], found["pools"]["decode"]["decided"]) == (4, None)
    status, out, _ = await cli.run("scale", "--model", model)
    assert status == 0
    assert "nobody carries out" in out


async def test_status_shows_the_last_decision_with_its_reason_and_who_is_away(
    cli: Cli, system: Connected, model: str
) -> None:
    await present(system, model, f"prefill-1-{model}")
    pool = PoolReport(1, 1, 3, Cause.OUT, "900 tokens/s arrive", {"wait_s": 2.5}, trouble="no device")
    await system.board.report(model, said(pool), LONG_MS)
    await system.board.send_away(model, f"prefill-9-{model}")
    found = {it["model"]: it for it in (await cli.json("status"))["models"]}[model]
    shown = found["scaling"]["pools"]["prefill"]
    assert (shown["decided"], shown["cause"], shown["inputs"], shown["trouble"]) == (
        3,
        "out",
        {"wait_s": 2.5},
        "no device",
    )
    assert found["decided_ms_ago"] >= 0
    assert found["away"] == [f"prefill-9-{model}"]
    _, out, _ = await cli.run("status")
    assert "1 -> 3" in out
    assert "900 tokens/s arrive" in out
    assert f"away     prefill-9-{model}" in out


async def test_status_can_be_watched_line_by_line(cli: Cli, system: Connected, model: str) -> None:
    await present(system, model, f"prefill-1-{model}")
    watching = await cli.start("status", "--watch", "--every", "0.1", "--json")
    assert watching.stdout is not None
    async with asyncio.timeout(60):
        looks = [json.loads(await watching.stdout.readline()) for _ in range(3)]
    watching.terminate()
    await watching.communicate()
    assert all(model in [it["model"] for it in look["models"]] for look in looks)


@pytest.mark.parametrize("options", [("--prefill", "0"), ("--mode", "aggregated")])
async def test_autoscaling_starts_with_a_worker_in_each_of_two_pools_or_not_at_all(
    cli: Cli, options: tuple[str, str]
) -> None:
    status, out, err = await cli.run("up", "--engine", "sim", "--autoscale", *options)
    assert (status, out) == (2, "")
    assert "a worker in each" in err


async def test_an_address_that_is_taken_is_refused_before_anything_starts(cli: Cli, nats: Server) -> None:
    status, _, err = await cli.run("up", "--engine", "sim", "--autoscale", PDQ_SCALING_METRICS_PORT=str(nats.port))
    assert status == 2
    assert "PDQ_SCALING_METRICS_PORT" in err
