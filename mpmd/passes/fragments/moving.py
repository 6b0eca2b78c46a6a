"""Moves that may undo each other, or exchange equal ops."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from mpmd import ir
from mpmd.passes.constants import attributes_of


@contextlib.contextmanager
def moving(f: ir.Func) -> Iterator[None]:
    """Around moves of a function's ops: they do not count as edits if the text is unchanged afterwards."""
    since, before = ir.edits(), _reading(f)
    yield
    if ir.edits() != since and _reading(f) == before:
        ir.forget_edits(since)


def _reading(f: ir.Func) -> list[Any]:
    """Equal for one function before and after moves that change nothing in its text."""
    number: dict[ir.Value, int] = {arg: i for i, arg in enumerate(f.args)}
    found: list[Any] = []
    for op in [*ir.ops(f), f.terminator]:
        has_body = len(op.operation.regions) > 0
        what = op if has_body else (op.operation.name, *(r.type for r in op.results), *attributes_of(op))
        found.append((what, [number.get(v) for v in (ir.read_by(op) if has_body else op.operands)]))
        number.update(zip(op.results, itertools.count(len(number))))
    return found
