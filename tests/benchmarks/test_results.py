"""The figures in README and `docs/benchmarks.md` are those of a result file, and can be measured again."""

from __future__ import annotations

import re

from benchmarks import report, suite
from tests.repo.tree import ROOT


def readme_rows():
    text = (ROOT / "README.md").read_text()
    return [
        line for line in text.split(report.BEGIN)[1].split(report.END)[0].splitlines() if "`python" in line
    ]


def test_the_pages_say_what_the_newest_result_file_says():
    assert report.stale() == [], "run python benchmarks/report.py"


def test_a_changed_figure_is_noticed():
    newest = report.ResultFigures(report.result_files()[-1])
    text = (ROOT / "README.md").read_text()
    row = readme_rows()[0]
    changed = text.replace(row, re.sub(r"\d", "7", row, count=1).replace(" s,", " s and a bit,", 1))
    assert changed != text and report.readme(changed, newest) == text


def test_each_row_has_a_command_that_exists():
    commands = [re.findall(r"`(python [^`]*)`", row)[-1] for row in readme_rows()]
    assert len(commands) == len(report.ROWS)
    assert all((ROOT / command.split()[1]).exists() for command in commands)
    assert {entry.name for entry in suite.SUITE} == {row.benchmark for row in report.ROWS}
