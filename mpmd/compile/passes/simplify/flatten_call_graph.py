"""hlo-flatten-call-graph."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import HloPass

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
