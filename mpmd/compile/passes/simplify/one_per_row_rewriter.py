"""Gathers and scatters of one element per row as comparisons with the element's number, which fuse.

A loss picks the label's logit of each row so; as a comparison and a sum it joins the kernel that has the row.
"""

from __future__ import annotations

import math

import numpy as np

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, reducer
from mpmd.compile.passes.rewriter import TrackingBuilder as Builder


class OnePerRowRewriter(ComputationPass):
    """Reads and adds one element of each row by comparing positions, so that rows need not be arrays.

    y = gather(f(x), label of each row)           ->  y = reduce-add(select(position == label, f(x), 0))
    s = scatter-add(zeros, label of each row, u)  ->  s = select(position == label, broadcast(u), 0)

    A loss picks a label's logarithm from rows that elementwise work and reductions made, and its gradient
    adds to that place of zeros.  As comparisons both are part of the kernels of those rows.

    Requires: no schedule; gathers and scatters as their simplifiers leave them.
    Ensures: no such access to rows that were computed elementwise is left.
    Cost: linear.
    Source: one-hot encoding, as written by hand in losses for accelerators.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules = {"gather": (_gather,), "scatter": (_scatter,)}
        return Rewriter(computation).run(rules, lambda i: True)


def _gather(site: RewriteSite) -> HloInstruction | None:
    x, indices = site.operands
    dims = site.at.gather_dims
    computed = x.is_elementwise and x.opcode != "constant" and x.shape.info.kind == "float"
    if not computed or dims.offset_dims or any(size != 1 for size in site.at.slice_sizes):
        return None
    labelled = _label(site.build, x, indices, dims.start_index_map, dims.index_vector_dim)
    if labelled is None:
        return None
    along, label = labelled
    build, dtype = site.build, label.shape.dtype
    low, high = (build.full(n, dtype, label.shape.dims) for n in (0, x.shape.dims[along] - 1))
    inside = build.add("minimum", build.add("maximum", label, low), high)
    zero = build.constant(np.zeros((), x.shape.numpy_dtype))
    picked = build.select(_hit(build, x, along, inside), x, build.broadcast(zero, x.shape.dims))
    add = scalar_computation(site.at.parent.module, "add", x.shape.dtype)
    return build.reshape(build.reduce([picked], [zero], (along,), add), site.shape.dims)


def _scatter(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 3:
        return None
    zeros, indices, updates = site.operands
    dims = site.at.scatter_dims
    if not _is_zero(zeros) or reducer(site.at.to_apply) != "add" or dims.update_window_dims:
        return None
    labelled = _label(site.build, zeros, indices, dims.scatter_dims_to_operand_dims, dims.index_vector_dim)
    if labelled is None:
        return None
    along, label = labelled
    build, rows = site.build, [d for d in range(zeros.shape.rank) if d != along]
    wide = build.broadcast(build.reshape(updates, label.shape.dims), zeros.shape.dims, rows)
    return build.select(_hit(build, zeros, along, label), wide, zeros)


def _hit(build: Builder, x: HloInstruction, along: int, label: HloInstruction) -> HloInstruction:
    """Whether a position along a dim is the label of its row."""
    rows = [d for d in range(x.shape.rank) if d != along]
    places = build.iota(label.shape.dtype, x.shape.dims, along)
    return build.compare(places, build.broadcast(label, x.shape.dims, rows), "EQ")


def _label(
    build: Builder, x: HloInstruction, indices: HloInstruction, columns: tuple[int, ...], vector_dim: int
) -> tuple[int, HloInstruction] | None:
    """The dim along which an element of each row is read, and its position; None if others are read."""
    if vector_dim != indices.shape.rank - 1 or len(columns) != x.shape.rank:
        return None
    if max(x.shape.dims) - 1 > integer_range(indices.shape.dtype)[1]:
        return None  # positions would wrap around
    while indices.opcode in ("reshape", "bitcast") and indices.operands[0].shape.dims[-1:] == (len(columns),):
        indices = indices.operands[0]
    last = indices.shape.rank - 1
    parts = indices.operands
    if indices.opcode != "concatenate" or indices.dimensions != (last,) or len(parts) != len(columns):
        return None
    labels = [k for k, part in enumerate(parts) if part.opcode != "iota"]
    if len(labels) != 1 or any(part.shape.dims[-1] != 1 for part in parts):
        return None
    (along,) = (columns[k] for k in labels)
    rows = [d for d in range(x.shape.rank) if d != along]
    counted = {columns[k]: part.iota_dimension for k, part in enumerate(parts) if k not in labels}
    order, extents = [counted[d] for d in rows], parts[0].shape.dims
    sizes = tuple(x.shape.dims[d] for d in rows)
    in_order = order == sorted(set(order)) and tuple(extents[d] for d in order) == sizes
    if not in_order or math.prod(extents) != math.prod(sizes):
        return None
    return along, build.reshape(parts[labels[0]], sizes)


def _is_zero(value: HloInstruction) -> bool:
    while value.opcode == "broadcast":
        value = value.operands[0]
    literal = value.literal if value.opcode == "constant" else None
    return isinstance(literal, np.ndarray) and literal.size == 1 and not literal.any()
