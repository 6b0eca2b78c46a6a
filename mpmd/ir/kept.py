"""What was erased, and modules that nobody holds, are kept for a while.

Python objects for them may still be around; in the bindings, using such an object crashes the process.
"""

from __future__ import annotations

import collections
from typing import Any

from jax.extend.mlir import ir

from mpmd.ir.context import context

_MODULES = collections.deque[Any](maxlen=4)
_GRAVES = collections.deque[tuple[ir.Module, ir.Value]](maxlen=4)


def keep(module: Any) -> Any:
    """Keeps a module until four more have been kept, whether anybody holds it or not."""
    _MODULES.append(module)
    return module


def open_grave() -> None:
    """Called when a pass begins: what was erased four passes ago is freed."""
    unknown = ir.Location.unknown(context())
    grave = ir.Module.create(unknown)
    kind = ir.NoneType.get(context())
    where = ir.InsertionPoint(grave.body)
    nothing = ir.Operation.create("builtin.unrealized_conversion_cast", [kind], loc=unknown, ip=where)
    _GRAVES.append((grave, nothing.results[0]))


def bury(op: ir.OpView | ir.Operation) -> None:
    """Takes an op that nothing uses out of its program; this object for it raises when it is used again."""
    operation = op.operation
    grave, nothing = _grave()

    def use_nothing(inner: ir.Operation) -> ir.WalkResult:
        for i in range(len(inner.operands)):
            inner.operands[i] = nothing
        return ir.WalkResult.ADVANCE

    if len(operation.regions):  # what is in it may use what was moved out of it
        operation.walk(use_nothing)
    else:
        use_nothing(operation)
    grave.body.append(operation)
    operation._set_invalid()


def bury_contents(module: Any) -> None:
    """Takes everything out of a module."""
    grave, _ = _grave()
    for op in list(module.body.operations):
        grave.body.append(op)


def _grave() -> tuple[ir.Module, ir.Value]:
    if not _GRAVES:
        open_grave()
    return _GRAVES[-1]
