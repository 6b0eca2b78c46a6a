"""hlo-scatter-simplifier."""

from __future__ import annotations

from typing import Any

from mpmd.compile.hlo.attributes import ScatterDims
from mpmd.compile.hlo.builder import HloBuilder
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
    scatter(x, y, indices, u, v), to_apply=(a, b, c, d) -> (a + c, b * d)  ->  one scatter for each array

    Requires: no schedule.
    Ensures: each scatter has a list of index vectors `[n,k]`, updates `[n, window..]`, no batching dims; one
        without updates is its operand; one into several arrays combines each with the others.
    Cost: linear.
    Source: XLA's batched-scatter normaliser and scatter simplifier in one.  Updates keep the order of
        their index vectors.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"scatter": (_apart, _normal)}, lambda i: not i.shape.dynamic)


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


def _apart(site: RewriteSite) -> HloInstruction | None:
    """A scatter for each of several arrays, where none is combined with another's updates."""
    count = len(site.operands) // 2
    if count == 1:
        return None
    combine = site.at.to_apply
    parts = combine.root.operands if combine.root.opcode == "tuple" else []
    if len(parts) != count or any(_read(part) - {k, count + k} for k, part in enumerate(parts)):
        return None
    made = []
    for k, part in enumerate(parts):
        build = HloBuilder.create(combine.module, combine.name)
        given = {p: build.parameter(p.shape) for p in (combine.parameters[k], combine.parameters[count + k])}
        build.build(_copied(build.computation, part, given))
        operands = [site.operands[k], site.operands[count], site.operands[count + 1 + k]]
        attributes: dict[str, Any] = dict(site.at.attributes)
        made.append(site.build.add("scatter", *operands, called=(build.computation,), **attributes))
    return site.build.tuple(made)


def _read(value: HloInstruction) -> set[int]:
    """The parameters that a value depends on."""
    seen, waiting = {value}, [value]
    while waiting:
        new = [o for o in waiting.pop().operands if o not in seen]
        seen.update(new)
        waiting += new
    return {i.parameter_number for i in seen if i.opcode == "parameter"}


def _copied(
    target: HloComputation, value: HloInstruction, known: dict[HloInstruction, HloInstruction]
) -> HloInstruction:
    """A copy of a value and all that it needs."""
    if value not in known:
        known[value] = target.add(value.clone([_copied(target, o, known) for o in value.operands]))
    return known[value]


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
