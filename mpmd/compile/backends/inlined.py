"""StableHLO text inside of traced code: a primitive whose lowering is the text's own functions."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.extend.mlir import ir as mlir
from jax.interpreters import mlir as jax_mlir

from mpmd.compile.backends.arrays import numpy_dtype
from mpmd.compile.backends.host_callbacks import with_aligned_arguments
from mpmd.compile.fragment import ValueSpec
from mpmd.jax_compat import ShapedArray

INLINE_BELOW_FLOPS = 1000
"""XLA on CPU runs a program of fewer operations in the thread that calls it; custom calls count none."""

module_p = Primitive("mpmd_fragment")
module_p.multiple_results = True


@module_p.def_abstract_eval
def _result_types(*_: Any, text: str, results: tuple[ValueSpec, ...], callbacks: Any) -> list[Any]:
    return [ShapedArray(r.shape, numpy_dtype(r.dtype)) for r in results]


def _lower(ctx: Any, *operands: Any, text: str, results: tuple[ValueSpec, ...], callbacks: Any) -> Any:
    """Copies the fragment's functions into jit's module and calls its main."""
    on_cpu = tuple(ctx.module_context.platforms) == ("cpu",)
    for callback in callbacks:  # nothing else adds any, so positions stay what they are in the text
        ctx.module_context.add_host_callback(with_aligned_arguments(callback) if on_cpu else callback)
    fragment = mlir.Module.parse(text)
    outer, into = ctx.module_context.symbol_table, ctx.module_context.module.body
    renamed = {}
    for op in list(fragment.body.operations):
        old = mlir.StringAttr(op.attributes["sym_name"]).value
        if op.operation.name == "sdy.mesh" and old in outer:
            continue
        copy = op.operation.clone(mlir.InsertionPoint(into))
        if op.operation.name == "func.func":
            copy.attributes["sym_visibility"] = mlir.StringAttr.get("private")
            mlir.SymbolTable.set_symbol_name(copy, f"fragment_{old}")
        renamed[old] = (outer.insert(copy).value, copy)
    for old, (new, _) in renamed.items():
        for _, copy in renamed.values():
            mlir.SymbolTable.replace_all_symbol_uses(old, new, copy)
    name, main = renamed["main"]
    kind = mlir.FunctionType(mlir.TypeAttr(main.attributes["function_type"]).value)
    call = mlir.Operation.create(
        "func.call", list(kind.results), list(operands), {"callee": mlir.FlatSymbolRefAttr.get(name)}
    )
    return list(call.results)


jax_mlir.register_lowering(module_p, _lower)
