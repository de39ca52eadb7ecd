"""``pdq audit``: does what the ledger says agree with what tiers, queues and workers really hold? And repair, if asked."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer
from msgspec import Struct

from pdq.cli.find import DEFAULT_STATE_DIR, AsJson, StateDir, System, talk
from pdq.cli.gather import audited
from pdq.cli.human import seconds
from pdq.cli.reclaim import Reclaimer
from pdq.core.audit import Finding, Kind, View
from pdq.core.settings import Settings
from pdq.ports import KvStore

WATCH_PERIOD_S: Final = 2.0


class Shown(Struct, frozen=True):
    """A finding as an operator sees it."""

    kind: Kind
    subject: str
    detail: str
    since_ms: int
    """Unix milliseconds on the ledger's clock; where nobody knows, when it was first seen."""
    reclaim: str
    """What ``--reclaim`` does about it."""


class LookedAt(Struct, frozen=True):
    workers: int
    records: int
    jobs: int | None
    """None: too many to read."""
    dead_letters: int
    kv_objects: int


class Report(Struct, frozen=True):
    at_ms: int
    looked_at: LookedAt
    findings: tuple[Shown, ...]
    """What is wrong now; with ``--reclaim``, what still is."""
    reclaimed: tuple[Shown, ...] = ()


def audit(
    reclaim: Annotated[bool, typer.Option("--reclaim", help="Repair what can be repaired, then look again.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and print what appears and what goes.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Compare ledger, tiers, queues and every worker's own account; say what is held by nobody or for nobody.

    A trouble counts when two looks, half a second apart, see the same, so work in flight is none. Exit status 0 if
    everything agrees (with --reclaim: afterwards), 1 if not.
    """

    async def once(system: System, settings: Settings) -> Report:
        from pdq.connect import kv_stores

        async with kv_stores(settings) as stores:
            return await report(system, stores, settings, reclaim)

    async def forever(system: System, settings: Settings) -> None:
        from pdq.connect import kv_stores

        async with kv_stores(settings) as stores:
            before: set[tuple[str, str]] = set()
            while True:
                now = await report(system, stores, settings, reclaim)
                before = _show_changes(now, before, as_json)
                await asyncio.sleep(WATCH_PERIOD_S)

    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            talk(state_dir, forever)
        return
    found = talk(state_dir, once)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        _print(found)
    if found.findings:
        raise typer.Exit(1)


async def report(system: System, stores: Sequence[KvStore], settings: Settings, reclaim: bool = False) -> Report:
    view, findings = await audited(system, stores, settings.lease)
    done: list[Finding] = []
    if reclaim and (done := await Reclaimer(system, stores, settings.lease).carry_out(findings)):
        view, findings = await audited(system, stores, settings.lease)
    return Report(view.now_ms, _looked_at(view), tuple(map(_shown, findings)), tuple(map(_shown, done)))


def _looked_at(view: View) -> LookedAt:
    jobs = [model.jobs for model in view.models]
    return LookedAt(
        workers=len(view.workers),
        records=sum(len(model.live) for model in view.models),
        jobs=None if None in jobs else sum(len(each) for each in jobs if each is not None),
        dead_letters=sum(model.dead_letters for model in view.models),
        kv_objects=len(view.objects),
    )


def _shown(finding: Finding) -> Shown:
    return Shown(finding.kind, finding.subject, finding.detail, finding.since_ms, finding.remedy.value)


def _print(found: Report) -> None:
    for title, findings in (("reclaimed", found.reclaimed), ("", found.findings)):
        for each in findings:
            typer.echo(_line(each, found.at_ms, title))
    if not found.findings:
        typer.echo(f"clean: {_scope(found.looked_at)}")


def _line(shown: Shown, now_ms: int, title: str = "") -> str:
    head = f"{title} {shown.kind}".strip()
    age = seconds(max(0, now_ms - shown.since_ms))
    tail = "" if title else f"\n    --reclaim: {shown.reclaim}"
    return f"{head}: {shown.subject}: {shown.detail} (for {age}){tail}"


def _scope(looked_at: LookedAt) -> str:
    jobs = "more jobs than are read one by one" if looked_at.jobs is None else f"{looked_at.jobs} jobs"
    return (
        f"{looked_at.workers} workers, {looked_at.records} live requests, {jobs}, "
        f"{looked_at.kv_objects} KV objects outside of workers, {looked_at.dead_letters} dead letters"
    )


def _show_changes(now: Report, before: set[tuple[str, str]], as_json: bool) -> set[tuple[str, str]]:
    """Print what was not there before, what was reclaimed, and what is gone; what is there now."""
    if as_json:
        typer.echo(msgspec.json.encode(now))
    there = {(each.kind.value, each.subject) for each in now.findings}
    if not as_json:
        for each in now.reclaimed:
            typer.echo(_line(each, now.at_ms, "reclaimed"))
        for each in now.findings:
            if (each.kind.value, each.subject) not in before:
                typer.echo(_line(each, now.at_ms))
        for kind, subject in sorted(before - there):
            typer.echo(f"gone: {kind}: {subject}")
    return there
