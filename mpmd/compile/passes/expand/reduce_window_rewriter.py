"""hlo-reduce-window-rewriter."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import is_identity, reducer


class ReduceWindowRewriter(ComputationPass):
    """Computes running sums in as many steps as the length has bits.

    reduce-window(x: [n], 0), window of n, padding n-1 in front, add
      -> x = x + shifted(x, 1); x = x + shifted(x, 2); x = x + shifted(x, 4) ...

    Requires: no schedule.
    Ensures: no running sum, maximum or other reduction along one dim is left as a window over all before it.
    Cost: linear in the program; at run time n log n for n squared.
    Source: Hillis and Steele, "Data parallel algorithms", 1986.

    Attributes:
        least: shortest length that is rewritten.
    """

    least: int = 3

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"reduce-window": (self._scan,)}, lambda i: True)

    def _scan(self, site: RewriteSite) -> HloInstruction | None:
        count = len(site.operands) // 2
        x, init = site.operands[0], site.operands[count]
        found = _running_dim(site.at)
        if found is None or x.shape.dims[found[0]] < self.least:
            return None
        dim, forward = found
        opcode = reducer(site.at.to_apply) if count == 1 else None
        if opcode is None or not is_identity(opcode, init) or x.shape.logical is not site.shape.logical:
            return None
        step = 1
        while step < x.shape.dims[dim]:
            x = site.build.add(opcode, x, _moved(site, x, init, dim, step if forward else -step))
            step *= 2
        return x


def _moved(site: RewriteSite, x: HloInstruction, filler: HloInstruction, dim: int, by: int) -> HloInstruction:
    """An array moved along a dim."""
    padding = [PadDim(by, -by) if d == dim else PadDim(0, 0) for d in range(x.shape.rank)]
    return site.build.pad(x, filler, padding)


def _running_dim(windowed: HloInstruction) -> tuple[int, bool] | None:
    """The dim along which the window covers everything before (or, reversed, after) an element.

    A result of the operand's dims leaves no other size to a window that is padded so.
    """
    found = None
    for d, (w, n) in enumerate(zip(windowed.window.dims, windowed.operands[0].shape.dims)):
        if w.stride != 1 or w.lhs_dilation != 1 or w.rhs_dilation != 1:
            return None
        if w.size == 1 and not (w.pad_low or w.pad_high):
            continue
        sides = (w.pad_low, w.pad_high)
        if found is not None or sides not in ((n - 1, 0), (0, n - 1)):
            return None
        found = (d, sides[0] > 0)
    return found
