"""Positions of ops in their block, and moves that may undo each other."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from mpmd import ir
from mpmd.passes.constants import attributes_of


def block_users(x: ir.Op) -> list[ir.Op]:
    """The ops beside `x` that use its results, in themselves or in their regions; newest use first."""
    return [op_around(user, x.operation.block) for user in ir.users(x)]


def op_around(user: ir.Op, block: ir.Block) -> ir.Op:
    """The op of a block that is an op, or contains it in its regions."""
    operation = user.operation
    while operation.block != block:
        operation = operation.parent
    return operation.opview


def in_block_order(some: Iterable[Any]) -> list[Any]:
    """Ops of one block, first one first."""
    return sorted(some, key=functools.cmp_to_key(lambda a, b: -1 if ir.comes_before(a, b) else 1))


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
