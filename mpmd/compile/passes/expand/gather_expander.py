"""hlo-gather-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.gather_simplifier import is_normal
from mpmd.compile.passes.expand.index_vectors import element
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite


class GatherExpander(ComputationPass):
    """Replaces gathers of few slices by dynamic slices.

    gather(x, indices: [1,2])  ->  reshape(dynamic-slice(x, indices[0,0], indices[0,1]))

    Requires: no schedule; gathers in the form of `hlo-gather-simplifier`: others are left alone.
    Ensures: no such gather has `most` index vectors or fewer.
    Cost: linear.
    Source: both operations clamp a start so that the slice is inside.

    Attributes:
        most: index vectors up to which a gather is expanded; longer ones are one row copy per index.
    """

    most: int = 1

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"gather": (self._expand,)}, is_normal)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        x, vectors = site.operands
        count = vectors.shape.dims[0]
        if not 0 < count <= self.most:
            return None
        build, dims = site.build, site.at.gather_dims
        zero = build.constant(0, vectors.shape.dtype)
        rows = []
        for row in range(count):
            starts = [zero] * x.shape.rank
            for column, dim in enumerate(dims.start_index_map):
                starts[dim] = element(build, vectors, row, column)
            part = build.dynamic_slice(x, starts, site.at.slice_sizes)
            rows.append(build.reshape(part, (1, *site.shape.dims[1:])))
        return build.concatenate(rows, 0)
