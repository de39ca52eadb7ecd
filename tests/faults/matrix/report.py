"""The table of the fault matrix at the end of a run: whole and once, also where several processes share the cells. Each
test leaves the row of its cell in its report; whoever prints the reports puts the rows together."""

from typing import Final

import pytest

ROW: Final = "row of the fault matrix"
_HEAD: Final = ("part", "fault", "step", "requests ended", "attempts", "free after (s)", "cell (s)", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [it for kind in terminalreporter.stats.values() for it in kind if isinstance(it, pytest.TestReport)]
    called = [it.user_properties for it in reports if it.when == "call"]
    if rows := sorted(str(row) for properties in called for name, row in properties if name == ROW):
        for line in ("", f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", *rows):
            terminalreporter.write_line(line)
