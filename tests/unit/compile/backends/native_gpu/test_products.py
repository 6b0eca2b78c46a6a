"""StoredMatrix products as descriptors: executed as the library would, against the meaning of the plan."""

import dataclasses
import importlib.util
import math

import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.launches import LaunchProgram, ProductLaunch
from mpmd.compile.backends.native_gpu.products import (
    StoredSums,
    as_row_sums,
    dense_sums,
    in_one_kernel,
    library_calls,
    stored_sums,
)
from mpmd.compile.backends.native_gpu.triton.products import operands_of, product_kernel, with_long_rows
from mpmd.compile.buffers.assignment import Allocation, Slice
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.evaluate_products import evaluate_product
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from tests.support.gpu_launches import CalledProgram
from tests.support.tf32 import tf32

M, N, K = 4, 6, 5
ROWS = {"a": View("f32", 0, K, 1), "b": View("f32", 0, N, 1), "c": View("f32", 0, N, 1)}
COLUMNS = {"a": View("f32", 0, 1, M), "b": View("f32", 0, 1, K), "c": View("f32", 0, 1, M)}


def product(a, b, c, batch=(), m=M, n=N, k=K, exact=True):
    return MatmulPlan("product", batch, m, n, k, a, b, c, exact=exact)


def heads(rows, width, dtype="f32", count=3, images=2):
    """One matrix per image and head inside of `[images, rows, heads, width]`."""
    return View(dtype, 2, count * width, 1, (rows * count * width, width))


def shared_keys(op, tokens=40, groups=2, queries=3):
    """Scores of heads in groups with one head of keys: a matrix of three rows for each token and group."""
    a = View("bf16", 0, K, 1, (queries * K, groups * queries * K))
    b = View("bf16", 0, 1, groups * K, (K, 0))
    c = View("f32", 0, tokens * N, 1, (queries * tokens * N, N))
    plan = product(a, b, c, batch=(groups, tokens), m=queries)
    if not op:
        return plan
    build = PlanBuilder("epilogue", (groups, tokens, queries, N))
    sums = build.load_dense(build.operand("sums", "f32", groups * tokens * queries * N))
    value = build.convert(build.apply(op, sums), "bf16")
    build.store(build.operand("y", "bf16", groups * tokens * queries * N), build.dense((0, 2, 1, 3)), value)
    return dataclasses.replace(plan, epilogue=build.finish())


def multiplied(plan, calls):
    """The arrays of a product after its calls, and after the plan's meaning."""
    rng = np.random.default_rng(0)
    views = (plan.a, plan.b, plan.c)
    shapes = ((plan.m, plan.k), (plan.k, plan.n), (plan.m, plan.n))
    arrays = [
        rng.standard_normal(view.span(plan.batch, *shape)).astype(NUMPY_DTYPE[view.dtype])
        for view, shape in zip(views, shapes)
    ]
    allocations = [Allocation(k, "parameter", a.nbytes) for k, a in enumerate(arrays)]
    allocations += [Allocation(3, "constant", 0), Allocation(4, "arena", 0)]

    def place(number, at):
        skipped = at * arrays[number].itemsize
        return Slice(number, skipped, arrays[number].nbytes - skipped)

    steps = [ProductLaunch("p", c.descriptor, place(0, c.a), place(1, c.b), place(2, c.d)) for c in calls]
    gpu = CalledProgram(LaunchProgram("products", tuple(steps), {}, tuple(allocations), (place(2, 0),), b""))
    (made,) = gpu.call([a.view(np.uint8) for a in arrays])
    evaluate_product(plan, arrays[0], arrays[1], {0: arrays[2]})
    return made.view(arrays[2].dtype), arrays[2]


@pytest.mark.parametrize("result", ["rows", "columns"])
@pytest.mark.parametrize("right", ["rows", "columns"])
@pytest.mark.parametrize("left", ["rows", "columns"])
def test_every_order_of_rows_and_columns_is_one_call(left, right, result):
    views = {"rows": ROWS, "columns": COLUMNS}
    plan = product(views[left]["a"], views[right]["b"], views[result]["c"])
    (call,) = library_calls(plan, plan.c)
    made = (call.descriptor.a.transposed, call.descriptor.b.transposed, call.descriptor.d.transposed)
    assert made == (left == "columns", right == "columns", result == "columns")
    np.testing.assert_array_equal(*multiplied(plan, [call]))


def test_batches_are_one_call_where_one_stride_describes_them():
    dense = [View("bf16", 0, c, 1, (3 * r * c, r * c)) for r, c in ((M, K), (K, N), (M, N))]
    plan = product(*dense, batch=(2, 3))
    (call,) = library_calls(plan, plan.c)
    assert call.descriptor.batch == 6 and call.descriptor.sums == "f32"
    np.testing.assert_array_equal(*multiplied(plan, [call]))


def test_batches_of_two_strides_are_a_call_for_each_index_of_the_shorter_dim():
    plan = product(heads(M, K), heads(K, N), heads(M, N), batch=(2, 3))
    calls = library_calls(plan, plan.c)
    assert [call.descriptor.batch for call in calls] == [3, 3] and calls[0].a == 2 != calls[1].a
    np.testing.assert_array_equal(*multiplied(plan, calls))


@pytest.mark.parametrize("shape", [(1, N, K), (M, 1, K), (M, N, 1), (1, 1, 1)])
def test_vectors(shape):
    m, n, k = shape
    plan = product(View("f32", 0, k, 1), View("f32", 0, n, 1), View("f32", 0, n, 1), m=m, n=n, k=k)
    np.testing.assert_array_equal(*multiplied(plan, library_calls(plan, plan.c)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (View("f32", 0, 2 * K, 2), ROWS["b"]),  # neither rows nor columns are contiguous
        (View("bf16", 0, K, 1), ROWS["b"]),  # two types
        (View("f32", 0, 0, 1), ROWS["b"]),  # one row, m times
    ],
)
def test_other_products_are_rows_of_a_kernel(a, b):
    plan = product(a, b, ROWS["c"])
    assert library_calls(plan, plan.c) == ()
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(o.size).astype(NUMPY_DTYPE[o.dtype]) for o in as_row_sums(plan, plan.c).operands
    ]
    wanted = arrays[2].copy()
    evaluate(as_row_sums(plan, plan.c), arrays)
    evaluate_product(plan, arrays[0], arrays[1], {0: wanted})
    np.testing.assert_allclose(arrays[2], wanted, rtol=1e-5, atol=1e-5)


def with_epilogue(op):
    """An epilogue that converts to bf16 and writes the transpose, after an operation if there is one."""
    b = PlanBuilder("epilogue", (M, N))
    sums = b.load_dense(b.operand("sums", "f32", M * N))
    made = b.apply(op, sums) if op else sums
    b.store(b.operand("y", "bf16", M * N), b.dense((1, 0)), b.convert(made, "bf16"))
    return MatmulPlan("product", (), M, N, K, ROWS["a"], ROWS["b"], ROWS["c"], b.finish(), exact=True)


def test_an_epilogue_that_only_converts_is_the_library_s():
    assert stored_sums(narrow(with_epilogue(""))) == StoredSums(1, View("bf16", 0, 1, M))
    assert stored_sums(with_epilogue("tanh")) is None
    assert stored_sums(with_epilogue("")) is None  # the library does not convert f32 to bf16, nor f64 to f32
    assert dense_sums(with_epilogue("tanh")) == View("f32", 0, N, 1)


def narrow(plan):
    """The product of bf16 factors."""
    a, b = (dataclasses.replace(view, dtype="bf16") for view in (plan.a, plan.b))
    return dataclasses.replace(plan, a=a, b=b)


def with_additions(kinds, *, turned=False):
    """An epilogue that adds arrays: matrices where the result's elements are, or vectors to its rows."""
    b = PlanBuilder("epilogue", (M, N))
    place = b.dense((1, 0) if turned else (0, 1))
    made = b.load_dense(b.operand("sums", "f32", M * N))
    for kind in kinds:
        at = {"matrix": place, "vector": dim(1), "column": dim(0), "turned": b.dense((1, 0))}[kind]
        made = b.apply("add", b.convert(b.load(b.operand(kind, "bf16", M * N), at), "f32"), made)
    b.store(b.operand("y", "bf16", M * N), place, b.convert(made, "bf16"))
    views = (dataclasses.replace(ROWS[name], dtype="bf16") for name in "abc")
    return MatmulPlan("product", (), M, N, K, *views, b.finish())


def test_the_library_adds_a_matrix_and_a_vector():
    for kinds, added, shift in (
        (["matrix"], 1, -1),
        (["vector"], -1, 1),
        (["vector", "matrix"], 2, 1),
        (["matrix", "vector"], 1, 2),
    ):
        plan = with_additions(kinds)
        stored = stored_sums(plan)
        assert stored == StoredSums(len(kinds) + 1, View("bf16", 0, N, 1), added, shift)
        assert not in_one_kernel(plan)
        (call,) = library_calls(plan, stored.view, adds=added > 0, shifts=shift > 0)
        assert (call.descriptor.adds, call.descriptor.shifts) == (added > 0, shift > 0)
        assert stored_sums(plan, {call.descriptor}) is None and in_one_kernel(plan, {call.descriptor})


@pytest.mark.parametrize("kinds", [["matrix", "matrix"], ["vector", "vector"], ["column"], ["turned"]])
def test_other_additions_are_kernels(kinds):
    assert stored_sums(with_additions(kinds)) is None and in_one_kernel(with_additions(kinds))


def test_the_library_adds_to_rows_of_one_matrix_alone():
    assert stored_sums(with_additions(["vector"], turned=True)) is None
    plan = with_additions(["matrix"])
    a, b, c = (dataclasses.replace(ROWS[name], dtype="bf16", batch=(100,)) for name in "abc")
    assert library_calls(product(a, b, c, batch=(2,)), c, adds=True) == ()
    sums = dataclasses.replace(plan, a=ROWS["a"], b=ROWS["b"])  # of f32
    assert stored_sums(sums) is None


def test_products_of_f64_that_are_stored_as_f32_are_a_call_and_a_kernel():
    """The library adds products of f64 into f64 alone."""
    double = {k: dataclasses.replace(view, dtype="f64") for k, view in ROWS.items()}
    b = PlanBuilder("epilogue", (M, N))
    sums = b.load_dense(b.operand("sums", "f64", M * N))
    b.store_dense(b.operand("y", "f32", M * N), b.convert(sums, "f32"))
    plan = MatmulPlan("product", (), M, N, K, double["a"], double["b"], double["c"], b.finish())
    assert stored_sums(plan) is None and not in_one_kernel(plan)
    (call,) = library_calls(plan, dense_sums(plan))
    assert call.descriptor.d.dtype == call.descriptor.sums == "f64"
    assert library_calls(plan, ROWS["c"]) == ()


def test_a_product_that_the_library_lacks_is_a_kernel_of_ours():
    plan = product(ROWS["a"], ROWS["b"], ROWS["c"])
    (call,) = library_calls(plan, plan.c)
    assert not in_one_kernel(plan) and in_one_kernel(plan, {call.descriptor})
    assert library_calls(plan, plan.c, {call.descriptor}) == ()


def test_products_of_narrow_factors_with_an_epilogue_are_one_kernel():
    assert in_one_kernel(narrow(with_epilogue("tanh"))) and not in_one_kernel(with_epilogue("tanh"))
    assert not in_one_kernel(narrow(with_epilogue("")))  # a call of the library converts
    assert in_one_kernel(product(View("f32", 0, 2 * K, 2), ROWS["b"], ROWS["c"]))  # it has no such strides


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)
@pytest.mark.parametrize(
    "plan",
    [
        narrow(with_epilogue("tanh")),
        with_epilogue("tanh"),
        product(View("f32", 3, 2 * K, 2), COLUMNS["b"], ROWS["c"]),
        product(heads(M, K), heads(K, N), heads(M, N), batch=(2, 3)),
        dataclasses.replace(with_epilogue("tanh"), exact=False),
        product(View("bf16", 0, 1, 200), View("bf16", 0, 150, 1), View("f32", 0, 1, 200), m=200, n=150, k=70),
        shared_keys("tanh"),
        shared_keys(""),
    ],
)
def test_kernels_of_products(plan):
    from tests.support.launch_memory import Extent
    from tests.support.triton_interpreter import run_kernel

    made, first = product_kernel(plan, 4), operands_of(plan)
    rng = np.random.default_rng(0)
    sizes = {}
    for (view, rows, columns), number in zip(
        ((plan.a, plan.m, plan.k), (plan.b, plan.k, plan.n)), (first, first + 1)
    ):
        sizes[number] = view.dtype, view.span(plan.batch, rows, columns)
    result, dtype = (0, plan.c.dtype) if plan.epilogue is None else (1, "bf16")
    sizes[result] = dtype, plan.c.span(plan.batch, plan.m, plan.n)
    arrays = {k: rng.standard_normal(n).astype(NUMPY_DTYPE[kind]) for k, (kind, n) in sizes.items()}
    wanted = {result: arrays[result].copy()}
    whole = plan.exact or plan.a.dtype != "f32"
    factors = [arrays[n] if whole else tf32(arrays[n]) for n in (first, first + 1)]
    evaluate_product(plan, *factors, wanted)
    loose = 1e-2 if dtype == "bf16" else 1e-5
    (kernel,) = made.kernels
    while kernel is not None:
        given = {**arrays, result: arrays[result].copy()}
        run_kernel(kernel, [Extent.of(given[k]) for k in kernel.operands])
        np.testing.assert_allclose(
            given[result].astype(np.float32), wanted[result].astype(np.float32), rtol=loose, atol=loose
        )
        kernel = kernel.smaller


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)
def test_pieces_of_a_tile_are_written_over_what_they_read():
    """Batched matrices of 150 columns, which 256 of a tile are more than, are added to an array in place."""
    from tests.support.launch_memory import Extent
    from tests.support.triton_interpreter import run_kernel

    batch, m, n, k = 2, 20, 150, 24
    b = PlanBuilder("epilogue", (batch, m, n))
    old = b.convert(b.load_dense(b.operand("old", "bf16", batch * m * n)), "f32")
    shift = b.load(b.operand("shift", "f32", n), dim(2))
    sums = b.load_dense(b.operand("sums", "f32", batch * m * n))
    made = b.apply("add", b.apply("add", old, shift), sums)
    b.store_dense(b.operand("y", "bf16", batch * m * n), b.convert(made, "bf16"))
    views = (View("bf16", 0, k, 1, (m * k,)), View("bf16", 0, n, 1, (0,)), View("f32", 0, n, 1, (m * n,)))
    plan = MatmulPlan("product", (batch,), m, n, k, *views, b.finish(), sums=2)
    (kernel,) = product_kernel(plan, 1, (16, 256, 16, 4)).kernels
    assert kernel.source.count("tl.store") == 4

    rng = np.random.default_rng(0)
    sizes = (
        (batch * m * n, "bf16"),
        (n, "f32"),
        (0, "f32"),
        (batch * m * n, "bf16"),
        (batch * m * k, "bf16"),
    )
    arrays = [
        rng.standard_normal(size).astype(NUMPY_DTYPE[dtype]) for size, dtype in (*sizes, (k * n, "bf16"))
    ]
    wanted = {0: arrays[0], 1: arrays[1], 3: arrays[3].copy()}
    evaluate_product(plan, arrays[4], arrays[5], wanted)
    arrays[3] = arrays[0]
    run_kernel(kernel, [Extent.of(arrays[number]) for number in kernel.operands])
    np.testing.assert_array_equal(arrays[0].astype(np.float32), wanted[3].astype(np.float32))


@pytest.mark.parametrize("tokens, rows", [(40, 40), (3, 3), (2, 3)])
@pytest.mark.parametrize("op", ["tanh", ""])
def test_tokens_are_the_rows_of_heads_that_share_their_keys(op, tokens, rows):
    """If they are more than the heads of a group; a tile has 16 rows at least."""
    made = with_long_rows(shared_keys(op, tokens=tokens))
    assert made.m == rows and math.prod(made.batch) * rows == 2 * tokens * 3
    wide = dataclasses.replace(ROWS["a"], row=K, batch=(0,)), dataclasses.replace(ROWS["b"], batch=(0,))
    other = product(*wide, ROWS["c"], m=16, batch=(40,))
    assert with_long_rows(other) is other, "it has rows enough"
    plan = shared_keys(op)
    own = dataclasses.replace(plan, b=dataclasses.replace(plan.b, batch=(K, 1)))
    assert with_long_rows(own) is own, "each has keys of its own"


@pytest.mark.parametrize("op", ["tanh", ""])
def test_products_with_other_rows_have_the_same_results(op):
    plan = shared_keys(op)
    rng, result, size = np.random.default_rng(0), int(bool(op)), 2 * 40 * 3 * N
    spans = plan.a.span(plan.batch, plan.m, plan.k), plan.b.span(plan.batch, plan.k, plan.n)
    factors = [rng.standard_normal(count).astype(NUMPY_DTYPE["bf16"]) for count in spans]
    found = []
    for each in (plan, with_long_rows(plan)):
        arrays = {result: np.zeros(size, NUMPY_DTYPE["bf16" if op else "f32"])}
        evaluate_product(each, *factors, arrays)
        found.append(arrays[result])
    np.testing.assert_array_equal(*found)
    assert np.count_nonzero(found[0]) == size
