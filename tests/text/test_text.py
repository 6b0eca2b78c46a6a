"""Runs the `RUN:` lines of every `.mlir` and `.hlo` file beside this one, as LLVM's lit does.

    // RUN: mpmd-opt %s -mpmd-fragment-dce | FileCheck %s
    // RUN: mpmd-hlo-opt %s -hlo-dce | FileCheck %s

Known are `not` in front of the tool, `2>&1`, and lines that end with a backslash.  A line without
FileCheck passes if the tool exits with 0, which for `-verify-diagnostics` says that all is as expected.
FileCheck is LLVM's if one is on PATH, else that of PyPI.  Every pass is also held to what it says about
having changed something.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.passes import PASSES
from mpmd.tools import hlo_opt, opt
from tests.text.outcomes import files_of, outcomes, run_lines, wanted

HERE = Path(__file__).parent
TOOLS = {"mpmd-opt": opt.main, "mpmd-hlo-opt": hlo_opt.main}


def file_check() -> str:
    """The program that checks."""
    for name in ("FileCheck", *(f"FileCheck-{n}" for n in range(20, 13, -1))):
        if found := shutil.which(name):
            return found
    beside = Path(sys.executable).parent / "filecheck"
    assert beside.exists(), "no FileCheck: install LLVM's, or the package `filecheck`"
    return str(beside)


CASES = [
    pytest.param(path, command, id=f"{path.relative_to(HERE).with_suffix('')}-{number}")
    for path in sorted((*HERE.rglob("*.mlir"), *HERE.rglob("*.hlo")))
    for number, command in enumerate(run_lines(path.read_text()))
]


@pytest.mark.parametrize(("path", "command"), CASES)
def test_file(path: Path, command: str) -> None:
    tool, _, check = command.partition("|")
    words = [word.replace("%s", str(path)) for word in shlex.split(tool.replace("2>&1", ""))]
    wanted = 0
    if words[0] == "not":
        wanted, words = 1, words[1:]
    out = io.StringIO()
    err = out if "2>&1" in tool else io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = TOOLS[words[0]](["-check-changed", *words[1:]])
    assert code == wanted, f"exit {code}\n{err.getvalue()}"
    if check.strip():
        options = [word.replace("%s", str(path)) for word in shlex.split(check)[1:]]
        done = subprocess.run(
            [file_check(), *options], input=out.getvalue(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_shows_what_it_does_what_it_leaves_and_its_errors(name: str) -> None:
    files = files_of(name)
    assert any(f"-{name}" in command for path in files for command in run_lines(path.read_text()))
    assert wanted(name) - outcomes(name) == set(), f"not shown in {[str(path) for path in files]}"


@pytest.mark.parametrize("name", sorted(HLO_PASSES))
def test_every_hlo_pass_has_a_file(name: str) -> None:
    found = list(HERE.rglob(f"{name.removeprefix('hlo-')}.hlo"))
    assert found, f"no text test for {name}"
    assert any(f"-{name}" in command for command in run_lines(found[0].read_text()))
