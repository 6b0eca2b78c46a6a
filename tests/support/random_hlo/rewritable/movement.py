"""Redundant data movement."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.attributes import GatherDims, PadDim, ScatterDims
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from tests.support.random_hlo.rewritable.pool import Pool


def transposes(p: Pool) -> HloInstruction:
    x = p.pick()
    turned = p.build.add("transpose", x, dimensions=p.order(x.shape.rank))
    return p.build.add("transpose", turned, dimensions=p.order(x.shape.rank))


def reshapes(p: Pool) -> HloInstruction:
    x = p.pick()
    flat = p.build.add("reshape", x, shape=x.shape.with_dims((x.shape.size,)))
    ones = [*x.shape.dims]
    ones.insert(int(p.rng.integers(len(ones) + 1)), 1)
    return p.build.add("reshape", flat, shape=x.shape.with_dims(ones))


def moved_sides(p: Pool) -> HloInstruction:
    x = p.pick()
    y = p.like(x)
    if p.rng.random() < 0.5:
        order = p.order(x.shape.rank)
        sides = [p.build.transpose(v, order) for v in (x, y)]
    else:
        sides = [p.build.reshape(v, (x.shape.size, 1)) for v in (x, y)]
    made = p.build.add(p.choose("add", "subtract", "maximum"), *sides)
    made = p.build.add("multiply", made, p.full(0.5 if x.shape.dtype == "f32" else 2, made))
    return p.build.add("abs", made)


def broadcasts(p: Pool) -> HloInstruction:
    x = p.pick()
    dims = (2, *x.shape.dims)
    once = p.build.broadcast(x, dims, range(1, len(dims)))
    again = p.build.broadcast(once, (*dims, 2), range(len(dims)))
    kind = p.choose("reshape", "transpose", "slice", "none")
    if kind == "reshape":
        return p.build.add("reshape", again, shape=x.shape.with_dims((1, *again.shape.dims)))
    if kind == "transpose":
        return p.build.transpose(again, p.order(len(dims) + 1))
    if kind == "slice":
        return p.build.slice(again, [1, *[0] * len(dims)], [2, *again.shape.dims[1:]])
    return p.build.add("reverse", again, dimensions=(0,))


def turned_broadcast(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    n, m = x.shape.dims
    return p.build.broadcast(x, (m, 2, n), (2, 0))


def ones(p: Pool) -> HloInstruction:
    x = p.pick()
    wide = p.build.reshape(x, (1, *x.shape.dims))
    order = (*range(1, wide.shape.rank), 0)
    dims = p.build.transpose(wide, order)
    return p.build.broadcast(
        p.build.reshape(dims, x.shape.dims), (3, *x.shape.dims), range(1, x.shape.rank + 1)
    )


def slices(p: Pool) -> HloInstruction:
    x = p.pick()
    d = p.axis(x) if x.shape.rank else 0
    if not x.shape.rank:
        return x
    n = x.shape.dims[d]
    cut = n // 2
    a = _slice(p, x, d, 0, cut)
    b = _slice(p, x, d, cut, n)
    joined = p.build.add("concatenate", a, b, dimensions=(d,))
    extra = p.build.add("concatenate", joined, p.like(x), dimensions=(d,))
    low = int(p.rng.integers(0, n + 1))
    return _slice(p, extra, d, low, low + n, p.choose(1, 1, 2))


def _slice(p: Pool, x: HloInstruction, d: int, low: int, high: int, step: int = 1) -> HloInstruction:
    starts = [low if i == d else 0 for i in range(x.shape.rank)]
    limits = [high if i == d else n for i, n in enumerate(x.shape.dims)]
    return p.build.slice(x, starts, limits, [step if i == d else 1 for i in range(x.shape.rank)])


def slice_of_slice(p: Pool) -> HloInstruction:
    x = p.build.pad(p.pick("f32", 2), p.scalar(1, "f32"), [PadDim(2, 3), PadDim(1, 1)])
    inner = p.build.slice(x, (1, 0), x.shape.dims, (2, 1))
    return p.build.slice(inner, (0, 1), inner.shape.dims, (1, p.choose(1, 2)))


def pads(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    if not x.shape.rank:
        return x
    zero = p.scalar(0, "f32")
    kind = p.choose("twice", "negative", "nothing", "same")
    first = [PadDim(1, 2)] * x.shape.rank
    if kind == "twice":
        return p.build.pad(p.build.pad(x, zero, first), zero, first)
    if kind == "negative":
        return p.build.pad(x, zero, [PadDim(-1 if n > 1 else 0, 2) for n in x.shape.dims])
    if kind == "nothing":
        return p.build.pad(x, zero, [PadDim(0, 0)] * x.shape.rank)
    return p.build.pad(p.build.broadcast(zero, x.shape.dims), zero, first)


def joined_constants(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    if not x.shape.rank:
        return x
    d = p.axis(x)
    filler = p.build.full(2, "f32", x.shape.dims)
    empty = p.build.full(0, "f32", [0 if i == d else n for i, n in enumerate(x.shape.dims)])
    parts = [p.choose(x, filler), filler, empty]
    return p.build.add("concatenate", *parts, dimensions=(d,))


def dynamic(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    known = p.rng.random() < 0.5
    start = p.scalar(p.choose(-1, 0, 1, 9), "s32") if known else p.fresh("s32", ())
    zero = p.scalar(0, "s32")
    sizes = ((x.shape.dims[0] + 1) // 2, x.shape.dims[1])
    part = p.build.dynamic_slice(x, [start, zero], sizes)
    kind = p.choose("slice", "itself", "update", "splat", "read")
    if kind == "itself":
        return p.build.dynamic_update_slice(x, part, [start, zero])
    if kind == "splat":
        return p.build.dynamic_update_slice(p.full(1, x), part, [start, zero])
    update = p.build.add("negate", part)
    if kind == "read":
        written = p.build.dynamic_update_slice(x, update, [start, zero])
        return p.build.dynamic_slice(written, [start, zero], sizes)
    if kind == "update":
        once = p.build.dynamic_update_slice(x, part, [start, zero])
        return p.build.dynamic_update_slice(once, update, [start, zero])
    return part


def gathers(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    n, m = x.shape.dims
    kind = p.choose("iota", "rows", "one", "batched", "normal", "normal")
    if kind == "normal":
        return p.build.gather(x, p.fresh("s32", (1, 1)), GatherDims((1,), (0,), (0,), 1), (1, m))
    if kind == "one":
        indices = p.build.reshape(p.pick("s32", 0), (1,))
        return p.build.gather(x, indices, GatherDims((0,), (0,), (0,), 0), (1, m))
    if kind == "batched":
        indices = p.fresh("s32", (n, 2))
        dims = GatherDims((), (1,), (1,), 2, (0,), (0,))
        return p.build.gather(x, indices, dims, (1, 1))
    if kind == "iota":
        indices = p.build.iota("s32", (n,), 0)
    else:
        indices = p.fresh("s32", (3,))
    return p.build.gather(x, indices, GatherDims((1,), (0,), (0,), 1), (1, m))


def scatters(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    n, m = x.shape.dims
    kind = p.choose("row", "rows", "batched", "normal", "normal")
    if kind == "normal":
        indices, updates = p.fresh("s32", (1, 1)), p.fresh("f32", (1, m))
        return p.build.add(
            "scatter",
            x,
            indices,
            updates,
            scatter_dims=ScatterDims((1,), (0,), (0,), 1),
            called=(p.reducer("add", "f32"),),
        )
    if kind == "batched":
        indices, updates = p.fresh("s32", (n, 2)), p.fresh("f32", (n, 2))
        dims = ScatterDims((), (1,), (1,), 2, (0,), (0,))
        return p.build.add(
            "scatter", x, indices, updates, scatter_dims=dims, called=(p.reducer("add", "f32"),)
        )
    if kind == "row":
        indices, updates = p.fresh("s32", (1,)), p.fresh("f32", (m,))
        dims = ScatterDims((0,), (0,), (0,), 0)
    else:
        indices, updates = p.fresh("s32", (3, 1)), p.fresh("f32", (3, m))
        dims = ScatterDims((1,), (0,), (0,), 1)
    return p.build.add(
        "scatter",
        x,
        indices,
        updates,
        scatter_dims=dims,
        called=(p.reducer(p.choose("add", "maximum"), "f32"),),
    )


def labels(p: Pool) -> HloInstruction:
    """One element of each row, read or added to, at a place that may lie outside of the row."""
    x = p.build.add("negate", p.pick("f32", 2))
    n = x.shape.dims[0]
    places = p.build.concatenate([p.build.iota("s32", (n, 1), 0), p.fresh("s32", (n, 1))], 1)
    if p.choose("read", "add") == "read":
        return p.build.gather(x, places, GatherDims((), (0, 1), (0, 1), 1), (1, 1))
    dims = ScatterDims((), (0, 1), (0, 1), 1)
    return p.build.add(
        "scatter",
        p.full(0, x),
        places,
        p.fresh("f32", (n,)),
        scatter_dims=dims,
        called=(p.reducer("add", "f32"),),
    )


def sorts(p: Pool) -> HloInstruction:
    from mpmd.compile.hlo.builder import HloBuilder
    from mpmd.compile.hlo.shape import array

    x = p.pick("f32")
    if not x.shape.rank:
        return x
    order = HloBuilder.create(p.draft.module, "order")
    a, b = order.parameter(array("f32")), order.parameter(array("f32"))
    order.parameter(array("s32")), order.parameter(array("s32"))
    order.build(order.compare(a, b, "LT"))
    d = p.axis(x)
    places = p.build.iota("s32", x.shape.dims, d)
    made = p.build.add("sort", x, places, dimensions=(d,), is_stable=True, called=(order.computation,))
    return p.build.element(made, p.choose(0, 0, 1))


def top(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    if not x.shape.rank:
        return x
    made = p.build.add("topk", x, k=1 + x.shape.dims[-1] // 2, largest=True)
    return p.build.element(made, p.choose(0, 1))


def empty(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    nothing = p.fresh("f32", (0, *x.shape.dims))
    zero = p.scalar(0, "f32")
    negated = p.build.add("negate", nothing)
    total = p.build.reduce([negated], [zero], (0,), p.reducer("add", "f32"))
    return p.build.add("add", total, x)


def windows(p: Pool) -> HloInstruction:
    from mpmd.compile.hlo.attributes import Window, WindowDim

    x = p.pick("f32", 2)
    n = x.shape.dims[0]
    window = Window((WindowDim(n, 1, n - 1, 0), WindowDim(1)))
    zero = p.scalar(0, "f32")
    return p.build.add("reduce-window", x, zero, window=window, called=(p.reducer("add", "f32"),))


def tuples(p: Pool) -> HloInstruction:
    a, b = p.pick(), p.pick()
    pair = p.build.tuple([a, b])
    elements = [p.build.add("get-tuple-element", pair, index=i) for i in (0, 1)]
    barrier = p.build.add("opt-barrier", p.build.tuple(elements))
    assert barrier.shape.logical is tuple_of([a.shape, b.shape]).logical
    return p.build.element(barrier, p.choose(0, 1))


def big_constant(p: Pool) -> HloInstruction:
    x = p.pick("f32", 2)
    table = p.build.constant(np.arange(x.shape.size, dtype=np.float32).reshape(x.shape.dims) % 3)
    turned = p.build.transpose(p.build.transpose(table, (1, 0)), (1, 0))
    return p.build.add("add", turned, x)


PATTERNS = (
    transposes,
    reshapes,
    moved_sides,
    broadcasts,
    turned_broadcast,
    ones,
    slices,
    slice_of_slice,
    pads,
    joined_constants,
    dynamic,
    gathers,
    labels,
    scatters,
    sorts,
    top,
    empty,
    windows,
    tuples,
    big_constant,
)
