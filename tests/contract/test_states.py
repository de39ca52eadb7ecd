"""``docs/states.md`` and the rules say the same."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdq.cli.app import app
from pdq.cli.states import document, drift
from pdq.core.handoff import LIVE, RULES, TRANSITIONS, Author, Event, State

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_committed_page_is_what_the_rules_say() -> None:
    assert drift(PAGE) == "", "run `pdq states --write`"


def test_the_diagram_has_every_transition_and_no_other() -> None:
    diagram = document().split("```mermaid\n")[1].split("```")[0]
    drawn: set[tuple[str, str, str]] = set()
    for start, end, events in re.findall(r"^ +(\w+) --> (\w+): (.+)$", diagram, re.MULTILINE):
        starts = [state.value for state in LIVE] if start == "live" else [start]
        drawn |= {(one, event, end) for one in starts for event in events.split(", ")}
    assert drawn == {(start.value, event.value, end.value) for (start, event), end in TRANSITIONS.items()}


@pytest.mark.parametrize("event", Event)
def test_every_event_has_a_row_with_its_author(event: Event) -> None:
    row = next(line for line in document().splitlines() if line.startswith(f"| `{event}` |") and "→" in line)
    assert f"| `{RULES[event].author}` |" in row


@pytest.mark.parametrize("word", [*State, *Author])
def test_every_state_and_every_author_is_explained(word: State | Author) -> None:
    assert re.search(rf"^\| `{word}` \|.*\w{{3}}.*\|$", document(), re.MULTILINE)


def test_the_command_finds_drift_and_mends_it(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "states.md"
    run = CliRunner().invoke
    assert run(app, ["states", "--file", str(file), "--write"]).exit_code == 0
    assert run(app, ["states", "--file", str(file)]).exit_code == 0
    file.write_text(file.read_text().replace("`claimant`", "`anyone`"))
    found = run(app, ["states", "--file", str(file)])
    assert found.exit_code == 1
    assert "+| `claim`" in found.output
