"""Questions about ops and values."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.ir import OpView as Op
from jax.extend.mlir.ir import Value

from mpmd.errors import IRError
from mpmd.ir.context import context, keep
from mpmd.ir.ops import Fragment, Func

_count = threading.local()


def note_edit() -> None:
    """Called by every function of `mpmd.ir` that changes a program."""
    _count.edits = edits() + 1


def edits() -> int:
    """Edits made so far by this thread; compare two readings."""
    return getattr(_count, "edits", 0)


def forget_edits(since: int) -> None:
    """Discards the edits since `edits()` returned `since`: they have undone each other."""
    _count.edits = since


def parse(text: str | bytes) -> ir.Module:
    """A module from MLIR text or bytecode.

    Raises:
        IRError: the text is not a valid module; says where and why.
    """
    if isinstance(text, str):
        _require_known_callees(text)
    try:
        with context(), ir.Location.unknown():
            return keep(ir.Module.parse(text, context()))
    except ir.MLIRError as e:
        raise IRError(f"cannot read the program: {e}") from e


def _require_known_callees(text: str) -> None:
    """The dialect's verifier crashes the process on a call of an unknown function."""
    if "mpmd.call" not in text:
        return
    text = re.sub(r"(?m)^\s*//.*$", "", text)
    name = r'@("(?:[^"\\]|\\.)*"|[\w.$-]+)'
    known = set(re.findall(r"func\.func(?:\s+(?:public|private|nested))?\s+" + name, text))
    called = re.findall(r"mpmd\.call\s+" + name, text)
    called += re.findall(r'"mpmd\.call"\(.*\bcallee = ' + name, text)
    for callee in dict.fromkeys(c for c in called if c not in known):
        raise IRError(f"cannot read the program: it calls @{callee}, which it does not define")


def name_of(location: ir.Location) -> str | None:
    """The name in a location, such as the path of an argument."""
    while isinstance(location, ir.CallSiteLoc):
        location = location.callee
    return str(location.name_str) if isinstance(location, ir.NameLoc) else None


CONSTANTS = ("stablehlo.constant", "sdy.constant")


def funcs(module: ir.Module) -> list[Func]:
    """The functions of a module, in order."""
    return [op for op in module.body.operations if isinstance(op, Func)]


def symbol_table(module: ir.Module) -> dict[str, Func]:
    """Function name -> function."""
    return {f.symbol: f for f in funcs(module)}


def module_of(op: Op) -> Op:
    """The `builtin.module` op around an op."""
    operation = op.operation
    while operation.name != "builtin.module":
        operation = operation.parent
    return operation.opview


def ops(where: Any, kind: type | tuple[type, ...] = Op) -> list[Any]:
    """The ops of a block, or of the body of an op, but for its terminator: a list, safe to erase from.

    A function that is only declared has none.
    """
    if isinstance(where, Func) and where.is_external:
        return []
    block = where if isinstance(where, ir.Block) else where.body
    inside = list(block.operations)[:-1]
    return inside if kind is Op else [op for op in inside if isinstance(op, kind)]


def walk(where: Any, kind: Any = Op) -> list[Any]:
    """All ops inside an op, at any depth, the op itself included; outer before inner."""
    collected: list[Any] = []
    if kind is Op:
        _collect([where.operation.opview], collected)
        return collected
    names = {k.OPERATION_NAME for k in (kind if isinstance(kind, tuple) else (kind,))}

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in names:  # a view of each op takes as long as the traversal
            collected.append(operation.opview)
        return ir.WalkResult.ADVANCE

    where.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return collected


def _collect(some: Iterable[Op], collected: list[Any]) -> None:
    for op in some:
        collected.append(op)
        for region in op.operation.regions:
            for block in region:
                _collect(block.operations, collected)


def fragments(f: Func) -> list[Fragment]:
    """The fragments of a function, in order."""
    return ops(f, Fragment)


def users(x: Value | Op) -> list[Op]:
    """The ops that use a value, or any result of an op; once per use, newest use first."""
    if isinstance(x, Value):
        return [use.owner for use in x.uses]
    return [use.owner for v in x.operation.results for use in v.uses]


def uses(v: Value) -> list[tuple[Op, int]]:
    """Where a value is used: op, and index among its operands; newest use first."""
    return [(use.owner, use.operand_number) for use in v.uses]


def comes_before(a: Op, b: Op) -> bool:
    """Whether `a` comes before `b` in the block of both.  Amortised constant time, moves included."""
    return bool(a.operation.is_before_in_block(b.operation))


def is_unused(x: Value | Op) -> bool:
    """Whether nothing uses a value, or any result of an op."""
    if isinstance(x, Value):
        return next(x.uses, None) is None
    for v in x.operation.results:  # noqa: SIM110  (asked of every op of a program; this is twice as fast)
        if next(v.uses, None) is not None:
            return False
    return True


def producer(v: Value) -> Op | None:
    """The op that defines `v`; None for an argument of a block."""
    return None if isinstance(v, ir.BlockArgument) else v.owner.opview


def result_index(v: Value) -> int:
    """The position of an op's result among the op's results."""
    return int(ir.OpResult(v).result_number)


def arg_index(v: Value) -> int:
    """The position of a block argument among the block's arguments."""
    return int(ir.BlockArgument(v).arg_number)


def is_constant(op: Op | None) -> bool:
    """Whether it is a constant op."""
    return op is not None and op.operation.name in CONSTANTS


def read_by(op: Op) -> list[Value]:
    """The values that an op uses: its operands, then the captures of its regions; each value once."""
    if isinstance(op, Fragment) or not len(op.operation.regions):
        return list(dict.fromkeys(op.operands))
    used, inside = dict.fromkeys(op.operands), set()

    def visit(inner: ir.Operation) -> ir.WalkResult:
        for region in inner.regions:
            for block in region:
                inside.update(block.arguments)
        if inner != op.operation:
            inside.update(inner.results)
            used.update(dict.fromkeys(inner.operands))
        return ir.WalkResult.ADVANCE

    op.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return [v for v in used if v not in inside]
