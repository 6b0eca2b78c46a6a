"""hlo-dce."""

from __future__ import annotations

from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.compile.passes.rewriter import is_dead, remove_unused


class Dce(HloPass):
    """Removes unused instructions, and computations without callers.

    a = add(x, y); ROOT b = negate(x)  ->  ROOT b = negate(x)

    Requires: nothing.
    Ensures: every instruction is the root, a parameter, has a side effect, has users, or orders others.
    Cost: linear.
    Source: dead-code elimination; unused elements of loop states are for the while simplifier.
    """

    def run(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed it.  Removal keeps a schedule."""
        return self.rewrite(module)

    def rewrite(self, module: HloModule) -> bool:
        """Removes dead instructions, callers before callees: a dead call makes its computation dead."""
        changed = module.remove_unreached()
        for computation in reversed(module.call_order()):
            for instruction in computation.instructions:
                if instruction.computation is not None and is_dead(instruction):
                    remove_unused(instruction)
                    changed = True
        return module.remove_unreached() or changed
