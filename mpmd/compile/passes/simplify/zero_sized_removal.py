"""hlo-zero-sized-removal."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter
from mpmd.compile.passes.values import is_trivial

_OUTSIDE = frozenset({Category.COLLECTIVE, Category.ASYNC, Category.EXTERNAL})


class ZeroSizedRemoval(ComputationPass):
    """Replaces arrays without elements by constants.

    negate(x: f32[0,3]) -> constant(f32[0,3])

    Requires: no schedule.
    Ensures: only parameters, constants, elements of tuples and operations with effects have no elements.
    Cost: linear.
    Source: there is nothing to compute.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rewriter = Rewriter(computation)
        for instruction in computation.instructions:
            if instruction.computation is not None and _is_removable(instruction):
                value = np.zeros(instruction.shape.dims, instruction.shape.numpy_dtype)
                rewriter.replace(instruction, rewriter.build.constant(value))
        return rewriter.changed


def _is_removable(instruction: HloInstruction) -> bool:
    if not is_trivial(instruction) or instruction.shape.dynamic or instruction.has_side_effect:
        return False
    if instruction.opcode in ("parameter", "constant", "get-tuple-element"):
        return False
    return instruction.info.category not in _OUTSIDE
