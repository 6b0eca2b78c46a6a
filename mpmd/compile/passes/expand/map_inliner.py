"""hlo-map-inliner."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, Site


@dataclasses.dataclass(frozen=True)
class MapInliner(ComputationPass):
    """Applies the operations of a map to whole arrays.

    map(x, y), to_apply=(a, b) -> add(a, negate(b))  ->  add(x, negate(y))

    Requires: no schedule; calls are inlined.
    Ensures: no map is left whose computation is elementwise.
    Cost: linear.
    Source: an elementwise operation means the same on arrays as on their elements.
    """

    name = "hlo-map-inliner"

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"map": (_inline,)}, lambda i: True)


def _inline(site: Site) -> HloInstruction | None:
    body = site.at.to_apply
    if not all(_is_simple(i) for i in body) or body.root.shape.is_tuple:
        return None
    dims = site.shape.dims
    values: dict[HloInstruction, HloInstruction] = {}
    for instruction in body.post_order():
        if instruction.opcode == "parameter":
            values[instruction] = site.operands[instruction.parameter_number]
        elif instruction.opcode == "constant":
            values[instruction] = site.build.broadcast(site.build.constant(instruction.literal), dims)
        else:
            operands = [values[o] for o in instruction.operands]
            shape = array(instruction.shape.dtype, dims)
            values[instruction] = site.build.like(instruction, operands, shape)
    return values[body.root]


def _is_simple(instruction: HloInstruction) -> bool:
    if instruction.opcode in ("parameter", "constant"):
        return True
    return instruction.is_elementwise and instruction.opcode != "map"
