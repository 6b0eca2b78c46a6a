"""Every pass, rule and planner says what it requires, or why it requires nothing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpmd.compile.passes import PASSES as HLO_PASSES
from mpmd.passes import PASSES
from tests.preconditions import always, rooms, rows
from tests.repo.tree import ROOT, nodes, tracked
from tests.support.definitions import used_by

_TABLES = {"RULES", "_RULES", "READS", "LOCAL", "_LOCAL"}
_FOLDERS = ("mpmd/compile/passes/", "mpmd/compile/kernels/planner/", "mpmd/compile/lowering/spmd/")
_ADVICE = "give each a row in tests/preconditions, or an entry in ALWAYS with the reason"


def stated() -> set[str]:
    """Rewrites with a row or a reason."""
    found = {row.rewrite for room in rooms() for row in rows(room)}
    return found | {rewrite for room in rooms() for rewrite in always(room)}


def is_stated(kind: type, places: set[str]) -> bool:
    """Whether a pass, or a function of its module that it uses, is one of some places."""
    module = sys.modules[kind.__module__]
    file = Path(module.__file__).relative_to(ROOT)
    return not {f"{file}:{name}" for name in used_by(module, kind.__name__)}.isdisjoint(places)


@pytest.mark.parametrize("passes", (HLO_PASSES, PASSES), ids=("hlo", "mpmd"))
def test_every_pass(passes):
    places = {re.sub(r"(:\w+).*", r"\1", place) for place in stated()}  # of the class, not of its method
    assert [name for name, kind in passes.items() if not is_stated(kind, places)] == [], _ADVICE


def test_every_planner_and_every_file_that_makes_programs_local():
    files = {rewrite.partition(":")[0] for rewrite in stated()}
    wanted = [str(p) for p in tracked(".py") if str(p).startswith(_FOLDERS[1:]) and p.name != "__init__.py"]
    assert [path for path in wanted if path not in files] == [], _ADVICE


def test_every_rule():
    """One of a table, or a function of its file that it calls."""
    known = stated()
    silent = []
    for path in tracked(".py"):
        if str(path).startswith(_FOLDERS):
            defined = _defined(nodes(path)[0])
            for rule in _rules(nodes(path), defined):
                if not any(f"{path}:{name}" in known for name in _reached({rule}, defined)):
                    silent.append(f"{path}:{rule}")
    assert silent == [], _ADVICE


def _defined(module: ast.AST) -> dict[str, ast.AST]:
    """The functions and values of a module."""
    assert isinstance(module, ast.Module)
    found: dict[str, ast.AST] = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


def _rules(found: Sequence[ast.AST], defined: dict[str, ast.AST]) -> list[str]:
    """The functions in tables of rules, also in tables of which these are made."""
    tables = [defined[name] for name in _TABLES & defined.keys()]
    for node in found:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            tables += [node] if _names(node.func.value) & _TABLES else []
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            tables += [node.value] if _names(node.targets[0]) & _TABLES else []
    waiting, seen = set().union(*map(_names, tables)), set()
    while waiting:
        name = waiting.pop()
        if name in defined and name not in seen:
            seen.add(name)
            if not isinstance(defined[name], ast.FunctionDef):
                waiting |= _names(defined[name])
    return sorted(name for name in seen if isinstance(defined[name], ast.FunctionDef))


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _reached(names: set[str], defined: dict[str, ast.AST]) -> set[str]:
    """Functions and values with those that they name, at any depth."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        if name in defined and name not in found:
            found.add(name)
            waiting |= _names(defined[name])
    return found


def test_a_rule_without_a_word_is_found():
    text = "_MORE = {'sub': (other,)}\nRULES = {'add': (rule,), **_MORE}\nRULES.update(mul=last)\n"
    text += "def rule(site):\n    return helper(site)\n"
    text += "".join(f"def {name}(site): pass\n" for name in ("helper", "other", "last", "stranger"))
    module = ast.parse(text)
    defined = _defined(module)
    assert _rules(list(ast.walk(module)), defined) == ["last", "other", "rule"]
    assert _reached({"rule"}, defined) == {"rule", "helper"}
