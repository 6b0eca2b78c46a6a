import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectKernel, row_major
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.gemm.finish import StoreSums
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import GemmKernel, gemm_kernel
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import MicroKernel
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.gemm.tiling import choose_tiling
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import Module
from mpmd.compile.llvm.llvm_types import constant
from mpmd.errors import CompileError
from tests.support.targets import runs_here

NUMPY = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
EPSILON = {"f32": 2**-23, "f64": 2**-52, "bf16": 2**-8, "f16": 2**-10}
TARGETS = {"host": host_target(), "avx2": named_target("avx2"), "avx512": named_target("avx512")}
CANARY = 0xA5


class Guarded(DirectKernel):
    """A kernel whose workspace is watched: nothing may be written past its end."""

    def __init__(self, kernel, target):
        super().__init__(kernel, target)
        self.guard = aligned_empty((kernel.workspace_bytes + 256,), np.uint8)
        self.guard[:] = CANARY
        self._workspaces = [self.guard]

    def __call__(self, *arrays, cuts=()):
        addresses = [a.ctypes.data for a in arrays]
        edges = [0, *cuts, self.kernel.units]
        for units in itertools.pairwise(edges):
            self.run(addresses, 0, units)
        assert (self.guard[self.kernel.workspace_bytes :] == CANARY).all(), "the workspace is too small"


def random(shape, dtype, seed=0):
    array = aligned_empty(shape, NUMPY[dtype])
    array[...] = np.random.default_rng(seed).standard_normal(shape)
    return array


def check(product, dtype, k, a, b, c):
    a, b = a.astype(np.float64), b.astype(np.float64)
    exact, bound = a @ b, np.abs(a) @ np.abs(b)
    sums = EPSILON["f64" if dtype == "f64" else "f32"] * max(k, 1)
    error = np.abs(c.astype(np.float64) - exact)
    limit = (sums + EPSILON[product.gemm.c.dtype]) * bound + 1e-30
    assert (error <= limit).all(), f"{product.gemm}: off by {error.max()}"


SIZES = [
    (37, 45, 70),
    (100, 64, 33),
    (1, 1, 1),
    (12, 32, 64),
    (64, 200, 500),
    (30, 7, 600),
    (5, 5, 0),
    (13, 1, 9),
    (40, 4, 70),
    (4, 100, 64),
    (33, 7, 131),
    (8, 50, 40),
    (1, 30, 300),
    (200, 3, 33),
    (21, 2, 600),
    (6, 5, 32),
]


@pytest.mark.fast_cases
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize(
    "dtype,out", [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16"), ("f64", "f64")]
)
def test_all_orders_and_edges(target, dtype, out):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    orders = list(itertools.product((False, True), (False, True), ((), (2, 3))))
    for n, (m, columns, k) in enumerate(SIZES):
        # every size with two of the eight orders, every order with some size
        for ta, tb, batch in (orders[n % 8], orders[(n + 3) % 8]):
            gemm = row_major(m, columns, k, dtype, out_dtype=out, transpose_a=ta, transpose_b=tb, batch=batch)
            product = gemm_kernel("product", gemm, TARGETS[target])
            a = random((*batch, k, m) if ta else (*batch, m, k), dtype)
            b = random((*batch, columns, k) if tb else (*batch, k, columns), dtype, 1)
            c = random((*batch, m, columns), out)
            Guarded(product, TARGETS[target])(a, b, c, cuts=sorted({1, product.units // 2}))
            check(product, dtype, k, a.swapaxes(-1, -2) if ta else a, b.swapaxes(-1, -2) if tb else b, c)


@pytest.mark.parametrize("split", ["rows", "columns"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_loop_runs_more_than_once(split, dtype):
    """Small blocks, so that chunks of K, row blocks and groups of strips all repeat and end raggedly."""
    orders = itertools.product((False, True), (False, True), (False, True), (False, True))
    for ta, tb, pack_a, pack_b in orders:
        if (dtype == "bf16" and not (pack_a and pack_b)) or (tb and not pack_b):
            continue  # an odd number of pairs, or columns of B apart: only a copy will do
        gemm = row_major(61, 149, 103, dtype, transpose_a=ta, transpose_b=tb)
        tiling = choose_tiling(gemm, host_target())
        tiling = dataclasses.replace(
            tiling, kc=32, mc=2 * tiling.rows, panels=2, split=split, pack_a=pack_a, pack_b=pack_b
        )
        product = GemmKernel("product", gemm, tiling)
        a, b = (
            random((103, 61) if ta else (61, 103), dtype),
            random((149, 103) if tb else (103, 149), dtype, 1),
        )
        c = random((61, 149), dtype)
        Guarded(product, host_target())(a, b, c, cuts=(1, 3))
        check(product, dtype, 103, a.T if ta else a, b.T if tb else b, c)


@pytest.mark.parametrize("kc", [32, 512])
def test_results_of_bf16_are_rounded_alike_by_micro_kernels_and_epilogues(kc):
    """Tiles that a micro-kernel stores as bf16, whole or added to earlier chunks of K, and others."""
    for m, n, transpose_a in ((61, 149, False), (61, 149, True), (30, 14, False), (24, 64, False)):
        gemm = row_major(m, n, 102, "bf16", transpose_a=transpose_a, batch=(2,))
        tiling = dataclasses.replace(choose_tiling(gemm, host_target()), kc=kc)
        a = random((2, 102, m) if transpose_a else (2, m, 102), "bf16")
        b = random((2, 102, n), "bf16", 1)
        a[0, :3, :3] = np.inf
        c, expected = random((2, m, n), "bf16", 2), random((2, m, n), "bf16", 3)
        Guarded(GemmKernel("direct", gemm, tiling), host_target())(a, b, c)
        Guarded(GemmKernel("staged", gemm, tiling, epilogue=StoreSums(gemm)), host_target())(a, b, expected)
        np.testing.assert_array_equal(c.view(np.uint16), expected.view(np.uint16))
        assert np.isfinite(c[1].astype(np.float32)).all() and not np.isfinite(c[0].astype(np.float32)).all()


def test_row_blocks_are_of_equal_size():
    target = dataclasses.replace(named_target("avx512"), l2_bytes=1 << 20)
    found = {m: choose_tiling(row_major(m, 512, 64), target).mc for m in (1, 12, 480, 481, 512, 1024)}
    assert found == {1: 12, 12: 12, 480: 480, 481: 252, 512: 264, 1024: 348}


def test_operands_are_packed_only_where_it_pays():
    target = dataclasses.replace(named_target("avx512"), l1_bytes=32 << 10, l2_bytes=1 << 20)

    def packs(gemm):
        tiling = choose_tiling(gemm, target)
        return tiling.pack_a, tiling.pack_b

    assert packs(row_major(256, 512, 768)) == (False, False)
    assert packs(row_major(256, 512, 1024)) == (True, False)  # rows of A one page apart share their lines
    assert packs(row_major(256, 32, 1024)) == (False, False)  # too few columns to pay for it
    assert packs(row_major(256, 512, 768, transpose_b=True)) == (False, True)
    assert packs(row_major(3072, 768, 1024, transpose_a=True)) == (True, True)
    assert packs(row_major(768, 3072, 1024, transpose_a=True)) == (True, True)  # rows of B a page apart
    assert packs(row_major(768, 768, 1024, transpose_a=True)) == (True, False)
    assert packs(row_major(60, 3072, 1024)) == (True, False)  # too few rows to pay for it
    assert packs(row_major(64, 64, 64, transpose_a=True)) == (False, False)
    bf16 = dataclasses.replace(target, bf16_dot=True)
    assert choose_tiling(row_major(256, 512, 768, "bf16"), bf16).pack_b  # pairs along K must meet


def test_what_is_packed_right_before_its_use_needs_little_room():
    target = named_target("avx512")
    late = gemm_kernel("late", row_major(1024, 3072, 768, transpose_b=True), target)
    once = gemm_kernel("once", row_major(1024, 3072, 1024, transpose_b=True), target)
    assert late.workspace_bytes < target.l2_bytes < once.workspace_bytes
    nothing = gemm_kernel("nothing", row_major(1024, 3072, 768), target)
    assert nothing.workspace_bytes < late.workspace_bytes + 4096


def test_heads_inside_a_fused_projection_need_no_copy():
    batch, length, heads, width = 2, 50, 3, 16
    row = 3 * heads * width
    qkv = random((batch, length, 3, heads, width), "f32")
    scores = aligned_empty((batch, heads, length, length), np.float32)
    strides = (length * row, width)
    gemm = Gemm(
        length,
        length,
        width,
        Matrix("f32", row, 1, strides),
        Matrix("f32", 1, row, strides),
        Matrix("f32", length, 1, (heads * length * length, length * length)),
        (batch, heads),
    )
    product = gemm_kernel("scores", gemm, host_target())
    Guarded(product, host_target())(qkv[:, :, 0], qkv[:, :, 1], scores, cuts=(3,))
    expected = np.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1])
    np.testing.assert_allclose(scores, expected, atol=2e-5)


def test_strided_and_mixed_operands_and_a_transposed_result():
    a, b = random((40, 3, 30), "bf16"), random((30, 2, 50), "f32", 1)
    c = aligned_empty((50, 40), np.float32)
    gemm = Gemm(40, 50, 30, Matrix("bf16", 90, 1), Matrix("f32", 100, 2), Matrix("f32", 1, 40))
    flat = np.ascontiguousarray(b.transpose(0, 2, 1))  # columns two apart
    product = gemm_kernel("mixed", gemm, host_target())
    Guarded(product, host_target())(a[:, 1], flat, c)
    expected = a[:, 1].astype(np.float32) @ b[:, 0]
    np.testing.assert_allclose(c.T, expected, atol=1e-4)


class BiasAndDouble:
    """c = sums + bias, twice = 2·c: an epilogue with an input and a second result."""

    pointers = ("c", "bias", "twice")

    def __init__(self, columns):
        self.columns = columns

    def vectors_at_once(self, target):
        return 4

    def emit(self, f, parts):
        for sums, at in parts:
            self.emit_one(f, sums, at)

    def emit_one(self, f, sums, at):
        load = f.load if at.mask is None else lambda p, t, i: f.masked_load(p, t, at.mask, i)
        value = f.add(sums, load(f.arguments["bias"], sums.type, at.column))
        index = f.iadd(f.imul(at.row, self.columns), at.column)
        for pointer, result in (("c", value), ("twice", f.mul(value, constant(2.0, value.type)))):
            if at.mask is None:
                f.store(result, f.arguments[pointer], index)
            else:
                f.masked_store(result, f.arguments[pointer], at.mask, index)


@pytest.mark.parametrize("kc", [16, 512])
def test_epilogue_sees_every_sum_once(kc):
    gemm = row_major(33, 71, 90)
    tiling = dataclasses.replace(choose_tiling(gemm, host_target()), kc=kc)
    product = GemmKernel("product", gemm, tiling, epilogue=BiasAndDouble(71))
    a, b, bias = random((33, 90), "f32"), random((90, 71), "f32", 1), random((71,), "f32", 2)
    c, twice = random((33, 71), "f32"), random((33, 71), "f32")
    Guarded(product, host_target())(a, b, c, bias, twice, cuts=(1,))
    np.testing.assert_allclose(c, a @ b + bias, atol=1e-4)
    np.testing.assert_array_equal(twice, 2 * c)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("epilogue", [False, True])
def test_strips_are_divided_among_many_threads(transpose_b, epilogue):
    """Shares that end inside of a strip, and shares of several strips."""
    gemm = row_major(230, 100, 40, transpose_b=transpose_b)
    tiling = dataclasses.replace(choose_tiling(gemm, host_target()), kc=16, split="columns", pack_a=False)
    tiling = dataclasses.replace(tiling, part_rows=4 * tiling.rows)
    product = GemmKernel("product", gemm, tiling, epilogue=BiasAndDouble(100) if epilogue else None)
    parts, strips = -(-230 // tiling.part_rows), -(-100 // tiling.width)
    assert product.units == parts * strips > 8
    a, b = random((230, 40), "f32"), random((100, 40) if transpose_b else (40, 100), "f32", 1)
    bias, twice = random((100,), "f32", 2), random((230, 100), "f32")
    expected = a @ (b.T if transpose_b else b)
    kernel, units = Guarded(product, host_target()), product.units
    for cuts in ((), (1,), (parts - 1, parts, parts + 1), (2, 2 * parts + 1), tuple(range(1, units))):
        c = random((230, 100), "f32", 3)
        kernel(a, b, c, *([bias, twice] if epilogue else []), cuts=cuts)
        np.testing.assert_allclose(c, expected + bias if epilogue else expected, atol=1e-4)


def test_few_strips_are_divided_and_many_are_not():
    target = named_target("avx512")
    few, many = (
        choose_tiling(row_major(1024, 768, 768), target),
        choose_tiling(row_major(1024, 3072, 768), target),
    )
    assert few.part_rows % few.rows == 0 and gemm_kernel("few", row_major(1024, 768, 768), target).units >= 64
    assert many.part_rows == 0
    assert choose_tiling(row_major(1024, 768, 1024), target).part_rows == 0, "A is packed"
    assert choose_tiling(row_major(48, 512, 64), target).part_rows == 0, "nothing to divide"


def test_threads_divide_the_units():
    gemm = row_major(65, 300, 64, batch=(3,))
    product = DirectKernel(gemm_kernel("product", gemm, host_target()), host_target(), threads=3)
    a, b = random((3, 65, 64), "f32"), random((3, 64, 300), "f32", 1)
    c = random((3, 65, 300), "f32")
    product(a, b, c)
    np.testing.assert_allclose(c, a @ b, atol=1e-4)
    with pytest.raises(TypeError, match="takes a, b, c: 3 arrays, got 2"):
        product(a, b)


def test_empty_results_do_nothing_and_nan_stays_in_its_row_and_column():
    for m, n in ((0, 5), (5, 0)):
        assert gemm_kernel("product", row_major(m, n, 4), host_target()).units == 0
    a, b, c = random((20, 40), "f32"), random((40, 35), "f32", 1), random((20, 35), "f32")
    a[3, 5], b[7, 30] = np.nan, np.inf
    Guarded(gemm_kernel("product", row_major(20, 35, 40), host_target()), host_target())(a, b, c)
    wrong = ~np.isfinite(c)
    assert wrong[3].all() and wrong[:, 30].all()
    wrong[3], wrong[:, 30] = False, False
    assert not wrong.any(), "padding leaked into the sums"


def test_what_cannot_be_multiplied_is_refused():
    dense = Matrix("f32", 4, 1)
    with pytest.raises(CompileError, match="matrix product of s32: operand b must be one of"):
        Gemm(4, 4, 4, dense, Matrix("s32", 4, 1), dense)
    with pytest.raises(CompileError, match="operand a has 0 batch strides"):
        Gemm(4, 4, 4, dense, dense, dense, (2,))
    with pytest.raises(CompileError, match="f64 and f32: convert one"):
        Gemm(4, 4, 4, Matrix("f64", 4, 1), dense, dense)


@pytest.mark.optimized
@pytest.mark.parametrize("adjacent", ["rows", "steps"])
def test_micro_kernels_keep_their_sums_in_registers(adjacent):
    for name, rows, vectors in (("avx512", 12, 2), ("avx2", 6, 2), ("neon", 8, 3)):
        module = Module(named_target(name))
        kernel = MicroKernel("f32", rows, vectors, adjacent)
        kernel.emit(module)
        assembly = emit_assembly(module)
        inner = max(assembly.split(".LBB"), key=lambda block: block.count("fma") + block.count("fmla"))
        spills = [line for line in inner.splitlines() if "mm" in line and "rsp" in line and "fma" not in line]
        assert not spills, f"{name}: accumulators on the stack: {spills[:3]}"
