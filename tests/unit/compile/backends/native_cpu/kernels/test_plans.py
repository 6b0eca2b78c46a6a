"""Plans of every kind, written out and at random: the CPU's kernels against the evaluator."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.column import ColumnKernel
from mpmd.compile.backends.native_cpu.kernels.loop import LoopKernel
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.kernels.row import RowKernel
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, delinearized, dim, linear, strides_of, value
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from tests.support.targets import runs_here

HOST, AVX2 = host_target(), named_target("avx2")
FAR = {"l2_bytes": 256, "l3_bytes": 512}  # caches that hold next to nothing
TARGETS = {"host": HOST, "avx2": AVX2, "far": replace(HOST, **FAR), "far avx2": replace(AVX2, **FAR)}
CANARY = 99


def copied(arrays):
    """Copies that start at lines, as XLA's buffers do."""
    copies = [aligned_empty(a.shape, a.dtype) for a in arrays]
    for copy, array in zip(copies, arrays, strict=True):
        copy[...] = array
    return copies


def check(plan, arrays=None, *, targets=("host", "avx2"), kinds=None, tolerance=2e-5):
    """Run a plan everywhere; what no store writes must keep its canary.  Returns the last results."""
    rng = np.random.default_rng(0)
    given_arrays = arrays or {}
    base = []
    for operand in plan.operands:
        kind = NUMPY_DTYPE[operand.dtype]
        if operand.name in given_arrays:
            base.append(np.asarray(given_arrays[operand.name]).astype(kind).reshape(-1).copy())
        elif plan.operands.index(operand) in plan.results:
            base.append(np.full(operand.size, CANARY).astype(kind))
        else:
            base.append((rng.standard_normal(operand.size) * 3).astype(kind))
    expected = [a.copy() for a in base]
    evaluate(plan, expected)
    native = expected
    for name in targets:
        if not runs_here(TARGETS[name]):
            continue
        sequence = plan_kernels(plan, TARGETS[name])
        if kinds:
            assert [type(k) for k in sequence.kernels][: len(kinds)] == list(kinds), sequence.kernels
        outcomes = []
        for threads in (1, 3):
            native = copied(base) if name.startswith("far") else [a.copy() for a in base]
            DirectSequence(sequence, TARGETS[name], threads=threads)(*native)
            outcomes.append(native)
        for operand, one, three, wanted in zip(plan.operands, *outcomes, expected, strict=True):
            np.testing.assert_array_equal(one, three, err_msg=f"{operand.name} depends on the threads")
            if one.dtype.kind in "biu":
                np.testing.assert_array_equal(one, wanted, err_msg=f"{operand.name} on {name}\n{plan.text()}")
                continue
            loose = {"bfloat16": 2e-2, "float16": 3e-3}.get(one.dtype.name, tolerance)
            scale = np.nanmax(np.abs(np.where(np.isfinite(w := wanted.astype(np.float64)), w, 0)), initial=1)
            np.testing.assert_allclose(
                one.astype(np.float64), w, rtol=loose, atol=loose * scale * 0.1,
                err_msg=f"{operand.name} on {name}\n{plan.text()}",
            )  # fmt: skip
    return native


def softmax(rows, width, dtype="f32"):
    b = PlanBuilder("softmax", (rows, width), row_dims=1)
    x, y = b.operand("x", dtype, rows * width), b.operand("y", dtype, rows * width)
    v = b.convert(b.load_dense(x), "f32")
    e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
    b.store_dense(y, b.convert(b.apply("divide", e, b.reduce_row("add", e)), dtype))
    return b.finish()


@pytest.mark.parametrize("width", [1, 3, 16, 33, 64, 100, 517])
def test_softmax_rows(width):
    check(softmax(5, width), kinds=[RowKernel], tolerance=2e-6)


def test_softmax_in_bf16_and_with_infinities():
    check(softmax(4, 70, "bf16"))
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    x[0, 5:], x[1, 7], x[2, 3] = -np.inf, np.nan, np.inf
    y = check(softmax(3, 40), {"x": x})[1].reshape(3, 40)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all() and np.isnan(y[2]).all()


def test_a_pass_keeps_what_is_expensive_and_repeats_what_is_cheap():
    kernel = plan_kernels(softmax(5, 100), host_target()).kernels[0]
    kept = [[kernel.plan.nodes[n].op for n in p.keeps] for p in kernel.passes]
    read = [[kernel.plan.nodes[n].op for n in p.reads] for p in kernel.passes]
    assert kept == [[], ["exponential"], []] and read == [[], [], ["exponential"]]


def layer_norm_backward(rows, width):
    b = PlanBuilder("layer_norm_backward", (rows, width), row_dims=1)
    n = rows * width
    x, dy, g = b.operand("x", "f32", n), b.operand("dy", "f32", n), b.operand("g", "f32", width)
    dx, dg, db = b.operand("dx", "f32", n), b.operand("dg", "f32", width), b.operand("db", "bf16", width)
    mean_out, total = b.operand("mean", "f32", rows), b.operand("total", "f32", 1)
    op, inverse = b.apply, b.constant(1 / width, "f32")
    vx, vdy, vg = b.load_dense(x), b.load_dense(dy), b.load_dense(g, (1,))
    mean = op("multiply", b.reduce_row("add", vx), inverse)
    centred = op("subtract", vx, mean)
    variance = op("multiply", b.reduce_row("add", op("multiply", centred, centred)), inverse)
    rstd = op("rsqrt", op("add", variance, b.constant(1e-5, "f32")))
    hat, weighted = op("multiply", centred, rstd), op("multiply", vdy, vg)
    s1 = op("multiply", b.reduce_row("add", weighted), inverse)
    s2 = op("multiply", b.reduce_row("add", op("multiply", weighted, hat)), inverse)
    inner = op("subtract", op("subtract", weighted, s1), op("multiply", hat, s2))
    b.store_dense(dx, op("multiply", rstd, inner))
    b.store_dense(dg, b.reduce_column("add", op("multiply", vdy, hat)), (1,))
    b.store_dense(db, b.convert(b.reduce_column("add", vdy), "bf16"), (1,))
    b.store_dense(mean_out, mean, (0,))
    b.store(total, constant(0), b.reduce_column("add", mean))
    return b.finish()


@pytest.mark.parametrize("rows,width", [(300, 100), (7, 33), (64, 5)])
def test_layer_norm_backward_with_sums_over_rows_on_the_side(rows, width):
    plan = layer_norm_backward(rows, width)
    assert plan.kind == "mixed"
    check(plan, kinds=[RowKernel], tolerance=1e-4)


@pytest.mark.parametrize("shape", [(1000, 100), (200, 5), (3, 700), (40, 2, 33)])
def test_column_sums_with_a_store_at_every_point(shape):
    b = PlanBuilder("column", shape, batch_dims=len(shape) - 2, row_dims=1)
    n = int(np.prod(shape))
    v = b.load_dense(b.operand("x", "f32", n))
    kept = (*range(len(shape) - 2), len(shape) - 1)
    half = b.apply("multiply", b.reduce_column("add", v), b.constant(0.5, "f32"))
    b.store_dense(b.operand("half", "f32", n // shape[-2]), half, kept)
    b.store_dense(b.operand("largest", "f32", n // shape[-2]), b.reduce_column("maximum", v), kept)
    b.store_dense(b.operand("minus", "f32", n), b.apply("negate", v))
    check(b.finish(), kinds=[ColumnKernel], tolerance=1e-5)


def test_sum_of_everything_with_a_guarded_tail():
    n, width = 5003, 64
    rows = -(-n // width)
    b = PlanBuilder("norm", (rows, width), row_dims=1)
    position = dim(0) * width + dim(1)
    inside = b.apply("compare-lt", b.index(position), b.constant(n, "s64"))
    v = b.load(b.operand("x", "f32", n), position, where=inside)
    v = b.apply("select", inside, v, b.constant(0.0, "f32"))
    square = b.reduce_column("add", b.reduce_row("add", b.apply("multiply", v, v)))
    b.store(b.operand("norm", "f32", 1), constant(0), b.apply("sqrt", square))
    x = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    norm = check(b.finish(), {"x": x}, tolerance=1e-6)[1]
    np.testing.assert_allclose(norm, np.linalg.norm(x.astype(np.float64)), rtol=1e-6)


def test_several_row_dims_and_a_row_that_is_not_contiguous():
    b = PlanBuilder("inner", (6, 3, 21), row_dims=2)  # sums over dims 0 and 2 of x[3, 6, 21]
    x = b.operand("x", "f32", 6 * 3 * 21)
    v = b.load(x, linear([dim(1), dim(0), dim(2)], strides_of((3, 6, 21))))
    mean = b.apply("multiply", b.reduce_row("add", v), b.constant(1 / 63, "f32"))
    e = b.apply("exponential", b.apply("subtract", v, mean))
    b.store_dense(b.operand("share", "f32", 6 * 63), b.apply("divide", e, b.reduce_row("add", e)))
    check(b.finish(), kinds=[RowKernel])


def test_gather_scatter_and_slices_at_dynamic_places():
    tokens, table, width = 50, 20, 24
    b = PlanBuilder("embed", (tokens, width))
    ids = b.load(b.operand("ids", "s32", tokens), dim(0))
    ids = b.apply("clamp", b.constant(0, "s32"), ids, b.constant(table - 1, "s32"))
    row = value(ids) * width + dim(1)
    b.store_dense(b.operand("out", "f32", tokens * width), b.load(b.operand("w", "f32", table * width), row))
    picked = np.random.default_rng(0).integers(-5, 30, tokens)
    check(b.finish(), {"ids": picked}, kinds=[LoopKernel])

    b = PlanBuilder("scatter", (tokens, width))
    ids = b.load(b.operand("ids", "s32", tokens), dim(0))
    legal = b.apply(
        "and",
        b.apply("compare-ge", ids, b.constant(0, "s32")),
        b.apply("compare-lt", ids, b.constant(table, "s32")),
    )
    update = b.load_dense(b.operand("g", "f32", tokens * width))
    b.store(
        b.operand("dw", "f32", table * width), value(ids) * width + dim(1), update, combine="add", where=legal
    )
    check(b.finish(), {"ids": picked, "dw": np.zeros(table * width)})

    b = PlanBuilder("lanes", (tokens,))  # every lane has its own place, and lanes collide
    ids = b.apply("remainder", b.load(b.operand("ids", "u32", tokens), dim(0)), b.constant(7, "u32"))
    b.store(b.operand("counts", "s32", 7), value(ids), b.constant(1, "s32"), combine="add")
    b.store(b.operand("copy", "f32", tokens), dim(0), b.load(b.operand("t", "f32", 7), value(ids)))
    check(b.finish(), {"ids": np.random.default_rng(1).integers(0, 1000, tokens), "counts": np.zeros(7)})


def test_pad_concatenate_and_reverse():
    b = PlanBuilder("pad", (5, 40))
    at = [dim(0) + -1, dim(1) + -3]
    inside = None
    for index, extent in zip(at, (3, 30), strict=True):
        for bound, op in ((0, "compare-ge"), (extent, "compare-lt")):
            test = b.apply(op, b.index(index, "s32"), b.constant(bound, "s32"))
            inside = test if inside is None else b.apply("and", inside, test)
    x = b.load(b.operand("x", "f32", 90), linear(at, (30, 1)), where=inside)
    b.store_dense(b.operand("y", "f32", 200), b.apply("select", inside, x, b.constant(-7.0, "f32")))
    reverse = linear([dim(0) * -1 + 4, dim(1) * -1 + 39], (40, 1))
    b.store_dense(b.operand("z", "bf16", 200), b.load(b.operand("r", "bf16", 200), reverse))
    check(b.finish())


def test_empty_and_single_spaces():
    for shape in ((0,), (3, 0), (), (1, 1)):
        b = PlanBuilder("tiny", shape)
        n = int(np.prod(shape))
        b.store_dense(b.operand("y", "f32", n), b.apply("negate", b.load_dense(b.operand("x", "f32", n))))
        check(b.finish())
    b = PlanBuilder("empty_rows", (4, 0), row_dims=1)
    v = b.load_dense(b.operand("x", "f32", 0))
    b.store_dense(b.operand("sum", "f32", 4), b.reduce_row("add", v), (0,))
    got = check(b.finish())[1]
    assert (got == 0).all(), "a sum over nothing is zero"


def test_updates_in_place_and_denormals():
    b = PlanBuilder("adam", (1000,))
    p, g = b.operand("p", "f32", 1000), b.operand("g", "f32", 1000)
    step = b.apply("multiply", b.load_dense(g), b.constant(1e-3, "f32"))
    b.store_dense(p, b.apply("subtract", b.load_dense(p), step))
    check(b.finish(), {"p": np.full(1000, 1e-41), "g": np.linspace(0, 1e-37, 1000)})


@st.composite
def plans(draw):
    """A random plan: operands read through random views, a random DAG, random reductions and stores."""
    kind = draw(st.sampled_from(["loop", "row", "column", "mixed"]))
    rank = draw(st.integers(1 if kind == "loop" else 2, 4))
    extents = tuple(draw(st.sampled_from([1, 2, 3, 4, 6, 16, 17, 40])) for _ in range(rank))
    row_dims = 0 if kind == "loop" else draw(st.integers(1, rank - 1))
    batch_dims = draw(st.integers(0, rank - row_dims - 1)) if kind != "loop" else 0
    b = PlanBuilder("random", extents, batch_dims=batch_dims, row_dims=row_dims)
    loads = [draw_load(draw, b, extents, k) for k in range(draw(st.integers(1, 3)))]
    values = list(loads)
    for _ in range(draw(st.integers(1, 6))):
        values.append(draw_apply(draw, b, values, loads))
        if kind in ("row", "mixed") and draw(st.booleans()):
            values.append(b.reduce_row(draw(st.sampled_from(["add", "maximum", "minimum"])), values[-1]))
    dense = tuple(range(rank))
    stored = draw(st.permutations(dense))
    place = linear([dim(d) for d in stored], strides_of([extents[d] for d in stored]))
    b.store(b.operand("y", "f32", int(np.prod(extents))), place, values[-1])
    if kind in ("column", "mixed"):
        kept = tuple(d for d in dense if d < batch_dims or d >= rank - row_dims)
        total = b.reduce_column("add", b.apply("add", values[-1], values[0]))
        size = int(np.prod([extents[d] for d in kept]))
        b.store_dense(
            b.operand("sums", "f32", size), b.apply("multiply", total, b.constant(0.25, "f32")), kept
        )
    if kind in ("row", "mixed"):
        kept = tuple(range(rank - row_dims))
        size = int(np.prod([extents[d] for d in kept]))
        b.store_dense(b.operand("row_sums", "f32", size), b.reduce_row("add", values[-1]), kept)
    return b.finish()


def draw_load(draw, b, extents, number):
    """A value read from an operand through a transpose, broadcast, slice, reversal or reshape."""
    rank, view = (
        len(extents),
        draw(st.sampled_from(["transpose", "broadcast", "slice", "reverse", "reshape"])),
    )
    dtype = draw(st.sampled_from(["f32", "f32", "bf16", "s8", "f64"]))
    dims = [dim(d) for d in range(rank)]
    shape, index = list(extents), dims
    if view == "transpose":
        order = draw(st.permutations(range(rank)))
        shape, index = [extents[d] for d in order], [dims[d] for d in order]
    elif view == "broadcast":
        kept = [d for d in range(rank) if draw(st.booleans())]
        shape, index = [extents[d] for d in kept], [dims[d] for d in kept]
    elif view == "slice":
        steps = [draw(st.integers(1, 2)) for _ in range(rank)]
        starts = [draw(st.integers(0, 2)) for _ in range(rank)]
        shape = [s + (e - 1) * k + 1 + 1 for e, s, k in zip(extents, starts, steps, strict=True)]
        index = [d * k + s for d, s, k in zip(dims, starts, steps, strict=True)]
    elif view == "reverse":
        flipped = draw(st.integers(0, rank - 1))
        index = [d * -1 + (extents[k] - 1) if k == flipped else d for k, d in enumerate(dims)]
    else:  # the operand is the transpose of another shape of the same size
        position = linear(dims, strides_of(extents))
        total = int(np.prod(extents))
        divisors = [k for k in (1, 2, 3, 4, 6, 8, 12) if total % k == 0]
        low = draw(st.sampled_from(divisors))
        index = list(delinearized(position, (total // low, low), extents))[::-1]
        shape = [low, total // low]
    operand = b.operand(f"x{number}", dtype, int(np.prod(shape)))
    return b.convert(b.load(operand, linear(index, strides_of(shape))), "f32")


def draw_apply(draw, b, values, loads):
    op = draw(
        st.sampled_from(["add", "multiply", "maximum", "tanh", "logistic", "subtract", "select", "exp"])
    )
    x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
    if op == "tanh" or op == "logistic":
        return b.apply(op, x)
    if op == "exp":
        return b.apply("exponential", b.apply("negate", b.apply("abs", x)))
    if op == "select":  # by exact values: a last place in a function must not turn the choice
        exact = b.apply("compare-gt", draw(st.sampled_from(loads)), draw(st.sampled_from(loads)))
        return b.apply("select", exact, x, b.constant(0.5, "f32"))
    # sums of products of sums stay of a size that can be compared
    return b.apply("clamp", b.constant(-50.0, "f32"), b.apply(op, x, y), b.constant(50.0, "f32"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(plans())
def test_random_plans(plan):
    check(plan, targets=("host",), tolerance=3e-4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(plans())
def test_random_plans_on_avx2(plan):
    check(plan, targets=("avx2",), tolerance=3e-4)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_many_random_plans(plan):
    check(plan, tolerance=max(3e-4, plan.size * 2**-24))  # NumPy adds along leading axes one by one


@st.composite
def norms(draw):
    """A random norm: each pass over a row needs what the one before it has added up or found."""
    outer = draw(st.sampled_from([(9,), (33,), (40,), (2, 20), (3, 8)]))
    inner = (*draw(st.sampled_from([(), (), (3,)])), draw(st.sampled_from([16, 64, 80, 144, 320])))
    extents, size = (*outer, *inner), int(np.prod(inner))
    dtype, result = (draw(st.sampled_from(["f32", "bf16"])) for _ in range(2))
    b = PlanBuilder("norm", extents, row_dims=len(inner))
    total, along = int(np.prod(extents)), tuple(range(len(outer), len(extents)))
    value = b.convert(b.load_dense(b.operand("x", dtype, total)), "f32")
    if draw(st.booleans()):
        value = b.apply("add", value, b.convert(b.load_dense(b.operand("z", dtype, total)), "f32"))
    for _ in range(draw(st.integers(1, 3))):
        added = b.apply("multiply", value, value) if draw(st.booleans()) else value
        mean = b.apply("multiply", b.reduce_row("add", added), b.constant(1 / size, "f32"))
        found = draw(st.sampled_from([mean, b.reduce_row("maximum", value)]))
        value = b.apply("multiply", b.apply("subtract", value, found), b.constant(0.5, "f32"))
    if draw(st.booleans()):
        gain = b.convert(b.load_dense(b.operand("g", dtype, size), along), "f32")
        value = b.apply("multiply", value, gain)
    b.store_dense(b.operand("y", result, total), b.convert(value, result))
    if draw(st.booleans()):
        b.store_dense(b.operand("found", "f32", total // size), found, tuple(range(len(outer))))
    if draw(st.booleans()):
        b.store_dense(b.operand("sums", "f32", size), b.reduce_column("add", value), along)
    return b.finish()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(norms())
def test_random_norms_past_the_caches(plan):
    check(plan, targets=("far",), tolerance=3e-4)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(norms())
def test_many_random_norms_past_the_caches(plan):
    check(plan, targets=("host", "far", "far avx2"), tolerance=3e-4)
