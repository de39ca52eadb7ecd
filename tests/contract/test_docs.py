"""The documents and the commands say the same: nothing undocumented, nothing documented that does not exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from pdq.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "docs" / "states.md"]
PROGRAM = typer.main.get_command(app)
COMMANDS: dict[str, click.Command] = dict(PROGRAM.commands)  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _code(document: Path) -> Iterator[str]:
    """Every line of a code block, and every inline code span."""
    text = document.read_text()
    for block in re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def _used(document: Path, program: str) -> Iterator[tuple[str, str]]:
    """(first word after ``program``, the rest of the line), wherever the code shows ``program`` being run."""
    for line in _code(document):
        if found := re.match(rf"(?:[$] )?(?:\.venv/bin/)?{program} ([a-z]+)([^|#]*)", line):
            yield found[1], found[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_every_parameter_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    without = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert not without


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert re.search(rf"`pdq {name}\b|^(?:[$] )?(?:\.venv/bin/)?pdq {name}\b", DOCUMENTS[0].read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_option_in_the_documents_exists(document: Path) -> None:
    for name, rest in _used(document, "pdq"):
        assert name in COMMANDS, f"pdq {name}"
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts + parameter.secondary_opts}
        unknown = set(re.findall(r"(?<= )--[a-z-]+", rest)) - known - {"--help"}
        assert not unknown, f"pdq {name} {' '.join(unknown)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_in_the_documents_exists(document: Path) -> None:
    assert {target for target, _ in _used(document, "make")} <= TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_in_the_documents_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]
