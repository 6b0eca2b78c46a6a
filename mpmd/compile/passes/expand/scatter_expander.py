"""hlo-scatter-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.index_vectors import element
from mpmd.compile.passes.expand.scatter_simplifier import is_normal
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder
from mpmd.compile.passes.values import reducer


class ScatterExpander(ComputationPass):
    """Replaces scatters of few updates by dynamic slices.

    scatter(x, indices: [1,1], update), to_apply=add
      -> dynamic-update-slice(x, select(inside, add(dynamic-slice(x, i), update), dynamic-slice(x, i)), i)

    Requires: no schedule; scatters in the form of `hlo-scatter-simplifier`: others are left alone.
    Ensures: no such scatter into one array has `most` index vectors or fewer.
    Cost: linear.
    Source: an update whose window leaves the array is skipped, which the select does.

    Attributes:
        most: index vectors up to which a scatter is expanded.
    """

    most: int = 1

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"scatter": (self._expand,)}, is_normal)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        if len(site.operands) != 3:
            return None
        value, vectors, updates = site.operands
        if not 0 < vectors.shape.dims[0] <= self.most:
            return None
        for row in range(vectors.shape.dims[0]):
            value = _put(site, value, vectors, updates, row)
        return value


def _put(
    site: RewriteSite, value: HloInstruction, vectors: HloInstruction, updates: HloInstruction, row: int
) -> HloInstruction:
    """The array with one update applied."""
    build, dims = site.build, site.at.scatter_dims
    window = list(updates.shape.dims[1:])
    sizes = [1 if d in dims.inserted_window_dims else window.pop(0) for d in range(value.shape.rank)]
    starts = [build.constant(0, vectors.shape.dtype)] * value.shape.rank
    inside = build.constant(True)
    for column, dim in enumerate(dims.scatter_dims_to_operand_dims):
        starts[dim] = element(build, vectors, row, column)
        room = value.shape.dims[dim] - sizes[dim]
        inside = build.add("and", inside, _is_inside(build, starts[dim], room))
    first = (row, *(0 for _ in updates.shape.dims[1:]))
    update = build.slice(updates, first, (row + 1, *updates.shape.dims[1:]))
    update = build.reshape(update, sizes)
    old = build.dynamic_slice(value, starts, sizes)
    made = _combined(site, old, update)
    chosen = build.select(build.broadcast(inside, sizes), made, old)
    return build.dynamic_update_slice(value, chosen, starts)


def _is_inside(build: TrackingBuilder, start: HloInstruction, room: int) -> HloInstruction:
    """0 <= start <= room."""
    if start.shape.dtype not in ("s64", "u64"):
        start = build.convert(start, "s64")
    upper = build.compare(start, build.constant(room, start.shape.dtype), "LE")
    lower = build.compare(start, build.constant(0, start.shape.dtype), "GE")
    return build.add("and", lower, upper)


def _combined(site: RewriteSite, old: HloInstruction, update: HloInstruction) -> HloInstruction:
    """The scatter's computation on whole slices."""
    computation = site.at.to_apply
    opcode = reducer(computation)
    if opcode is not None:
        return site.build.add(opcode, old, update)
    if computation.root.opcode == "parameter":
        return (old, update)[computation.root.parameter_number]
    dims = tuple(range(old.shape.rank))
    return site.build.add("map", old, update, dimensions=dims, called=(computation,))
