"""What was erased, and modules that nobody holds, are kept for a while.

Python objects for them may still be around; in the bindings, using such an object crashes the process.
"""

from __future__ import annotations

import collections
from typing import Any

from jax.extend.mlir import ir

from mpmd.ir.context import context

_MODULES = collections.deque[Any](maxlen=4)
_GRAVES = collections.deque[tuple[ir.Module, ir.Value]](maxlen=2)  # each with what its ops use: nothing


def keep(module: Any) -> Any:
    """Keeps a module until four more have been kept, whether anybody holds it or not."""
    _MODULES.append(module)
    return module


def free_erased() -> None:
    """Called when a program was found valid, as one that uses what was erased is not.

    What was erased before the last time is freed.
    """
    grave = ir.Module.create(ir.Location.unknown(context()))
    _GRAVES.append((grave, stand_ins(1, grave)[0]))


def stand_ins(count: int, grave: ir.Module | None = None) -> list[ir.Value]:
    """Values of no program, to stand for others for a moment."""
    kinds, unknown = [ir.NoneType.get(context())] * count, ir.Location.unknown(context())
    where = ir.InsertionPoint.at_block_begin((grave or _grave()[0]).body)  # its last op may be a terminator
    made = ir.Operation.create("builtin.unrealized_conversion_cast", kinds, loc=unknown, ip=where)
    return list(made.results)


def bury(op: ir.OpView | ir.Operation) -> None:
    """Takes an op that nothing uses out of its program; this object for it raises when it is used again."""
    operation = op.operation
    grave, nothing = _grave()
    if len(operation.regions):  # what is in it may use what was moved out of it
        operation.walk(lambda inner: _use_nothing(inner, nothing))
    else:
        _use_nothing(operation, nothing)
    grave.body.append(operation)
    operation._set_invalid()


def _use_nothing(operation: ir.Operation, nothing: ir.Value) -> ir.WalkResult:
    operands = operation.operands
    for i in range(len(operands)):
        operands[i] = nothing
    return ir.WalkResult.ADVANCE


def bury_block(block: ir.Block) -> None:
    """Takes a block without ops out of its op."""
    block.append_to(_grave()[0].operation.regions[0])


def bury_contents(module: Any) -> None:
    """Takes everything out of a module."""
    for op in list(module.body.operations):
        _grave()[0].body.append(op)


def _grave() -> tuple[ir.Module, ir.Value]:
    if not _GRAVES:
        free_erased()
    return _GRAVES[-1]
