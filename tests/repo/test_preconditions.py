"""The table of preconditions is true: each stands in the code, and its test fails without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.preconditions import ROOT, Precondition, rooms, rows
from tests.preconditions.page import PAGE, page
from tests.repo.tree import nodes

ROWS = [(room, number) for room in rooms() for number in range(len(rows(room)))]


def test_every_precondition_stands_in_the_code():
    problems = []
    for room, number in ROWS:
        row = rows(room)[number]
        try:
            row.mutated((ROOT / row.file).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            problems.append(f"{room} {number}: {error}")
    assert problems == []


def test_every_precondition_has_a_test():
    missing = []
    for room, number in ROWS:
        row = rows(room)[number]
        file, _, name = row.test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        if not (ROOT / file).is_file() or function not in _functions(file):
            missing.append(f"{room} {number}: {row.test}")
    assert missing == []


def _functions(file: str) -> set[str]:
    return {node.name for node in nodes(Path(file)) if hasattr(node, "name")}


def test_the_page_is_current():
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m tests.preconditions"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("room", rooms())
def test_each_mutant_is_noticed(room):
    command = [sys.executable, "-m", "tests.preconditions", room]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


_SAME = """
import dataclasses
from tests.preconditions import forks
row = forks.rows("rewrites_others")[ROW]
forks.rows = lambda room: (row, dataclasses.replace(row, dropped=row.code + row.code))
forks.survives = lambda room, number: f"{number} survives"
assert forks.unnoticed("any", [0, 1, 0], print) == ["1 survives"]
"""


@pytest.mark.slow
def test_a_mutant_that_does_the_same_survives():
    (row,) = (i for i, r in enumerate(rows("rewrites_others")) if r.code == "e.is_root or ")
    script = _SAME.replace("ROW", str(row))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mutant_is_the_source_without_the_condition():
    row = Precondition("a.py:C.f", "x is positive", "if x > 0:", "if True:", "tests/a.py::test_a")
    source = "if x > 0:\n    pass\nclass C:\n    def f(self, x):\n        if x > 0:\n            return x\n"
    assert row.mutated(source) == source[:21] + source[21:].replace("x > 0", "True")
    for text, problem in (
        (source.replace("> 0", "> 1"), "0 times"),
        (source + "        if x > 0: pass", "2 times"),
    ):
        with pytest.raises(ValueError, match=problem):
            row.mutated(text)
