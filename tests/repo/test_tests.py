"""Tests are where a reader looks for them, and stand on their own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.repo.tree import ROOT, imports, nodes, text, tracked

TESTS = [path for path in tracked(".py") if path.parts[0] == "tests"]
UNIT = [path for path in TESTS if path.parts[1] == "unit" and path.name.startswith("test_")]
SHARED = (
    "tests.support",
    "tests.preconditions",
    "tests.repo.tree",
    "tests.text.outcomes",
    "tests.benchmarks.gpu.stand_in",
)
EVERYWHERE = ("mpmd.errors", "mpmd.options", "mpmd.passes.make_pass", "mpmd.compile.passes.make_pass")
WHOLE = ("tests.support.native_", "tests.support.hlo_meaning")  # of whole programs, which name no room


def room(path: Path) -> str:
    """`tests/unit/compile/hlo/test_shape.py` -> `mpmd.compile.hlo`."""
    return ".".join(("mpmd", *path.parent.parts[2:]))


def named_modules(path: Path) -> set[str]:
    """Modules of mpmd that a test imports, itself or in the program of another process that it runs."""
    found = {name for _, name in imports(path)}
    return {n for n in (*found, *re.findall(r"\bmpmd(?:\.\w+)+", text(path))) if n.startswith("mpmd")}


def test_folders_of_unit_tests_are_folders_of_the_library():
    assert [str(p) for p in UNIT if not (ROOT / room(p).replace(".", "/")).is_dir()] == []


def test_a_unit_test_is_in_the_folder_of_what_it_tests():
    """It names a module of its folder, or only what users call."""
    wrong = {}
    for path in UNIT:
        names = named_modules(path)
        own = [n for n in names if n == room(path) or n.startswith(room(path) + ".")]
        others = [n for n in names if n.count(".") > 1 and not n.startswith(EVERYWHERE)]
        whole = room(path) == "mpmd.api" or any(name.startswith(WHOLE) for _, name in imports(path))
        if others and not own and not whole:
            wrong[str(path)] = sorted(others)
    assert wrong == {}


def test_no_test_imports_another():
    programs = re.compile(r"^(?:from|import) (tests\.[\w.]+)", re.MULTILINE)
    found = [
        f"{path} imports {name}"
        for path in TESTS
        for name in {*(n for _, n in imports(path)), *programs.findall(text(path))}
        if name.startswith("tests.") and not name.startswith(SHARED)
    ]
    assert found == [], "what tests share is in tests/support"


def test_tests_and_benchmarks_share_workloads_alone():
    refused = {"benchmarks": ("tests",), "examples": ("tests", "benchmarks"), "tests": ("benchmarks",)}
    found = [
        f"{path} imports {name}"
        for path in tracked(".py")
        if path.parts[:2] != ("tests", "benchmarks")
        for _, name in imports(path)
        if name.split(".")[0] in refused.get(path.parts[0], ())
    ]
    assert found == [], "what both need is in examples/workloads/"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


READ = {
    ("tests/conftest.py", "_EFFORT"): "LLVM optimizes less in tests than for users",
    ("tests/unit/api/test_checkpoint_promises.py", "_read"): "a file system that answers with other bytes",
}
"""Private names of the library that a file reads, and why nothing public is enough."""


def private_names(path: Path) -> set[str]:
    """Private names that a file of the library defines, or sets on its objects."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return {name for name in found if private(name)}


def test_no_test_reads_private_state():
    """Names that the file itself defines are the test's own."""
    known = set().union(*(private_names(path) for path in tracked(".py") if path.parts[0] == "mpmd"))
    known -= {"_replace"}  # of named tuples
    found = set()
    for path in TESTS:
        refused = known - private_names(path)
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in refused:
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner not in ("self", "cls", "os", "sys", "atexit"):
                    found.add((str(path), node.attr))
    assert sorted(found - READ.keys()) == [], "observe it through what is public"
    assert sorted(READ.keys() - found) == [], "nothing reads it"


def test_no_test_calls_a_private_function():
    found = []
    for path in TESTS:
        aliases = {a.asname or a.name for n in nodes(path) if isinstance(n, ast.Import) for a in n.names}
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpmd"):
                found += [f"{path}:{node.lineno} {a.name}" for a in node.names if private(a.name)]
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and private(called.attr):
                owner = called.value.id if isinstance(called.value, ast.Name) else ""
                if owner not in {"self", "cls", *aliases} and called.attr != "_replace":
                    found.append(f"{path}:{node.lineno} {ast.unparse(called)}")
    assert found == [], "test the public function that calls it"
