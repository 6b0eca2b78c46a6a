"""The MLIR context, text in and out, two repairs to the bindings, and deferred deletion.

Python objects may still refer to erased ops and to modules without references.  In the bindings, using such
an object crashes the process, so their memory is kept until no pass can hold one.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import re
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir as jax_mlir

from mpmd.support.resources import once


@once
def context() -> ir.Context:
    """The one context of the process, with every dialect that JAX knows."""
    opened = jax_mlir.make_ir_context()
    stablehlo.register_stablehlo_passes()
    # A Python diagnostic handler together with a verifier on many threads deadlocks.
    opened.enable_multithreading(False)
    opened.allow_unregistered_dialects = True
    atexit.register(_leave, opened)
    return opened


def _leave(entered: ir.Context) -> None:
    """Leaves a context that was entered and not left: MLIR aborts if one is active at exit."""
    while ir.Context.current == entered:
        entered.__exit__(None, None, None)


def to_text(module: ir.Module) -> str:
    """The module as MLIR text; `parse` is the inverse."""
    text: str = module.operation.get_asm()
    return text


_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_LOCATION = re.compile(r" loc\((#loc\d*)\)")
_ALIAS_USED = re.compile(r"#loc\d*")
_MAX_LOCATION = 20_000


def line_locations(module: ir.Module) -> list[str]:
    """For each line of `to_text` the location of the op that it belongs to; empty for a line of none.

    An op's location is printed at its end, so that lines with which it begins have to wait for it.
    """
    text = module.operation.get_asm(enable_debug_info=True)
    aliases: dict[str, str] = {}
    found: list[str] = []
    begun: list[tuple[int, list[int]]] = []  # indent, lines
    for line in text.splitlines():
        if alias := _ALIAS.match(line):
            aliases[alias[1]] = alias[2]
            continue
        indent = len(line) - len(line.lstrip())
        at_end = line.endswith(")") and [*_LOCATION.finditer(line)]
        number, ends = len(found), bool(at_end) and at_end[-1].end() == len(line)
        found.append(at_end[-1][1] if at_end and ends else "")
        while begun and begun[-1][0] > indent:
            begun.pop()
        if begun and begun[-1][0] == indent and line.lstrip()[:1] in ("}", "^"):
            begun[-1][1].append(number)
            if ends:
                for first in begun.pop()[1]:
                    found[first] = found[number]
        elif not ends:
            begun.append((indent, [number]))
    whole: dict[str, str] = {"": ""}

    def expand(name: str) -> str:
        if name not in whole:
            whole[name] = ""
            text = _ALIAS_USED.sub(lambda used: expand(used[0]), aliases.get(name, ""))
            whole[name] = text[:_MAX_LOCATION]
        return whole[name]

    return [expand(name) for name in found]


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
    cast = ir.Operation.create("builtin.unrealized_conversion_cast", kinds, loc=unknown, ip=where)
    return list(cast.results)


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
