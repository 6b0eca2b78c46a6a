"""hlo-scatter-simplifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpmd.compile.hlo.attributes import Attribute, ScatterDims
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

    One into several arrays, each of which is combined with its own updates only, becomes one for each array.

    Requires: no schedule.
    Ensures: each scatter has a list of index vectors `[n,k]`, updates `[n, window..]`, no batching dims; one
        without updates is its operand.
    Cost: linear.
    Source: XLA's batched-scatter normaliser and scatter simplifier in one.  Updates keep the order of
        their index vectors.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"scatter": (_split, _normal)}, lambda i: not i.shape.dynamic)


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


def _split(site: RewriteSite) -> HloInstruction | None:
    """scatter((x, y), indices, (u, v)) → (scatter(x, indices, u), scatter(y, indices, v))."""
    count = len(site.operands) // 2
    root = site.at.to_apply.root
    if count < 2 or root.opcode != "tuple" or is_trivial(site.operands[0]):
        return None
    needed = [_needed(value) for value in root.operands]
    for k, members in enumerate(needed):
        numbers = {m.parameter_number for m in members if m.opcode == "parameter"}
        if not numbers <= {k, count + k}:
            return None
    indices, made = site.operands[count], []
    for k, (value, members) in enumerate(zip(root.operands, needed)):
        source, update = site.operands[k], site.operands[count + 1 + k]
        combine = _computation_of(value, members, {k: 0, count + k: 1})
        attributes: dict[str, Any] = dict(site.at.attributes)
        made.append(site.build.add("scatter", source, indices, update, called=(combine,), **attributes))
    return site.build.tuple(made)


def _needed(value: HloInstruction) -> set[HloInstruction]:
    """The transitive operands of a value, itself included."""
    found, waiting = {value}, [value]
    while waiting:
        for operand in waiting.pop().operands:
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return found


def _computation_of(
    value: HloInstruction, members: set[HloInstruction], numbers: Mapping[int, int]
) -> HloComputation:
    """A computation of one value, whose parameters have other numbers."""
    old = value.parent
    made = old.module.create_computation(old.name)
    copies: dict[HloInstruction, HloInstruction] = {}
    for parameter in old.parameters:
        if parameter.parameter_number in numbers:
            attributes: dict[str, Attribute] = {"parameter_number": numbers[parameter.parameter_number]}
            copies[parameter] = made.add(HloInstruction("parameter", parameter.shape, (), attributes))
    for member in old.post_order():
        if member in members and member not in copies:
            copies[member] = made.add(member.clone([copies[o] for o in member.operands]))
    made.set_root(copies[value])
    return made


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
