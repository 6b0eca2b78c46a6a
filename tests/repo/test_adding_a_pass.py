"""Adding a pass is what CONTRIBUTING says: done to a copy of the project, word by word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, text

PYTEST = ("-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "tests/text/test_text.py")
BLOCK = re.compile(r"^```(py|mlir|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
USE = """
from mpmd import flags, ir
from mpmd.partition import pipeline
from mpmd.options import PipelineOptions
from mpmd.passes import PASSES, make_pass
from mpmd.tools import docs
assert "mpmd-forget-stages" in PASSES
assert str(make_pass("mpmd-forget-stages", "mesh=m1")) == "mpmd-forget-stages{mesh=m1}"
assert "mpmd-forget-stages" in [step.pass_.name for step in pipeline.export_pipeline(PipelineOptions())]
assert flags.pass_flag(PASSES["mpmd-forget-stages"], "mesh") in docs.flags_page()
assert "Removes the stage of every fragment on one mesh." in docs.passes_page()
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the pass that CONTRIBUTING adds: two new files and a line."""
    root = tmp_path_factory.mktemp("project")
    unwanted = shutil.ignore_patterns("__pycache__", "*.mlir")
    shutil.copytree(ROOT / "mpmd", root / "mpmd", ignore=unwanted)
    for folder in ("preconditions", "repo", "support", "text"):
        shutil.copytree(ROOT / "tests" / folder, root / "tests" / folder, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    section = text(Path("CONTRIBUTING.md")).partition("## How to add a pass")[2].partition("\n## ")[0]
    (_, source), (_, test), (_, step) = BLOCK.findall(section)
    (root / "mpmd" / "passes" / "cleanup" / "forget_stages.py").write_text(source)
    (root / "tests" / "text" / "cleanup").mkdir(exist_ok=True)
    (root / "tests" / "text" / "cleanup" / "forget-stages.mlir").write_text(test)
    add_line(root / "mpmd" / "partition" / "pipeline.py", '        _step("mpmd-fragment-dce"', step)
    return root


def add_line(path: Path, before: str, line: str) -> None:
    """Puts a line in front of the last one that begins with `before`."""
    assert line.count("\n") == 1
    head, found, tail = path.read_text().rpartition(before)
    assert found
    path.write_text(head + line + found + tail)


def run(scratch: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_it_is_in_the_table_in_the_pipeline_and_has_flags_and_docs(scratch: Path) -> None:
    run(scratch, "-c", USE)


@pytest.mark.slow
def test_it_passes_the_tests_that_every_pass_has_to_pass(scratch: Path) -> None:
    """Its text test, that this shows all there is, and in `test_architecture` its docstring and its name."""
    out = run(
        scratch,
        *PYTEST,
        "tests/repo/test_architecture.py",
        "-k",
        "forget-stages or every_pass_is or every_pass_says",
    )
    assert "4 passed" in out


@pytest.mark.slow
def test_without_a_text_test_something_fails(scratch: Path) -> None:
    path = scratch / "tests" / "text" / "cleanup" / "forget-stages.mlir"
    path.rename(path.with_suffix(".gone"))
    try:
        with pytest.raises(AssertionError, match="1 failed"):
            run(scratch, *PYTEST, "-k", "forget-stages")
    finally:
        path.with_suffix(".gone").rename(path)
