"""The audit as an oracle: after whatever a test has done to a system, nothing may be left that nobody needs."""

import asyncio
import time

from pdq import connect
from pdq.cli.find import System
from pdq.cli.gather import audited
from pdq.core.audit import Finding
from pdq.core.environment import load
from pdq.core.settings import Settings
from tests.e2e.stack import Stack

PAUSE_S = 0.2


async def findings_now(system: System, settings: Settings) -> list[Finding]:
    """What ``pdq audit`` would report. ``settings`` are those of the system's own programs."""
    async with connect.kv_stores(settings) as stores:
        _, findings = await audited(system, stores, settings.lease)
        return findings


async def until_clean(system: System, settings: Settings, within_s: float) -> None:
    """Returns once an audit finds nothing; fails with what it found last if that takes longer than ``within_s``."""
    give_up = time.monotonic() + within_s
    while findings := await findings_now(system, settings):
        assert time.monotonic() < give_up, f"after {within_s} s the audit still finds\n{told(findings)}"
        await asyncio.sleep(PAUSE_S)


def findings_of(stack: Stack) -> list[Finding]:
    return stack.inside.ask(lambda system: findings_now(system, load(stack.environ)))


def assert_clean(stack: Stack, within_s: float = 30.0) -> None:
    stack.inside.ask(lambda system: until_clean(system, load(stack.environ), within_s), within_s + 30)


def told(findings: list[Finding]) -> str:
    return "\n".join(f"{each.kind}: {each.subject}: {each.detail}" for each in findings)
