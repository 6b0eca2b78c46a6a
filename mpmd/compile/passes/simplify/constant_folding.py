"""hlo-constant-folding."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator, is_evaluable
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import Category
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, TrackingBuilder

_NEVER = frozenset(
    [
        "parameter",
        "constant",
        "iota",
        "broadcast",
        "tuple",
        "get-tuple-element",
        "partition-id",
        "replica-id",
        "while",
        "conditional",
        "call",
        "fusion",
        "opt-barrier",
        "after-all",
        "add-dependency",
        "domain",
        "copy",
    ]
)
_OUTSIDE = frozenset({Category.COLLECTIVE, Category.ASYNC, Category.EXTERNAL, Category.RANDOM})
_CHEAP = frozenset({Category.UNARY, Category.BINARY, Category.TERNARY, Category.SHAPE})


class ConstantFolding(ComputationPass):
    """Evaluates operations with constant operands at compile time.

    add(constant(1), constant(2))  ->  constant(3)

    Broadcasts and iotas stay symbolic: they need no memory, their values do.

    Requires: no schedule.
    Ensures: no operation with constant operands is left whose result is small enough: no larger than the
        operands, or than `max_bytes`.
    Cost: that of the evaluator, which computes at most `max_elements` elements per operation.
    Source: the evaluator defines the result; denormals are kept.

    Attributes:
        max_bytes: largest result that is folded although it is larger than its operands, in bytes.
        max_elements: maximum of elements that the evaluator may compute for one operation that is not
            elementwise.
    """

    max_bytes: int = 1 << 20
    max_elements: int = 1 << 16

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Folds in post-order, so that chains fold at once."""
        rewriter = Rewriter(computation)
        for instruction in computation.post_order():
            if instruction.computation is not None and self._is_foldable(instruction):
                value = _folded(instruction, rewriter.build)
                rewriter.replace(instruction, value)
        return rewriter.changed

    def _is_foldable(self, instruction: HloInstruction) -> bool:
        info = instruction.info
        if instruction.opcode in _NEVER or info.category in _OUTSIDE or info.side_effect:
            return False
        if not instruction.operands or any(o.opcode != "constant" for o in instruction.operands):
            return False
        shape = instruction.shape
        if not shape.is_array or shape.dynamic or (shape.layout and not shape.layout.is_row_major):
            return False
        if instruction.has_control_edges or not is_evaluable(instruction):
            return False
        read = sum(o.shape.byte_size for o in instruction.operands)
        if instruction.shape.byte_size > max(read, self.max_bytes):
            return False
        touched = max(instruction.shape.size, *(o.shape.size for o in instruction.operands))
        return info.category in _CHEAP or touched <= self.max_elements


def _folded(instruction: HloInstruction, build: TrackingBuilder) -> HloInstruction:
    """The constant value of an instruction."""
    body = instruction.parent.module.create_computation("folded")
    try:
        copies = [body.add(o.clone(())) for o in instruction.operands]
        body.set_root(body.add(instruction.clone(copies)))
        with np.errstate(all="ignore"):
            value = Evaluator().run(body, [])
    finally:
        instruction.parent.module.remove_computation(body)
    return build.constant(value)
