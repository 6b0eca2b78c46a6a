"""From a JAX function to a module in our dialect, with names, loops and the user's source lines."""

from __future__ import annotations

import io

import jax

from mpmd import ir
from mpmd.tracing.expand import Expansion
from mpmd.tracing.sharding_types import remove_sharding_types


def to_module(lowered: jax.stages.Lowered, topology: ir.TopologyAttr, *, explicit: bool = False) -> ir.Module:
    """The module of a lowered step, its names and loops in our dialect.

    Args:
        lowered: by JAX.
        topology: of the step.
        explicit: whether it was traced with explicit axes.

    Requires: `lowered` was lowered with `keep_unused=True`.
    """
    code = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(code)
    module = ir.parse(code.getvalue())
    if explicit:
        remove_sharding_types(module)
    expand(module, topology)
    return module


def expand(module: ir.Module, topology: ir.TopologyAttr) -> None:
    with ir.context(), ir.Location.unknown():
        Expansion(module, topology).run()
