"""hlo-constant-folding."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator, is_evaluable
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, TrackingBuilder

_NEVER = frozenset(
    ["constant", "iota", "broadcast", "tuple", "get-tuple-element", "partition-id", "replica-id", "copy"]
)


class ConstantFolding(ComputationPass):
    """Evaluates elementwise operations, conversions and movement of constants at compile time.

    add(constant(1), constant(2))  ->  constant(3)

    Broadcasts and iotas stay symbolic: they need no memory, their values do.  Reductions, products, gathers
    and sorts of constants stay kernels.

    Requires: no schedule.
    Ensures: no operation with constant operands is left whose result is small enough: no larger than the
        operands, or than `max_bytes`.
    Cost: that of the evaluator, linear in elements.
    Source: the evaluator defines the result; denormals are kept.

    Attributes:
        max_bytes: largest result that is folded although it is larger than its operands, in bytes.
    """

    max_bytes: int = 1 << 20

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Folds in post-order, so that chains fold at once."""
        rewriter = Rewriter(computation)
        for instruction in computation.post_order():
            if instruction.computation is not None and self._is_foldable(instruction):
                value = _folded(instruction, rewriter.build)
                rewriter.replace(instruction, value)
        return rewriter.changed

    def _is_foldable(self, instruction: HloInstruction) -> bool:
        if instruction.opcode in _NEVER or not is_evaluable(instruction) or instruction.has_control_edges:
            return False
        if not instruction.operands or any(o.opcode != "constant" for o in instruction.operands):
            return False
        shape = instruction.shape
        if not shape.is_array or shape.dynamic or (shape.layout and not shape.layout.is_row_major):
            return False
        read = sum(o.shape.byte_size for o in instruction.operands)
        return shape.byte_size <= max(read, self.max_bytes)


def _folded(instruction: HloInstruction, build: TrackingBuilder) -> HloInstruction:
    body = instruction.parent.module.create_computation("folded")
    try:
        copies = [body.add(o.clone(())) for o in instruction.operands]
        body.set_root(body.add(instruction.clone(copies)))
        with np.errstate(all="ignore"):
            value = Evaluator().run(body, [])
    finally:
        instruction.parent.module.remove_computation(body)
    return build.constant(value)
