"""Deferred deletion of erased ops, and of modules without references.

Python objects may still refer to them; in the bindings, using such an object crashes the process.
"""

from __future__ import annotations

import collections
from typing import Any

from jax.extend.mlir import ir

from mpmd.ir.context import context

_MODULES = collections.deque[Any](maxlen=4)
_DEFERRED = collections.deque[tuple[ir.Module, ir.Value]](maxlen=2)  # each with what its ops use: nothing


def keep(module: Any) -> Any:
    """Keeps a module until four more have been kept, even without other references."""
    _MODULES.append(module)
    return module


def free_erased() -> None:
    """Called when a program was verified: a valid program does not use erased ops.

    Ops that were erased before the last call are freed.
    """
    deferred = ir.Module.create(ir.Location.unknown(context()))
    _DEFERRED.append((deferred, placeholders(1, deferred)[0]))


def placeholders(count: int, deferred: ir.Module | None = None) -> list[ir.Value]:
    kinds, unknown = [ir.NoneType.get(context())] * count, ir.Location.unknown(context())
    where = ir.InsertionPoint.at_block_begin(
        (deferred or _newest()[0]).body
    )  # its last op may be a terminator
    made = ir.Operation.create("builtin.unrealized_conversion_cast", kinds, loc=unknown, ip=where)
    return list(made.results)


def defer_deletion(op: ir.OpView | ir.Operation) -> None:
    """Takes an unused op out of its program; this object for it raises when it is used again."""
    operation = op.operation
    deferred, nothing = _newest()

    def use_nothing(inner: ir.Operation) -> ir.WalkResult:
        operands = inner.operands
        for i in range(len(operands)):
            operands[i] = nothing
        return ir.WalkResult.ADVANCE

    if len(operation.regions):  # ops in it may use ops that were moved out of it
        operation.walk(use_nothing)
    else:
        use_nothing(operation)
    deferred.body.append(operation)
    operation._set_invalid()


def defer_block_deletion(block: ir.Block) -> None:
    """Takes a block without ops out of its op."""
    block.append_to(_newest()[0].operation.regions[0])


def defer_contents_deletion(module: Any) -> None:
    for op in list(module.body.operations):
        _newest()[0].body.append(op)


def _newest() -> tuple[ir.Module, ir.Value]:
    if not _DEFERRED:
        free_erased()
    return _DEFERRED[-1]
