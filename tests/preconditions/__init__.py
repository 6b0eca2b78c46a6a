"""What each rewrite needs to be right, where it checks that, and the test that fails if it does not.

    python -m tests.preconditions            writes docs/preconditions.md
    python -m tests.preconditions ROOM [N]   runs the tests of the mutants of one room, or of its row N

Each module of this folder has the rows of one room of `mpmd/`.  A row is a mutant, too: `forks.py` drops the
precondition from functions, `mutant.py` from the source while the module is imported.  The test of the row
must then fail.

Source: Offutt and Untch, Mutation 2000: uniting the orthogonal.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_TOOLS = ("forks", "mutant", "page", "__main__")


@dataclass(frozen=True)
class Precondition:
    """One condition of one rewrite.

    Attributes:
        rewrite: `FILE:QUALIFIED_NAME` of the function that checks, or `FILE` where it is data of the module.
        holds: what must hold, in one sentence.
        code: text of the check, which occurs in the function once.
        dropped: text in its place in the mutant.
        test: node id of a fast test that fails with the mutant.
        exact: `exact`, or `within rounding: ...` with the reason why users of JAX accept it.
    """

    rewrite: str
    holds: str
    code: str
    dropped: str
    test: str
    exact: str = "exact"

    @property
    def file(self) -> str:
        """Path of the source file from the root of the project."""
        return self.rewrite.partition(":")[0]

    @property
    def name(self) -> str:
        """Qualified name in the file; "" for the whole file."""
        return self.rewrite.partition(":")[2]

    def mutated(self, source: str) -> str:
        """The text of the file without the precondition.

        Raises:
            ValueError: the code does not occur exactly once, or the mutant is not Python.
        """
        start, end = span(source, self.name)
        body = source[start:end]
        if body.count(self.code) != 1:
            raise ValueError(f"{self.rewrite} has the code {body.count(self.code)} times: {self.code!r}")
        mutant = body.replace(self.code, self.dropped)
        try:
            ast.parse(f"if True:\n{mutant}" if mutant[:1].isspace() else mutant)
        except SyntaxError as error:
            raise ValueError(f"{self.rewrite} is not Python with {self.dropped!r}: {error}") from None
        return source[:start] + mutant + source[end:]


@dataclass(frozen=True)
class RowsOf:
    """Makes the rows of the rewrites in a folder.

    Attributes:
        folder: where the files are.
        test: the test of which each row names a case; "" if each names a test of its own.
    """

    folder: str
    test: str = ""

    def __call__(
        self, place: str, holds: str, code: str, dropped: str, shown: str, exact: str = "exact"
    ) -> Precondition:
        """The row of `FILE:QUALIFIED_NAME` in the folder; `shown` is the case, or the test."""
        test = f"{self.test}[{shown}]" if self.test else shown
        return Precondition(f"{self.folder}/{place}", holds, code, dropped, test, exact)


def span(source: str, name: str) -> tuple[int, int]:
    """Where a function or class stands in a file: offsets of its first character and of the end of its lines.

    Raises:
        ValueError: there is no such name.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    node: ast.AST = _parsed(source)
    for part in filter(None, name.split(".")):
        for inner in ast.walk(node):
            if inner is not node and getattr(inner, "name", None) == part:
                node = inner
                break
        else:
            raise ValueError(f"no {name!r}")
    if isinstance(node, ast.Module):
        return 0, len(source)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef), name
    return starts[node.lineno - 1], starts[node.end_lineno or node.lineno]


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> ast.AST:
    """The syntax of a file: rows come file by file."""
    return ast.parse(source)


def rooms() -> list[str]:
    """Modules with rows, in alphabetical order."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _TOOLS)


def rows(room: str) -> tuple[Precondition, ...]:
    """The rows of one room."""
    found: tuple[Precondition, ...] = importlib.import_module(f"{__name__}.{room}").ROWS
    return found


def always(room: str) -> Mapping[str, str]:
    """Rewrites of one room that hold for every program they match, and why."""
    found: Mapping[str, str] = importlib.import_module(f"{__name__}.{room}").ALWAYS
    return found
