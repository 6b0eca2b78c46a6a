"""hlo-computation-deduplicator."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.fingerprint import computation_digest
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.passes.hlo_pass import HloPass


class ComputationDeduplicator(HloPass):
    """Merges equal computations.

    reduce(x, 0), to_apply=sum; reduce(y, 0), to_apply=sum.1  ->  both to_apply=sum

    Requires: no schedule; not between the flattening of the call graph and buffer assignment.
    Ensures: no two called computations have equal digests.
    Cost: linear.
    Source: the digests of `hlo.fingerprint`: opcodes, shapes, attributes, order of operands; callees first.
    """

    def rewrite(self, module: HloModule) -> bool:
        """Redirects calls, callees before callers."""
        first: dict[bytes, HloComputation] = {}
        digests: dict[HloComputation, bytes] = {}
        changed = False
        for computation in module.call_order():
            for instruction in computation.instructions:
                same = tuple(first[digests[c]] for c in instruction.called)
                if same != instruction.called:
                    instruction.set_called(same)
                    changed = True
            digests[computation] = computation_digest(computation, digests)
            first.setdefault(digests[computation], computation)
        if changed:
            module.remove_unreached()
        return changed
