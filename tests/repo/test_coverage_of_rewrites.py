"""Every pass, rule and planner says what it requires, or why it requires nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.passes import PASSES
from tests.preconditions import always, rooms, rows
from tests.repo.tree import nodes, tracked

_TABLES = {"RULES", "_RULES", "READS", "LOCAL", "_LOCAL"}
_FOLDERS = ("mpmd/compile/passes/", "mpmd/compile/kernels/planning/", "mpmd/compile/lowering/spmd/")
_ADVICE = "give each a row in tests/preconditions, or an entry in ALWAYS with the reason"


def stated() -> set[str]:
    """Rewrites with a row or a reason."""
    found = {row.rewrite for room in rooms() for row in rows(room)}
    return found | {rewrite for room in rooms() for rewrite in always(room)}


def file_of(kind: type) -> str:
    """`mpmd.passes.calls.inline` -> `mpmd/passes/calls/inline.py`."""
    path = Path(kind.__module__.replace(".", "/"))
    return str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


@pytest.mark.parametrize("passes", (HLO_PASSES, PASSES), ids=("hlo", "mpmd"))
def test_every_pass(passes):
    files = {rewrite.partition(":")[0] for rewrite in stated()}
    assert [name for name, kind in passes.items() if file_of(kind) not in files] == [], _ADVICE


def test_every_planner_and_every_file_that_makes_programs_local():
    files = {rewrite.partition(":")[0] for rewrite in stated()}
    wanted = [str(p) for p in tracked(".py") if str(p).startswith(_FOLDERS[1:]) and p.name != "__init__.py"]
    assert [path for path in wanted if path not in files] == [], _ADVICE


def test_every_rule():
    """One of a table, or a function of its file that it calls."""
    known = stated()
    silent = []
    for path in tracked(".py"):
        if not str(path).startswith(_FOLDERS):
            continue
        functions = {n.name: n for n in nodes(path) if isinstance(n, ast.FunctionDef)}
        for rule in dict.fromkeys(name for table in _tables(path) for name in _names(table)):
            if rule in functions and not any(f"{path}:{f}" in known for f in _reached(rule, functions)):
                silent.append(f"{path}:{rule}")
    assert silent == [], _ADVICE


def _tables(path: Path) -> Iterator[ast.AST]:
    """What a file writes into tables of rules."""
    for node in nodes(path):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and any(_is_table(target) for target in targets):
                yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "update" and _is_table(node.func.value):
                yield node


def _is_table(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(node, ast.Name) and node.id in _TABLES


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _reached(name: str, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """A function with those of its file that it names, at any depth."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += _names(functions[current]) & functions.keys()
    return found


def test_a_rule_without_a_word_is_found():
    module = ast.parse(
        "RULES = {'add': (rule,)}\ndef rule(site):\n    return helper(site)\ndef helper(s): pass"
    )
    functions = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
    assert _reached("rule", functions) == {"rule", "helper"}
    assert _names(module.body[0].value) == {"rule"}  # type: ignore[attr-defined]
