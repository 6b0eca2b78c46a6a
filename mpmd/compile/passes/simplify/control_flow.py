"""Calls, tuples and conditionals removed where they only hide a value: passes look at one computation."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.printer import computation_digest
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass, HloPass
from mpmd.compile.passes.rewriter import Rewriter, remove_unused, splat
from mpmd.compile.passes.simplify.algebra import movement


class CallInliner(HloPass):
    """Replaces a call by the body of the called computation, and a fusion by its instructions.

    ROOT r = call(x), to_apply=f  ->  the instructions of f on x

    A fusion in the program was planned for another compiler; kernels are planned from its instructions.

    Requires: no schedule.
    Ensures: no fusion is left, and no call but those marked `inlineable="false"`; their computations stay.
    Cost: linear in the program after inlining.
    Source: inlining; callees come first, so that each body is copied in its final form.
    """

    def rewrite(self, module: HloModule) -> bool:
        """Inlines, callees before callers."""
        changed = False
        for computation in module.call_order():
            for instruction in computation.instructions:
                if instruction.opcode in ("call", "fusion") and _is_inlineable(instruction):
                    inline(instruction)
                    changed = True
        if changed:
            module.remove_unreached()
        return changed


def _is_inlineable(call: HloInstruction) -> bool:
    return 'inlineable="false"' not in call.frontend_attributes


def inline(caller: HloInstruction, number: int = 0, arguments: list[HloInstruction] | None = None) -> None:
    """Replace an instruction by the body of computation `number` that it calls, on its operands.

    Effects of the body stay in the order in which control edges put the instruction.
    """
    callee = caller.called[number]
    given = arguments if arguments is not None else caller.operands
    known = {p: given[p.parameter_number] for p in callee.parameters}
    copies = callee.copy_into(caller.parent, known)
    for effect in (copy for i, copy in copies.items() if i not in known and copy.has_side_effect):
        for early in caller.control_predecessors:
            effect.add_control_predecessor(early)
        for late in caller.control_successors:
            late.add_control_predecessor(effect)
    caller.parent.replace(caller, copies[callee.root])


_SEQUENTIAL = frozenset(["call", "while", "conditional", "async-start"])


class FlattenCallGraph(HloPass):
    """Gives each loop, branch and call its own computations.

    a = call(x), to_apply=f; b = call(y), to_apply=f  ->  b = call(y), to_apply=f.1

    Requires: no schedule.
    Ensures: a computation that runs as part of the program has one caller, and is not shared with a fusion,
        reduction or the like: layouts and buffers can be chosen per call.
    Cost: linear in the program after copying.
    Source: XLA's pass of that name.
    """

    def rewrite(self, module: HloModule) -> bool:
        """Copies from the entry on, so that copies are flattened as well."""
        changed = False
        taken: set[HloComputation] = {module.entry}
        waiting = [module.entry]
        while waiting:
            computation = waiting.pop()
            for instruction in computation.instructions:
                if instruction.opcode not in _SEQUENTIAL:
                    continue
                own = []
                for callee in instruction.called:
                    if callee in taken or any(i.opcode not in _SEQUENTIAL for i in callee.callers):
                        callee = callee.clone()
                    taken.add(callee)
                    own.append(callee)
                if tuple(own) != instruction.called:
                    instruction.set_called(own)
                    changed = True
                waiting += own
        return changed


class TupleSimplifier(ComputationPass):
    """Removes tuples that are only taken apart, and those that only rebuild a tuple.

    get-tuple-element(tuple(x, y)), index=1 -> y;  tuple(t[0], t[1]) -> t
    constant((1, 2)) -> tuple(constant(1), constant(2));  copy(tuple(x, y)) -> tuple(x, y)

    Requires: no schedule.
    Ensures: no get-tuple-element reads a tuple instruction, and no constant or copy is a tuple.
    Cost: linear.
    Source: the tuple rules of the algebraic simplifier, for use where nothing else may change.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run(movement.TUPLES, lambda instruction: True)


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
    conditional = build.add("conditional", *instruction.operands, shape=shape, called=branches)
    conditional.copy_annotations(instruction)
    for reader in list(instruction.users):
        index = kept.index(reader.tuple_index)
        value = build.add("get-tuple-element", conditional, shape=reader.shape, index=index)
        instruction.parent.replace(reader, value)
    instruction.parent.remove(instruction)  # though it may have effects: `conditional` has them
    return True
