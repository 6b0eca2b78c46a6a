"""Workflows run targets of the Makefile, with pinned actions and few rights; a release is consistent."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, text
from tests.support.release import disagreements

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", text(Path("Makefile")), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_with_pinned_actions(path):
    workflow = path.read_text()
    used = re.findall(r"uses: (.*)", workflow)
    assert used and [use for use in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", use)] == []
    targets = set(re.findall(r"run: make ([a-z-]+)", workflow))
    for listed in re.findall(r"^ +target: \[(.*)\]", workflow, re.MULTILINE):
        targets |= set(listed.split(", "))
    assert targets and targets <= TARGETS
    assert "\npermissions: {contents: read}\n" in workflow
    jobs = re.findall(r"^  [a-z-]+:$", workflow.partition("\njobs:")[2], re.MULTILINE)
    assert workflow.count("timeout-minutes:") == len(jobs)


def test_pre_commit_runs_what_lint_runs():
    hooks = re.findall(r"entry: ([^,}]*)", text(Path(".pre-commit-config.yaml")))
    assert hooks == ["make --no-print-directory lint"]


def test_every_file_has_the_licence_of_the_package():
    """REUSE.toml says it once; no header repeats it."""
    (everything,) = tomllib.loads(text(Path("REUSE.toml")))["annotations"]
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]
    assert everything["path"] == "**" and everything["SPDX-License-Identifier"] == project["license"]
    assert (ROOT / "LICENSES" / f"{project['license']}.txt").read_text() == text(Path("LICENSE"))


def test_a_tag_is_published_only_if_all_files_agree():
    citation = "\nversion: 1.2.3\n"
    assert disagreements("v1.2.3", "1.2.3", "# C\n\n## 1.2.3 (2026-01-31)\n", citation) == []
    assert len(disagreements("v1.2.3", "1.2.3.dev0", "## 1.2.3 (unreleased)\n", citation)) == 2
    assert len(disagreements("v1.2.4", "1.2.3", "## 1.2.3 (2026-01-31)\n", citation)) == 3
    assert len(disagreements("", "1.2.3", "", citation)) == 3
