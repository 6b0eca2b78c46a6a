"""What may be done to an op.  A pass that repeats, drops, moves or reorders ops asks here, and nowhere else.

| a pass wants to | it asks | MLIR and LLVM call it |
|---|---|---|
| do an op twice: once per mesh, again in a backward | `is_duplicable` | not `noduplicate` |
| drop an op | `is_trivially_dead`, `is_side_effect_free` | `wouldOpBeTriviallyDead`, `isMemoryEffectFree` |
| do it on another mesh, or at another time | `is_movable` | `isPure`: free of effects, speculatable |
| change the order of two ops | `is_ordered` | a chain of tokens |

All answers are recursive: an op has the effects of its regions.  One that MLIR does not know has all effects.
Effects without a token have no order, as in JAX; those with one are ordered by data flow alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from jax.extend.mlir import ir
from jax.extend.mlir.ir import OpView as Op

from mpmd.ir.context import context
from mpmd.ir.query import is_unused, users
from mpmd.ir.types import MeshTensor

PURE = "mpmd.pure"
"""Marks a call whose callee has no side effects."""
DUPLICABLE = "mpmd.duplicable"
"""Marks a call whose callee has side effects and may be done twice nevertheless."""
EFFECT_MARKS = (PURE, DUPLICABLE)
_TENSORS = (ir.RankedTensorType, MeshTensor)
_TOKEN = "!stablehlo.token"

# MLIR's interfaces are not in the bindings; these are the ops of a traced JAX program that lack them.
_ONCE = frozenset([
    "mpmd.call", "mpmd.fragment_call", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send",
    "stablehlo.recv", "stablehlo.rng",
])  # fmt: skip
"""The outside notices each run, or each run has another result."""
_KEPT = frozenset([
    "sdy.sharding_group", "stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.all_to_all",
    "stablehlo.reduce_scatter", "stablehlo.collective_permute", "stablehlo.collective_broadcast",
])  # fmt: skip
"""Annotations, and collectives of a mesh: not dropped, but may be done again."""
_ANNOTATIONS = frozenset(["annotate_device_placement", "annotate_device_placement_v2"])
"""Targets of custom calls that say where a value is to be, with `has_side_effect` so that XLA keeps them."""


def is_side_effect_free(op: Op) -> bool:
    """Whether nothing but its results shows that the op, and all in it, has run."""
    return _holds(op, _computes_only, PURE)


def is_duplicable(op: Op) -> bool:
    """Whether the op, and all in it, may be done twice: unnoticed, and with the same results.

    `rng_bit_generator` may, which computes its results from its key; `rng` may not.
    """
    return _holds(op, lambda o: _computes_only(o) or _is_kept(o), PURE, DUPLICABLE)


def is_trivially_dead(op: Op) -> bool:
    """Whether the op may be dropped: it is unused, and has no side effects.

    An unused sharding constraint gives its operand a sharding: it is dead if nothing else uses that.
    """
    if not is_unused(op) or not is_side_effect_free(op):
        return False
    return op.operation.name != "sdy.sharding_constraint" or all(u == op for u in users(op.operands[0]))


def is_movable(op: Op) -> bool:
    """Whether the op may be done on another mesh, or at another time of the step."""
    return is_side_effect_free(op) and not is_ordered(op)


def is_ordered(op: Op) -> bool:
    """Whether the op takes or gives a token: what does must stay between the same two others."""
    return any(map(is_token, (*op.operands, *op.results)))


def is_token(value: ir.Value) -> bool:
    """Whether a value is not data, but the order of the ops that pass it on."""
    return not isinstance(value.type, _TENSORS) and str(value.type) == _TOKEN


def effect_marks(op: Op) -> dict[str, ir.Attribute]:
    """Attributes for a call of a function with the body of `op`: what may be done to it."""
    name = PURE if is_side_effect_free(op) else DUPLICABLE if is_duplicable(op) else None
    return {} if name is None else {name: ir.UnitAttr.get(context())}


def _holds(op: Op, allowed: Callable[[ir.Operation], bool], *marks: str) -> bool:
    operation = op.operation
    if operation.name == "func.call":
        return any(mark in operation.attributes for mark in marks)
    return allowed(operation) and all(_holds(inner, allowed, *marks) for inner in _inside(operation))


def _inside(operation: ir.Operation) -> Iterator[Op]:
    return (inner for region in operation.regions for block in region for inner in block.operations)


def _computes_only(operation: ir.Operation) -> bool:
    if operation.name == "stablehlo.custom_call":
        effect = operation.attributes.get("has_side_effect")
        return effect is None or not ir.BoolAttr(effect).value
    return operation.name not in _ONCE and operation.name not in _KEPT and _is_known(operation.name)


def _is_kept(operation: ir.Operation) -> bool:
    if operation.name == "stablehlo.custom_call":
        return ir.StringAttr(operation.attributes["call_target_name"]).value in _ANNOTATIONS
    return operation.name in _KEPT


@functools.cache
def _is_known(name: str) -> bool:
    return bool(context().is_registered_operation(name))
