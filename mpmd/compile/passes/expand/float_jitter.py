"""Floats with a small error put in, to find programs whose results depend on rounding."""

from __future__ import annotations

import re

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, splat


class FloatJitter(ComputationPass):
    """Perturbs chosen values, to find out whether a program depends on their last digits.

    y = tanh(x)  ->  y = tanh(x) * (1 + relative)

    Requires: no schedule; for experiments only: it changes results.
    Ensures: every float array that is computed by an operation whose opcode, name or source matches `values`
        is multiplied by 1 + relative, every second one by 1 - relative.
    Cost: linear.
    Source: fuzzing of rounding errors, as TensorFlow's clustering had it.

    Attributes:
        values: regular expression on opcodes, names and metadata of instructions.
        relative: size of the change, in millionths.
    """

    values: str = "dot|reduce|exponential|tanh"
    relative: int = 100

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation; those on scalars of others are left alone."""
        if any(c.opcode not in ("call", "while", "conditional") for c in computation.callers):
            return False
        chosen = [i for i in computation.post_order() if self._is_chosen(i)]
        rewriter = Rewriter(computation)
        for number, instruction in enumerate(chosen):
            factor = 1 + (-1) ** number * self.relative * 1e-6
            self._change(rewriter, instruction, factor)
        return bool(chosen)

    def _is_chosen(self, instruction: HloInstruction) -> bool:
        if not instruction.shape.is_array or instruction.shape.info.kind != "float":
            return False
        if instruction.opcode in ("parameter", "constant", "broadcast") or splat(instruction) is not None:
            return False
        words = f"{instruction.opcode} {instruction.name} {instruction.metadata}"
        return re.search(self.values, words) is not None

    def _change(self, rewriter: Rewriter, instruction: HloInstruction, factor: float) -> None:
        build = rewriter.build
        by = build.full(factor, instruction.shape.dtype, instruction.shape.dims)
        wrong = build.add("multiply", instruction, by, shape=instruction.shape)
        for user in list(instruction.users):
            if user is not wrong:
                instruction.replace_use(user, wrong)
        if instruction.is_root:
            rewriter.computation.set_root(wrong)
