"""The pages of the site: each is in the table of contents; a decision is a question, an answer, a table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import mpmd
from mpmd.tools import hlo_opt, opt
from tests.repo.tree import ROOT, text, tracked

DOCS = Path("docs")
DECISIONS = [path for path in tracked(".md") if path.parent == DOCS / "decisions" and path.stem != "index"]
MAX_LINES, MAX_TABLES = 60, 1


def test_every_page_is_in_the_table_of_contents():
    trees = re.findall(r"```{toctree}\n(.*?)```", text(DOCS / "index.md"), re.DOTALL)
    entries = {line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")}
    pages = {path.relative_to(DOCS).with_suffix("") for path in tracked(".md") if path.parts[0] == "docs"}
    assert entries == {str(page) for page in pages if page.parts[0] != "decisions"} - {"index"} | {
        "decisions/index"
    }


def test_every_public_name_is_in_the_reference():
    entry = re.compile(r"^\.\. auto\w+:: (?:mpmd\.(?:api\.)?)?(\w+)$", re.MULTILINE)
    listed = set(entry.findall(text(DOCS / "api.md")))
    assert set(mpmd.__all__) - listed == {"__version__", "PeerError"}


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_a_question_an_answer_and_a_table(page):
    lines = text(page).splitlines()
    assert len(lines) <= MAX_LINES
    assert any(line.startswith("**Question.**") for line in lines)
    assert any(line.startswith("**Decision") for line in lines)
    assert sum(line.startswith("|---") for line in lines) <= MAX_TABLES


def test_the_limit_is_of_all_decisions():
    assert len(DECISIONS) == len(list((ROOT / "docs" / "decisions").glob("*.md"))) - 1 > 20


@pytest.mark.parametrize(
    ("tool", "file", "name", "shown"),
    [
        (opt, "cleanup/fragment-dce.mlir", "mpmd-fragment-dce", '-    %0 = mpmd.fragment<mesh="m1"'),
        (hlo_opt, "hlo/simplify/call-inliner.hlo", "hlo-call-inliner", "call("),
        (opt, "export/validate-no-backward-deps.mlir", "mpmd-validate-no-backward-deps", "no program"),
    ],
    ids=["mlir", "hlo", "verifier"],
)
def test_a_pass_is_shown_before_and_after(tool, file, name, shown):
    spec = importlib.util.spec_from_file_location("before_after", ROOT / DOCS / "before_after.py")
    before_after = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(before_after)
    path = ROOT / "tests" / "text" / file
    entry = before_after.entry(tool.main, [path.read_text()], name, path.suffix)
    assert shown in entry
    assert ("```diff" in entry) == (shown != "no program")
