"""``pdq states``: ``docs/states.md``, the life of a request for people, generated so that it cannot drift from the rules.

Diagram and tables come from the tables in ``pdq.core.handoff``, and what an event or author is from the words that stand
there. What no table can say (the invariants, what follows from a failure) is written by hand in ``states.template.md``.
"""

import difflib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from pdq.cli.docstrings import field_docs
from pdq.core.handoff import KV_FIELDS, LIVE, RESTS_ON, RULES, TERMINAL, TRANSITIONS, Author, Event, State, predecessors

FILE: Final = Path("docs/states.md")

_MEANINGS: Final = {
    State.QUEUED: "Accepted; its prefill job is in the queue. Nobody holds anything for it.",
    State.PREFILLING: "A worker computes the prompt and offers its KV chunk by chunk; a decode worker may wait.",
    State.READY: "All KV is computed and on offer, and its digest is in the record. Metadata alone is never readiness.",
    State.FETCHED: "Every byte lies at the decode worker and the digest agrees; it generates.",
    State.DONE: "The last token is out.",
    State.FAILED: "Given up; the record's `ended_code` says why.",
    State.CANCELLED: "The client went away, or asked to stop.",
    State.EXPIRED: "The deadline passed, wherever the request was.",
}


def document() -> str:
    """The exact text of ``docs/states.md``."""
    template = (files(__package__) / "states.template.md").read_text()
    return template.format(diagram=_diagram(), states=_states(), events=_events(), authors=_authors())


def _diagram() -> str:
    """Mermaid. Events that lead from every live state to the same one start from a box that stands for all of these."""
    anywhere = [event for event in Event if set(predecessors(event)) == LIVE]
    arrows: dict[tuple[State, State], list[Event]] = {}
    for (start, event), end in TRANSITIONS.items():
        if event not in anywhere:
            arrows.setdefault((start, end), []).append(event)
    lines = ["stateDiagram-v2", f"    [*] --> {State.QUEUED}"]
    lines += [f"    {start} --> {end}: {', '.join(events)}" for (start, end), events in arrows.items()]
    lines.append(f'    state "{", ".join(_in_order(LIVE))}" as live')
    lines += [f"    live --> {end}: {event}" for event in anywhere for end in set(predecessors(event).values())]
    return "\n".join(lines + [f"    {state} --> [*]" for state in _in_order(TERMINAL)])


def _states() -> str:
    def row(state: State) -> tuple[str, ...]:
        rests = RESTS_ON.get(state)
        return f"`{state}`", "" if state.terminal else rests.value if rests else "no lease", _MEANINGS[state]

    return _table(("state", "rests on", "meaning"), map(row, State))


def _events() -> str:
    docs = field_docs(Event)

    def row(event: Event) -> tuple[str, ...]:
        return f"`{event}`", docs.get(event.name, ""), f"`{RULES[event].author}`", _moves(event), _effects(event)

    return _table(("event", "meaning", "who", "moves", "leases and record"), map(row, Event))


def _moves(event: Event) -> str:
    if set(predecessors(event)) == LIVE:
        return f"any live state → {' or '.join(sorted(set(predecessors(event).values())))}"
    return "; ".join(f"{start} → {end}" for start, end in predecessors(event).items())


def _effects(event: Event) -> str:
    rule = RULES[event]
    effects = []
    if rule.claims:
        effects.append(f"gives the {rule.claims} lease, epoch + 1")
    if rule.counts_attempt:
        effects.append("attempt + 1")
    if rule.moves_source_to_sink:
        effects.append("the source lease becomes the sink lease")
    if rule.releases:
        kept = ", unless `retain` keeps it" if event is Event.FETCHED else ""
        effects.append(f"clears {' and '.join(rule.releases)}{kept}")
    if rule.voids_kv:
        effects.append(f"clears {', '.join(f'`{field}`' for field in KV_FIELDS)}")
    return "; ".join(effects)


def _authors() -> str:
    docs = field_docs(Author)
    return _table(("who", "that is"), ((f"`{author}`", docs[author.name]) for author in Author))


def _in_order(states: Iterable[State]) -> list[State]:
    return [state for state in State if state in states]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drift(file: Path) -> str:
    """What differs between ``file`` and the rules, as a unified diff; empty if nothing does."""
    found = file.read_text() if file.exists() else ""
    return "".join(
        difflib.unified_diff(
            found.splitlines(True), document().splitlines(True), f"{file} (committed)", f"{file} (from the rules)"
        )
    )


def states(
    file: Annotated[Path, typer.Option("--file", help="Where the page is.")] = FILE,
    write: Annotated[bool, typer.Option("--write", help="Write the page instead of comparing it.")] = False,
) -> None:
    """Compare the committed page about a request's states (docs/states.md) with the rules, or write it.

    Exit status 1 if it differs from what the rules say.
    """
    if write:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document())
        typer.echo(file)
    elif difference := drift(file):
        typer.echo(difference, nl=False)
        typer.echo(f"{file} differs from the rules: run `pdq states --write`", err=True)
        raise typer.Exit(1)
