"""hlo-call-inliner."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import HloPass


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
