"""The MLIR context, text in and out, and two repairs to the bindings.

In jaxlib an op is hashed by its contents, so that a set or dict loses an op when its operands or
attributes change, and comparing an op to None raises.  Here an op is hashed and compared by its address.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir as jax_mlir

from mpmd.support.memoisation import once


@once
def context() -> ir.Context:
    """The one context of the process, with every dialect that JAX knows."""
    made = jax_mlir.make_ir_context()
    stablehlo.register_stablehlo_passes()
    # A Python diagnostic handler together with a verifier on many threads deadlocks.
    made.enable_multithreading(False)
    made.allow_unregistered_dialects = True
    atexit.register(_leave, made)
    return made


def _leave(entered: ir.Context) -> None:
    """Leaves a context that was entered and not left: MLIR aborts if one is active at exit."""
    while ir.Context.current == entered:
        entered.__exit__(None, None, None)


def to_text(module: ir.Module) -> str:
    """The module as MLIR text; `parse` is the inverse."""
    text: str = module.operation.get_asm()
    return text


def op_text(op: ir.OpView) -> str:
    """A valid op as text, without locations; independent of its position, if it captures nothing."""
    text: str = op.operation.get_asm(use_local_scope=True, assume_verified=True)
    return text


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_size_t, [ctypes.py_object, ctypes.c_char_p]
_CAPSULE = ctypes.c_char_p(b"jaxlib.mlir.ir.Operation._CAPIPtr")


def _address(op: Any) -> int:
    """The first result's address, which is at a fixed distance: `ctypes` takes twice as long."""
    try:
        results = op.operation.results
        return hash(results[0]) if len(results) else _pointer_of(op._CAPIPtr, _CAPSULE)
    except RuntimeError:  # the bindings know that it was erased: it is equal to itself alone
        return -id(op)


_have_one_address = ir.OpView.__eq__


def _equal(op: Any, other: object) -> bool:
    try:
        return other is not None and bool(_have_one_address(op, other))
    except RuntimeError:
        return op is other


for _class in (ir.Operation, ir.OpView):
    _class.__hash__, _class.__eq__ = _address, _equal
