"""Transposes through a packed buffer, and what is computed on the way; against NumPy and the evaluator."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from benchmarks.direct import DirectSequence
from mpmd.compile.backends.native_cpu.emit.kernels import plan_kernels
from mpmd.compile.backends.native_cpu.emit.packed import PackedKernel
from mpmd.compile.backends.native_cpu.emit.streamed_transpose import StreamedTransposeKernel
from mpmd.compile.backends.native_cpu.emit.tiles import TileKernel
from mpmd.compile.backends.native_cpu.llvm.engine import emit_assembly
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.memory import aligned_empty
from mpmd.compile.backends.native_cpu.target import host_target, named_target
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, dim
from mpmd.compile.kernels.operations import NUMPY_DTYPE

BF16 = ml_dtypes.bfloat16
TARGETS = [t for t in (host_target(), named_target("avx512"), named_target("avx2")) if t.runs_here()]
# With so small caches everything is asked for ahead of time, and results go past them.
SMALL_CACHES = [replace(t, l2_bytes=1 << 10, l3_bytes=1 << 10) for t in TARGETS]


def transpose(rows, width, dtype):
    b = PlanBuilder("transpose", (width, rows))
    x = b.load(b.operand("x", dtype, rows * width), dim(1) * width + dim(0))
    b.store_dense(b.operand("y", dtype, rows * width), x)
    return b.finish()


def run(plan, arrays, target, *, shift=0, threads=1, kind=PackedKernel):
    """The plan's results on copies of arrays, each starting some elements past a line."""
    sequence = plan_kernels(plan, target)
    (kernel,) = sequence.kernels
    if isinstance(kernel, StreamedTransposeKernel):  # what squares would do goes through a buffer here
        kernel = PackedKernel(kernel.name, kernel.plan, target, kernel.crossing, kernel.streamed)
        sequence = replace(sequence, kernels=(kernel,))
    assert type(kernel) is kind
    copies = []
    for array in arrays:
        memory = aligned_empty((array.size + shift,), array.dtype)[shift:]
        memory[:] = array
        copies.append(memory)
    DirectSequence(sequence, target, threads=threads)(*copies)
    return copies


def numbers(size, dtype):
    kind, rng = NUMPY_DTYPE[dtype], np.random.default_rng(size)
    if dtype == "pred":
        return rng.integers(0, 2, size).astype(kind)
    return rng.integers(-100, 100, size).astype(kind)


@pytest.mark.fast_cases
# whole blocks, a part of one, ends inside of pieces and registers, more panels than one
@pytest.mark.parametrize("rows,width", [(128, 64), (300, 64), (131, 100), (77, 130), (64, 1100), (513, 107)])
@pytest.mark.parametrize("dtype", ["pred", "s8", "bf16", "f16", "f32", "s64"])
def test_arrays_are_transposed(dtype, rows, width):
    given = numbers(rows * width, dtype)
    for shift, targets in enumerate((SMALL_CACHES, TARGETS)):
        for target in targets:
            got = run(transpose(rows, width, dtype), [given, np.zeros_like(given)], target, shift=shift)[1]
            np.testing.assert_array_equal(got.reshape(width, rows), given.reshape(rows, width).T)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_special_values_keep_their_bits(dtype):
    bits = np.arange(128 * 64, dtype=np.uint64) * 0x9E3779B97F4A7C15 >> 32  # NaNs of all kinds and denormals
    given = bits.astype(np.uint16 if dtype == "bf16" else np.uint32).view(NUMPY_DTYPE[dtype])
    for target in (*TARGETS, *SMALL_CACHES):
        got = run(transpose(128, 64, dtype), [given, np.zeros_like(given)], target)[1]
        kind = f"u{given.dtype.itemsize}"
        np.testing.assert_array_equal(got.view(kind).reshape(64, 128), given.view(kind).reshape(128, 64).T)


@pytest.mark.parametrize("rows,width", [(15, 64), (64, 7), (3, 1024), (1024, 3), (16, 1024), (128, 20)])
def test_thin_arrays_are_done_in_squares(rows, width):
    given = numbers(rows * width, "f32")
    target = host_target()
    got = run(transpose(rows, width, "f32"), [given, np.zeros_like(given)], target, kind=TileKernel)[1]
    np.testing.assert_array_equal(got.reshape(width, rows), given.reshape(rows, width).T)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("batch,rows,width", [(3, 200, 96), (5, 64, 1100)])
def test_batches_by_several_threads(batch, rows, width, threads):
    b = PlanBuilder("batch", (batch, width, rows))
    x = b.load(
        b.operand("x", "bf16", batch * rows * width), dim(0) * (rows * width) + dim(2) * width + dim(1)
    )
    b.store_dense(b.operand("y", "bf16", batch * rows * width), x)
    given = numbers(batch * rows * width, "bf16")
    for target in (*TARGETS, *SMALL_CACHES):
        got = run(b.finish(), [given, np.zeros_like(given)], target, threads=threads)[1]
        expected = given.reshape(batch, rows, width).transpose(0, 2, 1)
        np.testing.assert_array_equal(got.reshape(batch, width, rows), expected)


def test_rows_between_the_last_dims():
    """(b, t, h, d) to (b, h, d, t): neither dim of the transpose is the array's first."""
    batch, t, h, d = 2, 130, 3, 64
    b = PlanBuilder("heads", (batch, h, d, t))
    at = dim(0) * (t * h * d) + dim(3) * (h * d) + dim(1) * d + dim(2)
    b.store_dense(
        b.operand("y", "f32", batch * t * h * d), b.load(b.operand("x", "f32", batch * t * h * d), at)
    )
    given = numbers(batch * t * h * d, "f32")
    for target in (*TARGETS, *SMALL_CACHES):
        got = run(b.finish(), [np.zeros_like(given), given], target)[0]
        expected = given.reshape(batch, t, h, d).transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)


def test_a_reversed_and_shifted_source():
    """Rows of a part of a larger array, read from the last to the first."""
    rows, width, pitch = 150, 70, 80
    b = PlanBuilder("turned", (width, rows))
    at = dim(1) * -pitch + dim(0) + constant((rows - 1) * pitch + 5)
    x = b.load(b.operand("x", "f32", rows * pitch), at)
    b.store_dense(b.operand("y", "f32", rows * width), x)
    given = numbers(rows * pitch, "f32")
    for target in (*TARGETS, *SMALL_CACHES):
        got = run(b.finish(), [given, np.zeros(rows * width, np.float32)], target)[1]
        expected = given.reshape(rows, pitch)[::-1, 5 : 5 + width].T
        np.testing.assert_array_equal(got.reshape(width, rows), expected)


def fused(rows, width, of, to, steps):
    """Two transposed arrays of different dtypes, one that is not, and one value per row of the result."""
    size = rows * width
    b = PlanBuilder("fused", (width, rows))
    x = b.convert(b.load(b.operand("x", of[0], size), dim(1) * width + dim(0)), "f32")
    y = b.convert(b.load(b.operand("y", of[1], size), dim(1) * width + dim(0)), "f32")
    z = b.convert(b.load_dense(b.operand("z", to, size)), "f32")
    scale = b.load(b.operand("s", "f32", width), dim(0))
    for _ in range(steps):
        z = b.apply("add", b.apply("multiply", x, scale), b.apply("subtract", z, y))
    b.store_dense(b.operand("r", to, size), b.convert(z, to))
    b.store_dense(b.operand("x2", of[0], size), b.convert(x, of[0]))
    return b.finish()


@pytest.mark.fast_cases
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "of,to", [(("f32", "f32"), "f32"), (("bf16", "f32"), "bf16"), (("s8", "bf16"), "f32")]
)
@pytest.mark.parametrize("rows,width", [(128, 64), (150, 99), (81, 200)])
def test_computing_on_the_way(rows, width, of, to, steps):
    plan, size = fused(rows, width, of, to, steps), rows * width
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-9, 9, o.size).astype(NUMPY_DTYPE[o.dtype]) for o in plan.operands]
    wanted = [a.copy() for a in arrays]
    evaluate(plan, wanted)
    assert plan.operands[4].size == size
    for target in (*TARGETS, *SMALL_CACHES):
        got = run(plan, arrays, target)
        for k in plan.results:
            np.testing.assert_allclose(
                got[k].astype(np.float32), wanted[k].astype(np.float32), rtol=2e-2 if to == "bf16" else 1e-5
            )


def test_a_result_over_what_is_read_at_the_same_place():
    """The last block begins before its columns do; what it computed there already is not computed again."""
    rows, width = 40, 37
    b = PlanBuilder("sum", (width, rows))
    x = b.load(b.operand("x", "f32", rows * width), dim(1) * width + dim(0))
    y = b.operand("y", "f32", rows * width)
    b.store_dense(y, b.apply("add", b.load_dense(y), x))
    x, y = (numbers(rows * width, "f32") + k for k in range(2))
    for target in TARGETS:
        got = run(b.finish(), [x, y], target)[1]
        np.testing.assert_array_equal(
            got.reshape(width, rows), y.reshape(width, rows) + x.reshape(rows, width).T
        )


@pytest.mark.skipif(not host_target().is_x86, reason="what goes past the caches does so on x86")
def test_large_results_go_past_the_caches():
    def assembly(target, rows):
        module = Module(target)
        for kernel in plan_kernels(transpose(rows, 768, "bf16"), target).kernels:
            kernel.emit(module)
        return emit_assembly(module)

    target = host_target()
    small = replace(target, l3_bytes=1 << 20)
    assert "vmovnt" in assembly(small, 1024) and "sfence" in assembly(small, 1024)
    assert "vmovnt" not in assembly(replace(target, l3_bytes=1 << 30), 1024)
    assert "vmovnt" not in assembly(small, 1023), "rows that do not start at lines"
    assert "prefetcht1" in assembly(target, 1024) and "prefetch" not in assembly(target, 64)
