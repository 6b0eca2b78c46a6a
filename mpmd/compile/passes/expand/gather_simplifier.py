"""hlo-gather-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import GatherDims
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.index_vectors import as_list, batch_dims
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import is_trivial


class GatherSimplifier(ComputationPass):
    """Canonicalises gathers.

    gather(x, indices: [k,b1,b2], batching dims ...)
      -> transpose(reshape(gather(x, indices: [b1*b2,k']), offset_dims behind))

    Requires: no schedule.
    Ensures: each gather has a list of index vectors `[n,k]`, its n as the first dim of the result, the
        slices' dims after it, no batching dims, and something to read.
    Cost: linear.
    Source: XLA's batched-gather normaliser.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"gather": (_normal,)}, lambda i: not i.shape.dynamic)


def is_normal(gather: HloInstruction) -> bool:
    """True if a gather has the canonical form."""
    dims, indices = gather.gather_dims, gather.operands[1].shape
    behind = tuple(range(1, 1 + len(dims.offset_dims)))
    return (
        indices.rank == 2
        and dims.index_vector_dim == 1
        and not dims.operand_batching_dims
        and dims.offset_dims == behind
    )


def _normal(site: RewriteSite) -> HloInstruction | None:
    x, indices = site.operands
    dims, sizes = site.at.gather_dims, site.at.slice_sizes
    if is_trivial(x) and not is_trivial(site.at):  # slices of no elements, collapsed
        return site.build.full(0, x.shape.dtype, site.shape.dims)
    if is_normal(site.at) or is_trivial(site.at):
        return None
    batch = batch_dims(indices, dims.index_vector_dim)
    dropped = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window = [n for d, n in enumerate(sizes) if d not in dropped]
    vectors = as_list(
        site.build, indices, dims.index_vector_dim, dims.start_indices_batching_dims, x.shape.dims
    )
    numbers = GatherDims(
        tuple(range(1, 1 + len(window))),
        tuple(sorted(dropped)),
        (*dims.start_index_map, *dims.operand_batching_dims),
        1,
    )
    made = site.build.gather(x, vectors, numbers, sizes)
    made = site.build.reshape(made, (*batch, *window))
    places = [d for d in range(site.shape.rank) if d not in dims.offset_dims]
    to = (*places, *dims.offset_dims)
    return site.build.transpose(made, [to.index(d) for d in range(site.shape.rank)])
