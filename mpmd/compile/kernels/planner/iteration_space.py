"""Iteration spaces: the one that a reduction needs, and reductions at a position of a space."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import Index, constant, delinearized, dim, linear, strides_of
from mpmd.compile.kernels.operations import REDUCTIONS
from mpmd.compile.kernels.planner.elements import RULES, IndexMap, NoPlan, Trace, scalar_of
from mpmd.compile.kernels.planner.index_rules import spread


@dataclass(frozen=True)
class IterationSpace:
    """An iteration space: `batch | outer | row`, as in `KernelPlan`.

    Attributes:
        extents: sizes of its dims.
        batch: how many leading dims are batch dims.
        row: how many trailing dims are row dims.
    """

    extents: tuple[int, ...]
    batch: int = 0
    row: int = 0

    @property
    def outer_dims(self) -> tuple[int, ...]:
        return tuple(range(self.batch, len(self.extents) - self.row))

    @property
    def row_dims(self) -> tuple[int, ...]:
        return tuple(range(len(self.extents) - self.row, len(self.extents)))

    def count(self, dims: Collection[int]) -> int:
        return math.prod(self.extents[d] for d in dims)

    def flat(self, dims: Sequence[int]) -> Index:
        """The number of a point along some of its dims, row-major."""
        return linear([dim(d) for d in dims], strides_of([self.extents[d] for d in dims]))


def full_place(shape: Sequence[int], space: IterationSpace) -> IndexMap:
    """The index of an array that fills the space: element n at point n."""
    return delinearized(space.flat(range(len(space.extents))), shape, space.extents)


def loop_space(instruction: HloInstruction) -> tuple[IterationSpace, IndexMap]:
    """The space of an elementwise result, and its position there."""
    dims = instruction.shape.dims
    return IterationSpace(dims), tuple(dim(d) for d in range(len(dims)))


def reduce_space(reduce: HloInstruction) -> tuple[IterationSpace, IndexMap]:
    """The space of a reduction, and the position of its operand there.

    A reduction along the contiguous dim iterates over rows; one that keeps it adds rows up; one to a single
    number does the one, then the other.
    """
    dims = reduce.operands[0].shape.dims
    gone = [d for d in range(len(dims)) if d in reduce.dimensions]
    kept = [d for d in range(len(dims)) if d not in reduce.dimensions]
    real = [d for d in range(len(dims)) if dims[d] != 1]
    # To one number, over several dims: the innermost is the row, so that rows are summed in order and their
    # sums added up as columns.
    if not [d for d in kept if dims[d] != 1] and len([d for d in gone if dims[d] != 1]) > 1:
        order, batch, row = [*kept, *gone], 0, 1
        last = max(d for d in gone if dims[d] != 1)
        order = [*(d for d in order if d < last), *(d for d in order if d >= last)]
        row = len(dims) - order.index(last)
    # The contiguous dim is reduced: rows, one result each.
    elif not real or real[-1] in gone:
        order, batch, row = [*kept, *gone], 0, len(gone)
    else:
        # The contiguous dim is kept: elements of a row go to sums of their columns.  Kept dims before
        # the last reduced one are batch dims, each with column sums of its own.
        trailing = [d for d in kept if d > max(gone, default=-1)]
        leading = [d for d in kept if d not in trailing]
        order, batch, row = [*leading, *gone, *trailing], len(leading), len(trailing)
    place = [constant(0)] * len(dims)
    for position, d in enumerate(order):
        place[d] = dim(position) if dims[d] != 1 else constant(0)
    return IterationSpace(tuple(dims[d] for d in order), batch, row), tuple(place)


def window_space(instruction: HloInstruction) -> tuple[IterationSpace, IndexMap]:
    """The space of a windowed reduction: its result's dims, then the window as a row; its position."""
    dims, window = instruction.shape.dims, instruction.window.sizes
    return IterationSpace((*dims, *window), 0, len(window)), tuple(dim(d) for d in range(len(dims)))


def contraction_space(dot: HloInstruction) -> tuple[IterationSpace, IndexMap]:
    """The space of a matrix product as a reduction: its result's dims, then the summed dims."""
    dims, numbers = dot.shape.dims, dot.dot_dims
    summed = tuple(dot.operands[0].shape.dims[d] for d in numbers.lhs_contracting)
    return IterationSpace((*dims, *summed), 0, len(summed)), tuple(dim(d) for d in range(len(dims)))


# -- reductions at a position
def reducer_of(computation: HloComputation) -> str:
    """The name of the reduction that a computation of two scalars computes.

    Raises:
        NoPlan: it is not a reduction.
    """
    root = computation.root
    simple = [o.opcode for o in root.operands] == ["parameter", "parameter"]
    if root.opcode in REDUCTIONS and simple and root.operands[0] is not root.operands[1]:
        return root.opcode
    raise NoPlan(f"no kernel reduces by {computation.name}, whose result is {root.opcode}")


def _reduce(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    if len(i.operands) != 2:
        raise NoPlan("no kernel reduces several arrays at once")
    op, (source, init) = reducer_of(i.to_apply), i.operands
    gone = [d for d in range(source.shape.rank) if d in i.dimensions]
    if not gone:
        return _with_init(t, op, t.value(source, at, where), init)
    count = math.prod(source.shape.dims[d] for d in gone)
    points, axes = _axes(t.space, at, count) if count != 1 else (constant(0), ())
    inner = delinearized(points, [source.shape.dims[d] for d in gone], t.extents)
    place = list(at)
    for d, index in zip(gone, inner):
        place.insert(d, index)
    needed = t.reduced(at, where, points.dims())
    return _with_init(t, op, _reduced(t, op, t.value(source, tuple(place), needed), axes), init)


def _axes(space: IterationSpace, at: IndexMap, count: int) -> tuple[Index, tuple[str, ...]]:
    """The points of the space that a reduction at a place runs over, and along which axes."""
    # A reduction runs over row dims, outer dims, or both, as a whole: its size must be theirs, and its
    # result must not depend on them.
    used = frozenset[int]().union(*(index.dims() for index in at))
    if any(index.values() for index in at):
        raise NoPlan("a reduction at a computed position")
    row, outer = space.row_dims, space.outer_dims
    if not used & set(row) and space.count(row) == count and row:
        return space.flat(row), ("row",)
    if not used & set(outer) and space.count(outer) == count:
        return space.flat(outer), ("column",)
    if not used & {*row, *outer} and space.count((*outer, *row)) == count:
        return space.flat((*outer, *row)), ("row", "column")
    raise NoPlan("a reduction over other dims than those of the kernel")


def _reduced(t: Trace, op: str, node: int, axes: tuple[str, ...]) -> int:
    dtype = t.build.dtype(node)
    if dtype not in REDUCTIONS[op].dtypes:
        raise NoPlan(f"no kernel reduces {dtype} by {op}")
    # Two axes are two reductions, and the value between them would be rounded.
    wide = "f32" if dtype in ("bf16", "f16") and len(axes) > 1 else dtype
    node = t.build.convert(node, wide)  # rounded once, at the end
    for axis in axes:
        node = t.build.reduce_row(op, node) if axis == "row" else t.build.reduce_column(op, node)
    return t.build.convert(node, dtype)


def _with_init(t: Trace, op: str, node: int, init: HloInstruction) -> int:
    """A reduction's result joined with its initial value, unless that is the identity."""
    if init.opcode == "constant" and scalar_of(init) == REDUCTIONS[op].identity(init.shape.dtype):
        return node
    return t.build.apply(op, t.value(init, ()), node)


def _reduce_window(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    if len(i.operands) != 2:
        raise NoPlan("no kernel reduces windows of several arrays at once")
    op, (source, init), inside, place = reducer_of(i.to_apply), i.operands, -1, []
    row = t.space.row_dims
    if [t.extents[d] for d in row] != list(i.window.sizes):
        raise NoPlan("a window other than the kernel's row")
    where = t.reduced(at, where, row)
    for index, d, step, size in zip(at, row, i.window.dims, source.shape.dims):
        moved = index * step.stride + dim(d) * step.rhs_dilation + -step.pad_low
        # Padding and holes of a dilated operand count as the neutral value.
        conditions, moved = spread(t, moved, size, step.lhs_dilation, step.pad_low)
        inside = t.guarded(inside, *conditions)
        place.append(moved)
    node = t.value(source, tuple(place), t.guarded(where, inside))
    if inside >= 0:
        neutral = t.build.constant(REDUCTIONS[op].identity(source.shape.dtype), source.shape.dtype)
        node = t.build.apply("select", inside, node, neutral)
    return _with_init(t, op, _reduced(t, op, node, ("row",)), init)


def _dot(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    """A matrix product as a sum over the row of the space."""
    lhs, rhs, numbers, row = *i.operands[:2], i.dot_dims, t.space.row_dims
    if [t.extents[d] for d in row] != [lhs.shape.dims[d] for d in numbers.lhs_contracting]:
        raise NoPlan("a product summed over other dims than the kernel's row")
    where = t.reduced(at, where, row)
    batch, rest = len(numbers.lhs_batch), list(at[len(numbers.lhs_batch) :])
    # a product of two f16 may be infinite where the sum is not
    dtype, sides = "f32" if i.shape.dtype in ("bf16", "f16") else i.shape.dtype, []
    for side, batches, summed in (
        (lhs, numbers.lhs_batch, numbers.lhs_contracting),
        (rhs, numbers.rhs_batch, numbers.rhs_contracting),
    ):
        place = [constant(0)] * side.shape.rank
        for number, d in enumerate(batches[:batch]):
            place[d] = at[number]
        for d, point in zip(summed, row):
            place[d] = dim(point)
        for d in range(side.shape.rank):
            if d not in batches and d not in summed:
                place[d] = rest.pop(0)
        sides.append(t.build.convert(t.value(side, tuple(place), where), dtype))
    if i.shape.dtype == "pred":
        raise NoPlan("no kernel multiplies matrices of pred")
    total = _reduced(t, "add", t.build.apply("multiply", *sides), ("row",))
    return t.build.convert(total, i.shape.dtype)


RULES.update({"reduce": _reduce, "reduce-window": _reduce_window, "dot": _dot})
