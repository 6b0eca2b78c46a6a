"""hlo-flatten-calls."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.support.passes import Pass

_BODIES = frozenset(("while", "conditional"))


@dataclasses.dataclass(frozen=True)
class FlattenCalls(Pass):
    """Inlines calls, and gives every loop and branch computations of its own.

    ROOT c = call(x), to_apply=f  ->  the instructions of f

    Requires: nothing.
    Ensures: no `call`; the body of every loop and branch has one caller, so that its values can be given
        memory of their own.
    Cost: linear in the size of the result.
    Source: XLA's call inliner and call-graph flattening.
    """

    name = "hlo-flatten-calls"

    def run(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed something."""
        changed = False
        for computation in module.call_order():
            for instruction in computation.instructions:
                if instruction.opcode == "call":
                    _inline(computation, instruction)
                    changed = True
        taken: set[HloComputation] = set()
        for computation in reversed(module.call_order()):
            changed |= _own_bodies(computation, taken)
        return module.remove_unreached() or changed


def _inline(computation: HloComputation, call: HloInstruction) -> None:
    callee = call.to_apply
    known = dict(zip(callee.parameters, call.operands))
    copies = callee.copy_into(computation, known)
    computation.replace(call, copies[callee.root])


def _own_bodies(computation: HloComputation, taken: set[HloComputation]) -> bool:
    changed = False
    for instruction in computation:
        if instruction.opcode in _BODIES:
            own = []
            for callee in instruction.called:
                if callee in taken:
                    callee, changed = callee.clone(), True
                    # what a copy calls is still shared: its own loops and branches come next
                    changed |= _own_bodies(callee, taken)
                taken.add(callee)
                own.append(callee)
            instruction.set_called(own)
    return changed
