"""Gathers and scatters in one form: index vectors in rows, windows behind them, no batching dims.

Kernels and the rules of later passes then know one case.  A scatter of narrow numbers is widened, as its sums
may have many terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpmd.compile.hlo.attributes import GatherDims, Ints, ScatterDims
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder, is_trivial, reducer


def batch_dims(indices: HloInstruction, vector_dim: int) -> Ints:
    return tuple(n for d, n in enumerate(indices.shape.dims) if d != vector_dim)


def as_list(
    build: TrackingBuilder, indices: HloInstruction, vector_dim: int, batching: Sequence[int], sizes: Ints
) -> HloInstruction:
    """The vectors as `[count, length]`; the positions along batching dims follow as further elements.

    Args:
        build: the builder.
        indices: the index operand.
        vector_dim: the dim of the vectors, or the rank if vectors are single numbers.
        batching: dims of the indices that are dims of the operand too.
        sizes: dims of the operand, all of which the elements must be able to count.
    """
    indices = _wide_enough(build, indices, sizes) if batching else indices
    rank = indices.shape.rank
    batch = batch_dims(indices, vector_dim)
    if vector_dim == rank:
        vectors = build.reshape(indices, (*batch, 1))
    else:
        order = [d for d in range(rank) if d != vector_dim]
        vectors = build.transpose(indices, (*order, vector_dim))
    parts = [vectors]
    for dim in batching:
        axis = dim - (dim > vector_dim)
        parts.append(build.iota(indices.shape.dtype, (*batch, 1), axis))
    joined = build.concatenate(parts, len(batch))
    return build.reshape(joined, (math.prod(batch), joined.shape.dims[-1]))


def _wide_enough(build: TrackingBuilder, indices: HloInstruction, sizes: Ints) -> HloInstruction:
    info = DTYPES[indices.shape.dtype]
    largest = max(sizes, default=0)
    if largest < 1 << (info.bits - (info.kind == "signed")):
        return indices
    return build.convert(indices, "s32" if info.bits < 32 and largest < 1 << 31 else "s64")


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
        return Rewriter(computation).run({"gather": (_normal_gather,)}, lambda i: not i.shape.dynamic)


def _is_normal_gather(gather: HloInstruction) -> bool:
    dims, indices = gather.gather_dims, gather.operands[1].shape
    behind = tuple(range(1, 1 + len(dims.offset_dims)))
    return (
        indices.rank == 2
        and dims.index_vector_dim == 1
        and not dims.operand_batching_dims
        and dims.offset_dims == behind
    )


def _normal_gather(site: RewriteSite) -> HloInstruction | None:
    x, indices = site.operands
    dims, sizes = site.at.gather_dims, site.at.slice_sizes
    if is_trivial(x) and not is_trivial(site.at):  # slices of no elements, collapsed
        return site.build.full(0, x.shape.dtype, site.shape.dims)
    if _is_normal_gather(site.at) or is_trivial(site.at):
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
    gathered = site.build.gather(x, vectors, numbers, sizes)
    gathered = site.build.reshape(gathered, (*batch, *window))
    places = [d for d in range(site.shape.rank) if d not in dims.offset_dims]
    to = (*places, *dims.offset_dims)
    return site.build.transpose(gathered, [to.index(d) for d in range(site.shape.rank)])


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
        return Rewriter(computation).run(
            {"scatter": (_apart, _normal_scatter)}, lambda i: not i.shape.dynamic
        )


def _is_normal_scatter(scatter: HloInstruction) -> bool:
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
    scatters = []
    for k, part in enumerate(parts):
        build = HloBuilder.create(combine.module, combine.name)
        given = {p: build.parameter(p.shape) for p in (combine.parameters[k], combine.parameters[count + k])}
        build.build(_copied(build.computation, part, given))
        operands = [site.operands[k], site.operands[count], site.operands[count + 1 + k]]
        attributes: dict[str, Any] = dict(site.at.attributes)
        scatters.append(site.build.add("scatter", *operands, called=(build.computation,), **attributes))
    return site.build.tuple(scatters)


def _read(value: HloInstruction) -> set[int]:
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


def _normal_scatter(site: RewriteSite) -> HloInstruction | None:
    count = len(site.operands) // 2
    sources, indices, updates = site.operands[:count], site.operands[count], site.operands[count + 1 :]
    if is_trivial(updates[0]) or is_trivial(sources[0]):
        return sources[0] if count == 1 else site.build.tuple(sources)
    if _is_normal_scatter(site.at):
        return None
    dims = site.at.scatter_dims
    batch = batch_dims(indices, dims.index_vector_dim)
    vectors = as_list(
        site.build, indices, dims.index_vector_dim, dims.scatter_indices_batching_dims, sources[0].shape.dims
    )
    rank = updates[0].shape.rank
    order = [*(d for d in range(rank) if d not in dims.update_window_dims), *dims.update_window_dims]
    turned_updates = []
    for update in updates:
        turned = site.build.transpose(update, order)
        turned_updates.append(
            site.build.reshape(turned, (vectors.shape.dims[0], *turned.shape.dims[len(batch) :]))
        )
    numbers = ScatterDims(
        tuple(range(1, turned_updates[0].shape.rank)),
        tuple(sorted((*dims.inserted_window_dims, *dims.input_batching_dims))),
        (*dims.scatter_dims_to_operand_dims, *dims.input_batching_dims),
        1,
    )
    return site.same(*sources, vectors, *turned_updates, shape=site.shape, scatter_dims=numbers)


_NARROW, _WIDE = ("bf16", "f16"), "f32"
_COMBINED = ("add", "maximum", "minimum")


class ScatterWidener(ComputationPass):
    """Combines updates of two bytes at one place in f32, and rounds once.

    scatter(x: bf16, places, u: bf16), add  ->  convert(scatter(convert(x): f32, places, convert(u): f32))

    A frequent token's gradient is the sum of many small numbers: in bf16 it stops to grow when it is some
    hundred times as large as they are.  Devices combine f32 at one place in one step, which not all do for
    two bytes.

    Requires: no schedule.
    Ensures: scatters that combine numbers of two bytes have different places for all of them.
    Cost: linear; the sums take twice the memory until they are rounded.
    Source: mixed precision training (Micikevicius et al. 2018): sums are f32.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"scatter": (_widened,)}, lambda i: not i.has_control_edges)


def _widened(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 3 or site.shape.dtype not in _NARROW or site.at.attributes.get("unique_indices"):
        return None
    opcode = reducer(site.at.to_apply)
    if opcode not in _COMBINED:
        return None
    x, places, updates = site.operands
    wide = [site.build.convert(a, _WIDE) for a in (x, updates)]
    combine = scalar_computation(site.at.parent.module, opcode, _WIDE)
    attributes, operands = site.at.attributes, (wide[0], places, wide[1])
    shape = wide[0].shape
    scattered = site.build.add("scatter", *operands, shape=shape, called=(combine,), name="", **attributes)
    return site.build.convert(scattered, site.shape.dtype)
