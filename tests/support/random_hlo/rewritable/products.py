"""Products and reductions in forms that passes bring to others."""

from __future__ import annotations

from mpmd.compile.hlo.attributes import ConvDims, DotDims, Window, WindowDim
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array, tuple_of
from tests.support.random_hlo.rewritable.pool import Pool


def turned_product(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    n = x.shape.dims[1]
    other = p.build.transpose(p.fresh("f32", (3, n)), (1, 0))
    made = p.build.dot(x, other)
    return p.build.transpose(made, (1, 0)) if p.rng.random() < 0.5 else made


def shared_side(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    n = x.shape.dims[1]
    a, b = p.fresh("f32", (n, 2)), p.fresh("f32", (n, 3))
    first, second = p.build.dot(x, a), p.build.dot(x, b)
    total = p.build.reduce([second], [p.scalar(0, "f32")], (1,), p.reducer("add", "f32"))
    return p.build.add("add", first, p.build.broadcast(total, first.shape.dims, (0,)))


def outer_product(p: Pool) -> HloInstruction:
    x = p.pick("f32", 1)
    column = p.build.reshape(x, (x.shape.size, 1))
    row = p.fresh("f32", (1, 4))
    return p.build.dot(column, row)


def odd_product(p: Pool) -> HloInstruction:
    batch, m, k, n = (p.choose(1, 2, 3) for _ in range(4))
    a, b = p.fresh("f32", (k, m, batch, 2)), p.fresh("f32", (n, batch, 2, k))
    dims = DotDims((0, 3), (3, 2), (2,), (1,))
    made = p.build.dot(a, b, dims)
    assert made.shape.dims == (batch, m, n)
    return made


def many_free_dims(p: Pool) -> HloInstruction:
    a, b = p.fresh("f32", (2, 3, 4)), p.fresh("f32", (2, 2, 4))
    return p.build.dot(a, b, DotDims((2,), (2,)))


def many_batches(p: Pool) -> HloInstruction:
    a, b = p.fresh("f32", (2, 3, 2, 4)), p.fresh("f32", (2, 3, 4, 2))
    return p.build.dot(a, b, DotDims((3,), (2,), (0, 1), (0, 1)))


def reductions(p: Pool) -> HloInstruction:
    x = p.pick()
    if not x.shape.rank:
        return x
    opcode, init = p.choose(("add", 0), ("maximum", -9), ("add", 1), ("minimum", 2**20))
    kind = p.choose("turned", "flat", "ones", "twice", "copies", "plain")
    dims: tuple[int, ...] = (0,)
    if kind == "turned":
        x = p.build.transpose(x, p.order(x.shape.rank))
    elif kind == "flat":
        x, dims = p.build.reshape(x, (x.shape.size, 1)), (0, 1)
    elif kind == "ones":
        x, dims = p.build.reshape(x, (1, *x.shape.dims)), (0, 1)
    elif kind == "copies":
        x = p.build.broadcast(x, (3, *x.shape.dims), range(1, x.shape.rank + 1))
    start, computation = p.scalar(init, x.shape.dtype), p.reducer(opcode, x.shape.dtype)
    made = p.build.reduce([x], [start], dims, computation)
    if kind == "twice" and made.shape.rank:
        made = p.build.reduce([made], [start], (0,), computation)
    return made


def spread_sum(p: Pool) -> HloInstruction:
    x = p.pick("f32", 3)
    dims = p.choose((0, 2), (1,), (0, 1), (0,))
    kept = [d for d in range(3) if d not in dims]
    total = p.build.reduce([x], [p.scalar(0, "f32")], dims, p.reducer("add", "f32"))
    return p.build.add("subtract", x, p.build.broadcast(p.small(total), x.shape.dims, kept))


def patches(p: Pool) -> HloInstruction:
    image, kernel = p.fresh("f32", (2, 4, 4, 3)), p.fresh("f32", (2, 2, 3, 5))
    window = Window((WindowDim(2, 2), WindowDim(2, 2)))
    dims = ConvDims(0, 3, (1, 2), 2, 3, (0, 1), 0, 3, (1, 2))
    return p.build.add(
        "convolution", image, kernel, shape=array("f32", (2, 2, 2, 5)), window=window, conv_dims=dims
    )


def pooling_gradient(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    distinct = p.build.iota("f32", (x.shape.size,), 0)
    x = p.build.add("subtract", p.build.reshape(distinct, x.shape.dims), p.full(1, x))
    window = Window((WindowDim(2, 1, 1, 0), WindowDim(1)))
    source = p.fresh("f32", x.shape.dims)
    select = HloBuilder.create(p.draft.module, "ge")
    scalar = array("f32")
    select.build(select.compare(select.parameter(scalar), select.parameter(scalar), "GE"))
    called = (select.computation, p.reducer("add", "f32"))
    return p.build.add("select-and-scatter", x, source, p.scalar(0, "f32"), window=window, called=called)


def batch_norm(p: Pool) -> HloInstruction:
    x = p.fresh("f32", (4, 3))
    scale, offset = p.fresh("f32", (3,)), p.fresh("f32", (3,))
    common = {"epsilon": 1.0, "feature_index": 1}
    kind = p.choose("training", "inference", "grad")
    vector = array("f32", (3,))
    if kind == "training":
        shape = tuple_of([x.shape, vector, vector])
        made = p.build.add("batch-norm-training", x, scale, offset, shape=shape, **common)
        value = p.build.element(made, p.choose(0, 1, 2))
    else:
        mean, deviation = p.fresh("f32", (3,)), p.build.add("abs", p.fresh("f32", (3,)))
        if kind == "inference":
            value = p.build.add("batch-norm-inference", x, scale, offset, mean, deviation, **common)
        else:
            shape = tuple_of([x.shape, vector, vector])
            made = p.build.add("batch-norm-grad", x, scale, mean, deviation, p.like(x), shape=shape, **common)
            value = p.build.element(made, p.choose(0, 1, 2))
    # Coarse, so that rounding in another order is not seen; small, so that borders are far apart.
    return p.build.add("multiply", value, p.full(2.0**-12, value))


PATTERNS = (
    turned_product,
    shared_side,
    outer_product,
    odd_product,
    many_free_dims,
    many_batches,
    reductions,
    spread_sum,
    patches,
    pooling_gradient,
    batch_norm,
)
