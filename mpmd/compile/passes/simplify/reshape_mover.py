"""hlo-reshape-mover."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule
from mpmd.compile.passes.values import only_user, splat


class ReshapeMover(ComputationPass):
    """Moves reshapes and transposes below elementwise work, so that neighbours can be fused.

    add(reshape(x), reshape(y)) -> reshape(add(x, y)), and the same with equal transposes

    Splats are broadcast to the other dims.  A transpose moves only if it has no other user.

    Requires: no schedule; no layouts that differ from row-major.
    Ensures: no elementwise operation has only reshapes from equal shapes and splats as operands, or only such
        transposes.
    Cost: linear in instructions and moves.
    Source: XLA's reshape mover.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules: tuple[Rule, ...] = (move_reshapes, move_transposes)
        table = dict.fromkeys(_MOVABLE, rules)
        return Rewriter(computation).run(table, lambda instruction: not instruction.shape.dynamic)


_MOVABLE = tuple(
    opcode
    for opcode, info in OPCODES.items()
    if info.category in ELEMENTWISE and opcode not in ("bitcast-convert", "map", "stochastic-convert", "copy")
)


def move_reshapes(site: RewriteSite) -> HloInstruction | None:
    """op(reshape(x), reshape(y), splat) → reshape(op(x, y, splat))."""
    dims = None
    for operand in site.operands:
        if _is_free(operand, site):
            continue
        if operand.opcode != "reshape" or dims not in (None, operand.operands[0].shape.dims):
            return None
        dims = operand.operands[0].shape.dims
    if dims is None:
        return None
    values = [o.operands[0] if o.opcode == "reshape" else _spread(site, o, dims) for o in site.operands]
    made = site.same(*values, shape=array(site.shape.dtype, dims))
    return site.build.reshape(made, site.shape.dims)


def move_transposes(site: RewriteSite) -> HloInstruction | None:
    """op(transpose(x), transpose(y), splat) → transpose(op(x, y, splat))."""
    order, dims = None, None
    for operand in dict.fromkeys(site.operands):
        if _is_free(operand, site):
            continue
        if operand.opcode != "transpose" or order not in (None, operand.dimensions):
            return None
        if only_user(operand) is not site.at:
            return None
        order, dims = operand.dimensions, operand.operands[0].shape.dims
    if order is None or dims is None:
        return None
    values = [o.operands[0] if o.opcode == "transpose" else _spread(site, o, dims) for o in site.operands]
    made = site.same(*values, shape=array(site.shape.dtype, dims))
    return site.build.transpose(made, order)


def _is_free(operand: HloInstruction, site: RewriteSite) -> bool:
    """True for scalars that apply to all elements, and for splats."""
    if operand.shape.is_scalar and site.shape.rank:
        return True
    return operand.opcode not in ("reshape", "transpose") and splat(operand) is not None


def _spread(site: RewriteSite, value: HloInstruction, dims: tuple[int, ...]) -> HloInstruction:
    """A splat in other dims."""
    if value.shape.is_scalar and site.shape.rank:
        return value
    if value.opcode == "broadcast" and value.operands[0].shape.is_scalar:
        return site.build.broadcast(value.operands[0], dims)
    return site.build.broadcast(site.build.constant(splat(value)), dims)
