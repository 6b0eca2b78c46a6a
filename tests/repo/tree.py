"""What git tracks, for the tests that read the project itself."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def tracked(*suffixes: str) -> tuple[Path, ...]:
    """Tracked files that are there, relative to the root, with one of the suffixes if any are given."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    return tuple(p for p in paths if (ROOT / p).is_file() and (not suffixes or p.suffix in suffixes))


@functools.cache
def text(path: Path) -> str:
    """The contents of a tracked file."""
    return (ROOT / path).read_text()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a tracked Python file.

    All files together have two million, kept for the next test: garbage collections do not traverse them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return tuple(ast.walk(ast.parse(text(path), str(path))))
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def module_name(path: Path) -> str:
    """`mpmd/ir/ops.py` -> `mpmd.ir.ops`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and name of every module that a file imports, at its top or inside of functions."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found
