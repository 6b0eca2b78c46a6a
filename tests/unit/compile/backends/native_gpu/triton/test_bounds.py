"""No kernel leaves its arrays: how points are divided, and every family of kernels on many shapes."""

import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.products import product_kernel
from mpmd.compile.backends.native_gpu.triton.tiling import TileSteps, tiling_of, tiling_of_few_rows
from mpmd.compile.backends.native_gpu.triton.triton_kernels import plan_kernels
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from tests.support.gpu_plans import check, column_sums, softmax, transposed
from tests.support.native_fragments import fragment_of

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)
UNITS = {"A100": 216, "H100": 264}


def test_tiles_of_programs_that_share_points_have_each_point_once():
    """And those without a mask have no other."""
    sizes = itertools.product((1, 2, 5, 31, 32, 33, 96, 160, 161, 4096), (1, 2, 16, 32), (1, 2, 3, 5, 7, 264))
    for points, side, wanted in sizes:
        tiles = -(-points // side)
        sharing = -(-tiles // -(-tiles // min(wanted, tiles)))
        steps, found = TileSteps(points, side, sharing), []
        for chunk in range(sharing):
            first, end = (eval(text, {"tl": np, "chunk": chunk}) for text in steps.bounds("chunk"))
            starts = list(range(first, first + end, side))
            assert starts
            found += [place for start in starts for place in range(start, start + side)]
        assert [place for place in found if place < points] == list(range(points))
        assert not steps.fill or len(found) == points


def total(rows, width, dtype="f32", store=False):
    """Sums over rows alone, or of values that are stored, too."""
    b = PlanBuilder("both" if store else "sums", (rows, width), row_dims=1)
    x, sums = b.operand("x", dtype, rows * width), b.operand("sums", dtype, width)
    value = b.load(x, dim(0) * width + dim(1))
    if store:
        value = b.apply("negate", value)
        b.store_dense(b.operand("minus", dtype, rows * width), value)
    b.store(sums, dim(1), b.reduce_column("add", value))
    return b.finish()


def normalised(rows, width, dtype="f32"):
    """A mixed plan: rows are reduced, stored and added up."""
    b = PlanBuilder("mixed", (rows, width), row_dims=1)
    v = b.convert(b.load_dense(b.operand("x", dtype, rows * width)), "f32")
    centred = b.apply("subtract", v, b.reduce_row("add", v))
    b.store_dense(b.operand("y", dtype, rows * width), b.convert(centred, dtype))
    b.store(b.operand("sums", "f32", width), dim(1), b.reduce_column("add", centred))
    return b.finish()


def test_programs_that_share_rows_unevenly_end_with_the_rows():
    """The text says it; 160 rows of 32 are five tiles, three and two of two programs."""
    (first, last) = plan_kernels(total(160, 128), 2).kernels
    assert tiling_of(total(160, 128), 2).row_steps == TileSteps(160, 32, 2)
    assert "for r0 in range(0, tl.minimum(96, 160 - chunk * 96), 32)" in first.source
    assert "mask" not in first.source + last.source


@pytest.mark.parametrize("rows, width, height, columns", [
    (256, 768, 256, 16), (11, 3072, 16, 256), (15, 40, 16, 64), (1000, 768, 256, 16),
])  # fmt: skip
def test_the_last_kernel_of_a_sum_has_as_many_programs_as_its_columns_give(rows, width, height, columns):
    tiling = tiling_of_few_rows(total(rows, width))
    assert (tiling.height, tiling.width, tiling.chunks) == (height, columns, 1)
    assert tiling.grid == -(-width // columns)


@pytest.mark.parametrize("shared, programs, height", [(True, 4, 8), (True, 1000, 2), (False, 4, 2)])
def test_a_program_has_several_rows_that_read_one_array_together(shared, programs, height):
    b = PlanBuilder("rows", (256, 512), row_dims=1)
    x = b.load_dense(b.operand("x", "f32", 256 * 512))
    scale = b.load(b.operand("scale", "f32", 512 if shared else 256), dim(1) if shared else dim(0))
    centred = b.apply("subtract", x, b.reduce_row("add", b.apply("multiply", x, scale)))
    b.store_dense(b.operand("y", "f32", 256 * 512), centred)
    tiling = tiling_of(b.finish(), programs)
    assert (tiling.height, tiling.width) == (height, 512)


@needs_triton
@pytest.mark.parametrize(("rows", "width"), [(160, 128), (4096, 768), (1024, 3072), (100, 130)])
def test_sums_of_common_shapes(rows, width):
    """Few columns of those that there are: programs beside each other do the same."""
    few = min(width, 130)
    for plan in (total(rows, few), total(rows, few, store=True)):
        programs = -(-UNITS["H100"] // -(-width // 128)) * -(-few // 128)  # as many for each column
        check(plan, programs=programs)


COMMON = [
    *itertools.product((160, 1024), (100, 768), ("f32", "bf16")),
    (160, 3072, "bf16"),
    (4096, 768, "f32"),
]


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "width", "dtype"), COMMON)
def test_every_family_of_kernels_stays_in_its_arrays(rows, width, dtype):
    for units in UNITS.values():
        plans = [
            total(rows, width, dtype),
            total(rows, width, dtype, store=True),
            normalised(rows, width, dtype),
        ]
        for plan in [*plans, column_sums(rows, width, dtype)]:
            check(plan, programs=units)
    for plan in (softmax(rows, width, dtype), transposed(rows, width, dtype)):
        check(plan)


def shapes(*dims, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(d, dtype) for d in dims]


def gelu_of_product(a, b):
    return jax.nn.gelu(jnp.einsum("bmk,bkn->bmn", a, b))


def attend(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bqk,bkd->bqd", weights, v)


LARGE = {
    "many matrices": (gelu_of_product, shapes((1025, 16, 1024), (1025, 1024, 2048))),
    "a long vocabulary": (lambda a, b: jax.nn.gelu(a @ b), shapes((64, 65536), (65536, 50257))),
    "a long cache": (attend, shapes((2049, 4, 128), (2049, 8192, 128), (2049, 8192, 128))),
    "a large result": (lambda a: jnp.exp(a), shapes((1 << 16, 1 << 15), dtype=jnp.float32)),
}


@pytest.mark.parametrize("name", LARGE)
def test_positions_in_large_arrays_are_wide(name):
    function, arguments = LARGE[name]
    program = prepare_fragment(fragment_of(function, *arguments), GpuTarget()).program
    found = [k for k in program.kernels.values() if max(k.sizes) >= 1 << 31]
    assert found
    for kernel in found:
        assert "tl.program_id(0).to(tl.int64)" in kernel.source
        for line in kernel.source.splitlines():
            if "tl.load(p" in line and "flags" not in line:
                assert "tl.int64" in line, line


def test_a_row_of_a_large_factor_is_far_from_the_first():
    """`r * 50257` alone is more than 32 bits hold, in a result that is not large."""
    k, n = 65536, 50257
    plan = MatmulPlan(
        "product", (), 64, n, k, View("bf16", 0, k, 1), View("bf16", 0, n, 1), View("f32", 0, n, 1)
    )
    (kernel,) = product_kernel(plan, 132).kernels
    assert "k[:, None].to(tl.int64) * 50257" in kernel.source
    small = MatmulPlan(
        "product", (), 64, 32, 16, View("bf16", 0, 16, 1), View("bf16", 0, 32, 1), View("f32", 0, 32, 1)
    )
    assert "int64" not in product_kernel(small, 132).kernels[0].source


@needs_triton
@pytest.mark.parametrize("name", LARGE)
def test_the_last_programs_of_large_arrays_stay_in_them(name):
    """With memory that is not there: bounds alone are checked."""
    from tests.support.launch_memory import Extent
    from tests.support.triton_interpreter import run_kernel

    function, arguments = LARGE[name]
    program = prepare_fragment(fragment_of(function, *arguments), GpuTarget()).program
    for step in program.launches():
        kernel = program.kernels.get(getattr(step, "kernel", ""))
        if kernel is not None and kernel.flops < 1e15:
            arrays = [Extent(0, place.size) for place in step.arguments]
            for first in (0, step.grid - 1):
                run_kernel(kernel, arrays, grid=1, first=first)
