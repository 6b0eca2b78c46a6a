"""hlo-scatter-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import ScatterDims
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.index_vectors import as_list, batch_dims
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite
from mpmd.compile.passes.values import is_trivial


class ScatterSimplifier(ComputationPass):
    """Canonicalises scatters.

    scatter(x, indices: [k,b1,b2], updates, batching dims ...)
      -> scatter(x, indices: [b1*b2,k'], reshape(transpose(updates)))

    Requires: no schedule.
    Ensures: each scatter has a list of index vectors `[n,k]`, updates `[n, window..]`, no batching dims; one
        without updates is its operand.
    Cost: linear.
    Source: XLA's batched-scatter normaliser and scatter simplifier in one.  Updates keep the order of
        their index vectors.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"scatter": (_normal,)}, lambda i: not i.shape.dynamic)


def is_normal(scatter: HloInstruction) -> bool:
    """True if a scatter has the canonical form."""
    dims = scatter.scatter_dims
    indices = scatter.operands[len(scatter.operands) // 2].shape
    behind = tuple(range(1, 1 + len(dims.update_window_dims)))
    return (
        indices.rank == 2
        and dims.index_vector_dim == 1
        and not dims.input_batching_dims
        and dims.update_window_dims == behind
    )


def _normal(site: RewriteSite) -> HloInstruction | None:
    count = len(site.operands) // 2
    sources, indices, updates = site.operands[:count], site.operands[count], site.operands[count + 1 :]
    if is_trivial(updates[0]) or is_trivial(sources[0]):
        return sources[0] if count == 1 else site.build.tuple(sources)
    if is_normal(site.at):
        return None
    dims = site.at.scatter_dims
    batch = batch_dims(indices, dims.index_vector_dim)
    vectors = as_list(
        site.build, indices, dims.index_vector_dim, dims.scatter_indices_batching_dims, sources[0].shape.dims
    )
    rank = updates[0].shape.rank
    order = [*(d for d in range(rank) if d not in dims.update_window_dims), *dims.update_window_dims]
    made = []
    for update in updates:
        turned = site.build.transpose(update, order)
        made.append(site.build.reshape(turned, (vectors.shape.dims[0], *turned.shape.dims[len(batch) :])))
    numbers = ScatterDims(
        tuple(range(1, made[0].shape.rank)),
        tuple(sorted((*dims.inserted_window_dims, *dims.input_batching_dims))),
        (*dims.scatter_dims_to_operand_dims, *dims.input_batching_dims),
        1,
    )
    return site.same(*sources, vectors, *made, shape=site.shape, scatter_dims=numbers)
