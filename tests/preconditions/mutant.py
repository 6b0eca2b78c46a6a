"""A pytest plugin that imports one module of `mpmd` without one of its preconditions.

MPMD_MUTANT=ROOM:NUMBER python -m pytest -p tests.preconditions.mutant TEST
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType

from tests.preconditions import ROOT, Precondition, rows

_CHOSEN = "MPMD_MUTANT"
_FAILED = 1  # pytest: tests were collected, and some failed
TIMEOUT_S = 240


class _MutantFinder(MetaPathFinder):
    """Finds one module, whose code is compiled from the mutated text and never cached."""

    def __init__(self, row: Precondition) -> None:
        self.row = row
        module = row.file.removesuffix(".py").replace("/", ".")
        self.module = module.removesuffix(".__init__")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _MutantLoader(name, spec.origin, self.row)
        return spec


class _MutantLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, row: Precondition) -> None:
        super().__init__(name, path)
        self.row = row

    def get_code(self, fullname: str) -> CodeType:
        source = self.row.mutated(self.get_data(self.path).decode())
        code: CodeType = self.source_to_code(source.encode(), self.path)
        return code


def survives(room: str, number: int) -> str:
    """Why the mutant of a row is not noticed: what its test printed; "" if the test fails."""
    row = rows(room)[number]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "tests.preconditions.mutant",
        "-p",
        "no:xdist",
    ]
    seeds = "MPMD_TEST_SEED"  # of directed programs: a mutant is known to be noticed by the usual ones
    environment = {k: v for k, v in os.environ.items() if k != seeds} | {_CHOSEN: f"{room}:{number}"}
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", row.test], cwd=ROOT, env=environment, capture_output=True,
            text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""  # it hangs: that is noticed
    return (
        ""
        if done.returncode == _FAILED or done.returncode < 0  # it crashes: that is noticed, too
        else f"{row.test} without {row.holds!r}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


if _CHOSEN in os.environ:
    _room, _, _number = os.environ[_CHOSEN].rpartition(":")
    _finder = _MutantFinder(rows(_room)[int(_number)])
    if _finder.module in sys.modules:
        raise ImportError(f"{_finder.module} was imported before its mutant")
    sys.meta_path.insert(0, _finder)
