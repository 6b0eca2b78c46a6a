"""hlo-conditional-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.fingerprint import computation_digest
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import remove_unused
from mpmd.compile.passes.simplify.calls import inline
from mpmd.compile.passes.values import splat


class ConditionalSimplifier(ComputationPass):
    """Inlines branches that are known to be taken, and removes unused results of branches.

    conditional(true, x, y) -> the first branch on x;  (a, b, unused) = conditional(p, x, y) -> (a, b) = ...

    Requires: no schedule; conditionals whose branches have other callers keep their unused results.
    Ensures: no conditional has a constant selector, or one branch, or equal branches on equal operands.
    Cost: linear.
    Source: XLA's conditional simplifier.
    """

    abandons = True

    def rewrite_computation(self, computation: HloComputation) -> bool:
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode != "conditional" or instruction.computation is None:
                continue
            taken = _taken(instruction)
            if taken is not None:
                inline(instruction, taken, [instruction.operands[taken + 1]])
                changed = True
            else:
                changed |= _drop_unused(instruction)
        return changed


def _taken(instruction: HloInstruction) -> int | None:
    """The branch that is taken, if that is known."""
    count = len(instruction.called)
    if count == 1:
        return 0
    selector = instruction.operands[0]
    value = splat(selector)
    if value is not None:
        if selector.shape.dtype == "pred":
            return 0 if value else 1
        return int(value) if 0 <= int(value) < count else count - 1
    first = instruction.operands[1]
    if any(o is not first for o in instruction.operands[2:]):
        return None
    known: dict[HloComputation, bytes] = {}
    digests = {_digest(c, known) for c in instruction.called}
    return 0 if len(digests) == 1 else None


def _digest(computation: HloComputation, known: dict[HloComputation, bytes]) -> bytes:
    if computation not in known:
        for instruction in computation:
            for callee in instruction.called:
                _digest(callee, known)
        known[computation] = computation_digest(computation, known)
    return known[computation]


def _drop_unused(instruction: HloInstruction) -> bool:
    """Return only the elements that are read."""
    if instruction.is_root or not instruction.shape.is_tuple or not instruction.users:
        return False
    if instruction.has_control_edges:
        return False
    branches = instruction.called
    own = len(set(branches)) == len(branches) and all(sum(b.callers.values()) == 1 for b in branches)
    plain = all(b.root.opcode == "tuple" for b in branches)
    if not own or not plain or any(u.opcode != "get-tuple-element" for u in instruction.users):
        return False
    kept = sorted({u.tuple_index for u in instruction.users})
    if len(kept) == len(instruction.shape.elements):
        return False
    for branch in branches:
        old = branch.root
        branch.set_root(HloBuilder(branch).tuple([old.operands[i] for i in kept]))
        remove_unused(old)
    build = HloBuilder(instruction.parent)
    shape = tuple_of([instruction.shape.elements[i] for i in kept])
    made = build.add("conditional", *instruction.operands, shape=shape, called=branches)
    made.copy_annotations(instruction)
    for reader in list(instruction.users):
        index = kept.index(reader.tuple_index)
        value = build.add("get-tuple-element", made, shape=reader.shape, index=index)
        instruction.parent.replace(reader, value)
    instruction.parent.remove(instruction)  # though it may have effects: `made` has them
    return True
