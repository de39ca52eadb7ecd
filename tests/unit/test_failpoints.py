"""Failpoints: the table and the code agree, and a setting does what it says and no more."""

import ast
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdq import failpoints
from pdq.core import errors
from pdq.failpoints import POINTS, arm, hit

ROOT = Path(__file__).parents[2] / "pdq"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.armed.clear()


def _strings() -> set[str]:
    """Every string in the code, outside of the table's own module."""
    files = [file for file in ROOT.rglob("*.py") if file != ROOT / "failpoints.py"]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _hits() -> set[str]:
    """Every name that is passed to ``failpoints.hit`` as it stands."""
    nodes = (node for file in ROOT.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.hit"]
    return {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}  # type: ignore[misc]


def test_every_point_of_the_table_is_hit_somewhere_in_the_code() -> None:
    assert set(POINTS) - _strings() == set()


def test_every_point_that_the_code_hits_is_in_the_table() -> None:
    assert len(_hits()) > 30
    assert _hits() - set(POINTS) == set()


def _calls(tree: ast.AST) -> set[int]:
    """The lines where a point is hit."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {node.lineno for node in nodes if ast.unparse(node.func) == "failpoints.hit"}


def test_no_place_hits_a_point_without_asking_first_whether_any_is_armed() -> None:
    for file in ROOT.rglob("*.py"):
        tree = ast.parse(file.read_text())
        guards = [it for it in ast.walk(tree) if isinstance(it, ast.If) and "failpoints.armed" in ast.unparse(it.test)]
        guarded = {line for guard in guards for line in _calls(guard)}
        assert _calls(tree) == guarded, file


async def test_an_error_is_the_one_that_was_asked_for() -> None:
    arm("ledger.change=error:stale_epoch; queue.publish=error; decode.step=error:bug")
    with pytest.raises(errors.StaleEpoch, match="failpoint ledger"):
        await hit("ledger.change")
    with pytest.raises(errors.Unavailable):
        await hit("queue.publish")
    with pytest.raises(RuntimeError):
        await hit("decode.step")


async def test_a_fault_skips_and_counts_its_hits() -> None:
    arm("bus.send=drop*2+1")
    assert [await hit("bus.send") for _ in range(5)] == [None, "drop", "drop", None, None]


async def test_a_fault_for_one_request_leaves_the_others_alone() -> None:
    arm("finish.after=drop@0190-abc")
    assert await hit("finish.after", "0190-def") is None
    assert await hit("finish.after", "0190-abc-1") == "drop"


async def test_several_faults_at_one_point_happen_in_their_order() -> None:
    arm("decode.landed=delay:0; decode.landed=corrupt*1")
    assert await hit("decode.landed") == "corrupt"
    assert await hit("decode.landed") is None


async def test_a_share_of_the_hits_is_about_that_share() -> None:
    arm("bus.send=drop%25")
    dropped = sum([await hit("bus.send") == "drop" for _ in range(4000)])
    assert 700 < dropped < 1300


async def test_a_new_setting_replaces_the_old_one_and_an_empty_one_clears_it() -> None:
    arm("bus.send=drop")
    arm("bus.control=drop")
    assert await hit("bus.send") is None
    arm("")
    assert not failpoints.armed


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("bus.sent=drop", "no point bus.sent"),
        ("bus.send", "NAME=ACTION"),
        ("bus.send=explode", "an action is"),
        ("bus.send=corrupt", "cannot be done at bus.send"),
        ("decode.step=drop", "cannot be done at decode.step"),
        ("decode.step=delay", "cannot be done"),
        ("decode.step=delay:soon", "cannot be done"),
        ("decode.step=error:no_such_code", "cannot be done"),
        ("decode.step=kill:9", "cannot be done"),
        ("decode.step=kill*two", "NAME=ACTION"),
    ],
)
async def test_a_setting_that_makes_no_sense_is_refused_and_changes_nothing(setting: str, complaint: str) -> None:
    arm("bus.send=drop")
    with pytest.raises(errors.InvalidSettings, match=complaint):
        arm(f"bus.control=drop; {setting}")
    assert list(failpoints.armed) == ["bus.send"]


async def test_without_the_variable_nobody_listens_and_nothing_is_armed() -> None:
    heard: list[Callable[[str], None]] = []

    async def listen(hear: Callable[[str], None]) -> None:
        heard.append(hear)

    await failpoints.open_to("subject", listen, {})
    assert not heard
    assert not failpoints.armed
    await failpoints.open_to("subject", listen, {"PDQ_FAILPOINTS": "on"})
    assert not failpoints.armed
    heard[0]("bus.send=drop")
    assert list(failpoints.armed) == ["bus.send"]
    heard[0]("nonsense")
    assert list(failpoints.armed) == ["bus.send"]


def test_kill_ends_the_process_on_the_spot() -> None:
    program = "import asyncio; from pdq import failpoints as f; f.arm('decode.step=kill+1')\n"
    program += "asyncio.run(f.hit('decode.step')); print('one', flush=True)\n"
    program += "asyncio.run(f.hit('decode.step')); print('alive')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["one"]


def test_damage_changes_the_first_byte_that_can_be_changed() -> None:
    memory = bytearray(b"\x0f\x0f")
    failpoints.damage([b"fixed", memory])
    assert bytes(memory) == b"\xf0\x0f"
