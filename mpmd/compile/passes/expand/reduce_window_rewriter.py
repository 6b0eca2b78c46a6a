"""hlo-reduce-window-rewriter."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, Site
from mpmd.compile.passes.values import is_identity, reducer


@dataclasses.dataclass(frozen=True)
class ReduceWindowRewriter(ComputationPass):
    """Computes running sums in as many steps as the length has bits.

    reduce-window(x: [n], 0), window of n, padding n-1 in front, add
      -> x = x + shifted(x, 1); x = x + shifted(x, 2); x = x + shifted(x, 4) ...

    Requires: no schedule.
    Ensures: no running sum, product, maximum or minimum along one dim is left as a window over all before it.
    Cost: linear in the program; at run time n log n for n squared.
    Source: Hillis and Steele, "Data parallel algorithms", 1986.

    Attributes:
        least: shortest length that is rewritten.
    """

    name = "hlo-reduce-window-rewriter"
    least: int = 3

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reduce-window": (self._scan,)}, lambda i: len(i.operands) == 2)

    def _scan(self, site: Site) -> HloInstruction | None:
        x, init = site.operands
        opcode = reducer(site.at.to_apply)
        if opcode is None or not is_identity(opcode, init) or x.shape.logical is not site.shape.logical:
            return None
        found = _running_dim(site.at)
        if found is None or x.shape.dims[found[0]] < self.least:
            return None
        dim, forward = found
        step = 1
        while step < x.shape.dims[dim]:
            amount = PadDim(step, -step) if forward else PadDim(-step, step)
            padding = [amount if d == dim else PadDim(0, 0) for d in range(x.shape.rank)]
            x = site.build.add(opcode, x, site.build.pad(x, init, padding))
            step *= 2
        return x


def _running_dim(windowed: HloInstruction) -> tuple[int, bool] | None:
    """The dim along which the window covers all that is before (or, reversed, behind) an element."""
    found = None
    for d, (w, n) in enumerate(zip(windowed.window.dims, windowed.shape.dims)):
        if w.stride != 1 or w.lhs_dilation != 1 or w.rhs_dilation != 1 or w.reversed:
            return None
        if w.size == 1 and not (w.pad_low or w.pad_high):
            continue
        sides = (w.pad_low, w.pad_high)
        if found is not None or w.size != n or sides not in ((n - 1, 0), (0, n - 1)):
            return None
        found = (d, sides[0] > 0)
    return found
