"""Transposes past the caches, in squares; against NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.direct import DirectSequence
from mpmd.compile.backends.native_cpu.emit.kernels import plan_kernels
from mpmd.compile.backends.native_cpu.emit.packed import PackedKernel
from mpmd.compile.backends.native_cpu.emit.streamed_transpose import StreamedTransposeKernel
from mpmd.compile.backends.native_cpu.llvm.engine import emit_assembly
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.memory import aligned_empty
from mpmd.compile.backends.native_cpu.target import host_target, named_target
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import constant, dim
from mpmd.compile.kernels.operations import NUMPY_DTYPE

WIDE = replace(named_target("avx512"), l2_bytes=1 << 10, l3_bytes=1 << 10)
RUNS = pytest.mark.skipif(not named_target("avx512").runs_here(), reason="needs AVX-512")


def transpose(rows, width, dtype, *, results=1, batch=1, pitch=0, first=0):
    """A part of a batch of arrays, `width` of `pitch` columns, transposed."""
    pitch = pitch or width
    b = PlanBuilder("transpose", (batch, width, rows))
    x = b.operand("x", dtype, batch * rows * pitch)
    value = b.load(x, dim(0) * (rows * pitch) + dim(2) * pitch + dim(1) + constant(first))
    for number in range(results):
        b.store_dense(b.operand(f"y{number}", dtype, batch * rows * width), value)
    return b.finish()


def kinds(plan, target):
    return [type(k) for k in plan_kernels(plan, target).kernels]


def bits(size, dtype):
    """Elements of every kind, NaNs and denormals among them."""
    numbers = np.arange(size, dtype=np.uint64) * 0x9E3779B97F4A7C15 >> 13
    return numbers.astype(f"u{np.dtype(NUMPY_DTYPE[dtype]).itemsize}").view(NUMPY_DTYPE[dtype])


def run(plan, given, *, shift=0, threads=1):
    """The plan's results, each array starting some elements past a line."""
    assert kinds(plan, WIDE) == [StreamedTransposeKernel]
    arrays = [aligned_empty((o.size + shift,), NUMPY_DTYPE[o.dtype])[shift:] for o in plan.operands]
    for array in arrays[1:]:
        array[:] = 0
    arrays[0][:] = given
    DirectSequence(plan_kernels(plan, WIDE), WIDE, threads=threads)(*arrays)
    return arrays[1:]


def assert_transposed(got, given, rows, width):
    kind = f"u{given.dtype.itemsize}"
    expected = given.view(kind).reshape(-1, rows, width).transpose(0, 2, 1)
    np.testing.assert_array_equal(got.view(kind).reshape(expected.shape), expected)


@pytest.mark.fast_cases
# whole panels and strips; columns that end inside of a square; a last panel that looks back; several strips
@RUNS
@pytest.mark.parametrize("rows,width", [(128, 32), (256, 33), (192, 77), (320, 1000), (160, 515)])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "s32", "f32", "s64"])
@pytest.mark.parametrize("shift", [0, 1])
def test_arrays_are_transposed(dtype, rows, width, shift):
    plan, given = transpose(rows, width, dtype), bits(rows * width, dtype)
    (got,) = run(plan, given, shift=shift)
    assert_transposed(got, given, rows, width)


@RUNS
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_batches_and_two_results_by_several_threads(dtype, threads):
    batch, rows, width = 3, 224, 600
    plan, given = transpose(rows, width, dtype, results=2, batch=batch), bits(batch * rows * width, dtype)
    for got in run(plan, given, threads=threads):
        assert_transposed(got, given, rows, width)


@RUNS
def test_a_part_of_a_larger_array():
    """Strips of panels that have gaps between their rows, and one of fewer lines than a burst of requests."""
    for width in (40, 700):
        rows, pitch, first = 192, 1000, 21
        given = bits(rows * pitch, "f32")
        (got,) = run(transpose(rows, width, "f32", pitch=pitch, first=first), given)
        part = np.ascontiguousarray(given.reshape(rows, pitch)[:, first : first + width]).reshape(-1)
        assert_transposed(got, part, rows, width)


def test_which_transposes_go_this_way():
    assert kinds(transpose(1024, 768, "f32"), WIDE) == [StreamedTransposeKernel]
    assert kinds(transpose(1024, 768, "s8"), WIDE) == [PackedKernel], "registers do not hold squares of bytes"
    assert kinds(transpose(1023, 768, "f32"), WIDE) == [PackedKernel], "rows that do not start at lines"
    assert kinds(transpose(8192, 768, "f32"), WIDE) == [PackedKernel], "rows 32 KB apart"
    assert kinds(transpose(1024, 512, "bf16"), WIDE) == [PackedKernel], "lines that the first cache loses"
    near = replace(WIDE, l3_bytes=1 << 30)
    assert kinds(transpose(1024, 768, "f32"), near) == [PackedKernel], "results that stay in the caches"
    narrow = replace(named_target("avx2"), l3_bytes=1 << 10)
    assert kinds(transpose(1024, 768, "f32"), narrow) == [PackedKernel], "registers shorter than lines"


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_next_panel_is_asked_for_and_lines_pass_the_caches(dtype):
    module = Module(WIDE)
    for kernel in plan_kernels(transpose(1024, 768, dtype), WIDE).kernels:
        kernel.emit(module)
    text = emit_assembly(module)
    assert "vmovnt" in text and "prefetcht1" in text


def test_squares_stay_in_registers():
    """Stores to the stack would wait behind those that pass the caches."""
    module = Module(host_target() if host_target().vector_bytes == 64 else WIDE)
    target = replace(module.target, l3_bytes=1 << 10)
    for kernel in plan_kernels(transpose(1024, 768, "f32"), target).kernels:
        kernel.emit(module)
    text = emit_assembly(module)
    spilled = [line for line in text.splitlines() if "zmm" in line and "(%rsp)" in line and "vmov" in line]
    assert len(spilled) <= 16, f"{len(spilled)} registers of 64 bytes go to the stack and back"
