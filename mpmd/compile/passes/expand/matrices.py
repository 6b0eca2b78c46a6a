"""Stacks of matrices, `[count, rows, columns]`, and loops over them: shared by the factorisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mpmd.compile.hlo.attributes import DotDims
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array, tuple_of
from mpmd.compile.passes.rewriter import TrackingBuilder

Values = list[HloInstruction]
Step = Callable[[TrackingBuilder, HloInstruction, Values], Sequence[HloInstruction]]

BLOCK = 32
"""Rows that are processed one by one; larger matrices are processed in blocks, by products."""


def repeat(build: TrackingBuilder, count: int, values: Sequence[HloInstruction], step: Step) -> Values:
    """`for i in range(count): values = step(i, values)`, as a loop of the program."""
    module, shape = build.computation.module, tuple_of([array("s32"), *(v.shape for v in values)])
    condition = HloBuilder.create(module, "more")
    number = condition.element(condition.parameter(shape), 0)
    condition.build(condition.compare(number, condition.constant(count, "s32"), "LT"))
    body = TrackingBuilder(module.create_computation("step"))
    state = body.parameter(shape)
    i = body.element(state, 0)
    made = step(body, i, [body.element(state, k + 1) for k in range(len(values))])
    body.build(body.tuple([body.add("add", i, body.constant(1, "s32")), *made]))
    start = build.tuple([build.constant(0, "s32"), *values])
    loop = build.loop(condition.computation, body.computation, start)
    return [build.element(loop, k + 1) for k in range(len(values))]


def stacked(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    """All leading dims of matrices as one."""
    *batch, rows, columns = value.shape.dims
    return build.reshape(value, (math.prod(batch), rows, columns))


def turned(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    """Each matrix transposed."""
    rank = value.shape.rank
    return build.transpose(value, (*range(rank - 2), rank - 1, rank - 2))


def conjugate(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    """The complex conjugate; a real number is its own."""
    if value.shape.info.kind != "complex":
        return value
    return build.add("complex", build.add("real", value), build.add("negate", build.add("imag", value)))


def part(
    build: TrackingBuilder, value: HloInstruction, rows: tuple[int, int], columns: tuple[int, int]
) -> HloInstruction:
    """A block of each matrix."""
    return build.slice(value, (0, rows[0], columns[0]), (value.shape.dims[0], rows[1], columns[1]))


def row_at(build: TrackingBuilder, value: HloInstruction, i: HloInstruction) -> HloInstruction:
    """Row i of each matrix, as `[count, columns]`."""
    count, _, columns = value.shape.dims
    zero = build.constant(0, "s32")
    return build.reshape(build.dynamic_slice(value, (zero, i, zero), (count, 1, columns)), (count, columns))


def column_at(build: TrackingBuilder, value: HloInstruction, i: HloInstruction) -> HloInstruction:
    """Column i of each matrix, as `[count, rows]`."""
    count, rows, _ = value.shape.dims
    zero = build.constant(0, "s32")
    return build.reshape(build.dynamic_slice(value, (zero, zero, i), (count, rows, 1)), (count, rows))


def compared(build: TrackingBuilder, places: HloInstruction, way: str, i: HloInstruction) -> HloInstruction:
    """Where positions compare with i."""
    return build.compare(places, build.broadcast(i, places.shape.dims), way)


def element_at(build: TrackingBuilder, vectors: HloInstruction, here: HloInstruction) -> HloInstruction:
    """The one element of each vector, `[count, n]`, where a mask is set."""
    dtype = vectors.shape.dtype
    kept = build.select(here, vectors, build.full(0, dtype, vectors.shape.dims))
    total = scalar_computation(build.computation.module, "add", dtype)
    return build.reduce([kept], [build.constant(0, dtype)], (1,), total)


def product(
    build: TrackingBuilder, a: HloInstruction, b: HloInstruction, contract: tuple[int, int]
) -> HloInstruction:
    """A product of each pair of matrices (or vectors), summed over one dim of both."""
    dims = DotDims((contract[0],), (contract[1],), (0,), (0,))
    # a factorisation loses more than the digits of one product
    return build.add("dot", a, b, dot_dims=dims, operand_precision=("highest", "highest"))


def is_nan_in(build: TrackingBuilder, value: HloInstruction) -> HloInstruction:
    """For each matrix whether it holds a NaN."""
    found = build.compare(value, value, "NE")
    any_ = scalar_computation(build.computation.module, "or", "pred")
    return build.reduce([found], [build.constant(False)], (1, 2), any_)


def block_size(n: int) -> int:
    """Rows of a block: so many that there are at most sixteen blocks."""
    return n if n <= BLOCK else max(BLOCK, -(-n // 16))
