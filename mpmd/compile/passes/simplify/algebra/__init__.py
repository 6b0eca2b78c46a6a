"""The algebraic simplifier: local identities, one function per rule, in one file per family of opcodes.

Expansion, transposition and differentiation leave operations that do nothing, or undo each other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, Rule
from mpmd.compile.passes.simplify.algebra import elementwise, movement, products

FAMILIES = (elementwise, movement, products)


@functools.cache
def table() -> Mapping[str, tuple[Rule, ...]]:
    """The rules of each opcode, in the order in which they are tried."""
    rules: dict[str, tuple[Rule, ...]] = {}
    for family in FAMILIES:
        for opcode, rules_of_family in family.RULES.items():
            rules[opcode] = rules.get(opcode, ()) + rules_of_family
    return rules


class AlgebraicSimplifier(ComputationPass):
    """Applies local rules until none applies: identities, compositions, work moved before broadcasts.

    multiply(x, 1) -> x;  transpose(transpose(x)) -> x;  slice(concatenate(x, y)) -> x;
    add(broadcast(a), broadcast(b)) -> broadcast(add(a, b)); ...
    The files of `simplify/algebra` list them, one function per rule.

    Requires: no schedule.
    Ensures: no rule of the table applies; values are the same up to the sign of zeros, and up to the order of
        sums.
    Cost: a worklist: linear in instructions and changes.
    Source: the rules that fire in transformer steps, as XLA's algebraic simplifier has them.

    Attributes:
        layout_sensitive: leave operations alone that have an operand or result that is not row-major; set
            after
            layout assignment.
    """

    layout_sensitive: bool = False

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run(table(), self._is_allowed)

    def _is_allowed(self, instruction: HloInstruction) -> bool:
        shapes = [instruction.shape, *(o.shape for o in instruction.operands)]
        if any(s.dynamic for s in shapes):
            return False
        if not self.layout_sensitive or instruction.opcode in (
            "bitcast",
            "copy",
            "tuple",
            "get-tuple-element",
        ):
            return True
        shapes += [p.shape for o in instruction.operands for p in o.operands]
        return all(_is_plain(s) for s in shapes)


def _is_plain(shape: Shape) -> bool:
    if not shape.is_array:
        return True
    return shape.layout is None or shape.layout.is_row_major
