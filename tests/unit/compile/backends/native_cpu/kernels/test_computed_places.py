"""Rows at computed places, some past the caches; against the evaluator."""

import dataclasses

import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import streamed_operands
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import dim, value
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import Module
from tests.support.targets import runs_here

TABLE = 11  # rows


def small_caches(target):
    """A CPU whose caches hold none of the arrays here."""
    return dataclasses.replace(target, l1_bytes=256, l2_bytes=512, l3_bytes=1024)


NAMED = {"host": host_target(), "avx2": named_target("avx2"), "avx512": named_target("avx512")}
TARGETS = [t for t in NAMED.values() if runs_here(t)]
SIZES = [TARGETS, [small_caches(t) for t in TARGETS]]


def place_of(b, rows, limit=TABLE):
    """Rows of a table as JAX says them: negative ones count from the end, all are clamped."""
    at = b.load(b.operand("places", "s32", rows), dim(0))
    from_end = b.apply("add", at, b.constant(limit, "s32"))
    at = b.apply("select", b.apply("compare-lt", at, b.constant(0, "s32")), from_end, at)
    at = b.convert(at, "s64")
    return b.apply("clamp", b.constant(0, "s64"), at, b.constant(limit - 1, "s64"))


def gathered(rows, width, dtype, result=None):
    b = PlanBuilder("gather", (rows, width))
    x = b.load(b.operand("table", dtype, TABLE * width), value(place_of(b, rows)) * width + dim(1))
    b.store_dense(b.operand("y", result or dtype, rows * width), b.convert(x, result or dtype))
    return b.finish()


def embedded(rows, width, dtype):
    """table[places] + positions, of two dims and a batch."""
    b = PlanBuilder("embed", (2, rows, width))
    at = b.load(b.operand("places", "s32", 2 * rows), dim(0) * rows + dim(1))
    at = b.apply("clamp", b.constant(0, "s32"), at, b.constant(TABLE - 1, "s32"))
    x = b.load(b.operand("table", dtype, TABLE * width), value(at) * width + dim(2))
    position = b.load(b.operand("positions", dtype, rows * width), dim(1) * width + dim(2))
    b.store_dense(b.operand("y", dtype, 2 * rows * width), b.apply("add", x, position))
    return b.finish()


def filled(rows, width, dtype):
    """Rows outside of the table are not read and become ones."""
    b = PlanBuilder("fill", (rows, width))
    at = b.load(b.operand("places", "s32", rows), dim(0))
    low, high = b.constant(0, "s32"), b.constant(TABLE, "s32")
    inside = b.apply("and", b.apply("compare-ge", at, low), b.apply("compare-lt", at, high))
    x = b.load(b.operand("table", dtype, TABLE * width), value(at) * width + dim(1), where=inside)
    y = b.apply("select", inside, x, b.convert(b.constant(1.0, "f32"), dtype))
    b.store_dense(b.operand("y", dtype, rows * width), y)
    return b.finish()


def along_columns(rows, width, dtype):
    """x[:, places]: three dims, places of the middle one."""
    b = PlanBuilder("take", (3, rows, width))
    at = b.load(b.operand("places", "s32", rows), dim(1))
    at = b.apply("clamp", b.constant(0, "s32"), at, b.constant(TABLE - 1, "s32"))
    index = dim(0) * (TABLE * width) + value(at) * width + dim(2)
    x = b.load(b.operand("table", dtype, 3 * TABLE * width), index)
    b.store_dense(b.operand("y", dtype, 3 * rows * width), x)
    return b.finish()


def picked(rows, width, dtype, pitch=None):
    """x[:, places]: the same elements of every row."""
    pitch = pitch or width
    b = PlanBuilder("pick", (rows, width))
    at = b.load(b.operand("places", "s32", width), dim(1))
    at = b.apply("clamp", b.constant(0, "s32"), at, b.constant(pitch - 1, "s32"))
    x = b.load(b.operand("table", dtype, rows * pitch), dim(0) * pitch + value(at))
    b.store_dense(b.operand("y", dtype, rows * width), x)
    return b.finish()


def scattered(rows, width, dtype, combine="add", guarded=True):
    """table[places] += x, places outside of it left out."""
    b = PlanBuilder("scatter", (rows, width))
    at, where = b.convert(b.load(b.operand("places", "s32", rows), dim(0)), "s64"), -1
    if guarded:
        low, high = b.constant(0, "s64"), b.constant(TABLE, "s64")
        where = b.apply("and", b.apply("compare-ge", at, low), b.apply("compare-lt", at, high))
    else:
        at = b.apply("clamp", b.constant(0, "s64"), at, b.constant(TABLE - 1, "s64"))
    x = b.load_dense(b.operand("x", dtype, rows * width))
    table = b.operand("table", dtype, TABLE * width)
    b.store(table, value(at) * width + dim(1), x, combine=combine, where=where)
    return b.finish()


def agrees(plan, targets, threads=1, shift=0, rounding=False):
    """Native code of several CPUs writes what the evaluator writes, bit by bit.

    Numbers are small integers, or such that sums of them are `rounding`.
    """
    rng = np.random.default_rng(len(plan.text()))
    arrays = []
    for operand in plan.operands:
        kind = NUMPY_DTYPE[operand.dtype]
        low, high = (-TABLE - 3, TABLE + 3) if operand.name == "places" else (-4, 5)
        if operand.dtype in ("u8", "pred"):
            low, high = 0, 2
        numbers = rng.integers(low, high, operand.size)
        if rounding and operand.name != "places":
            numbers = rng.standard_normal(operand.size)
        arrays.append(numbers.astype(kind))
    wanted = [a.copy() for a in arrays]
    evaluate(plan, wanted)
    for target in targets:
        given = []
        for array in arrays:
            memory = aligned_empty((array.size + shift,), array.dtype)[shift:]
            memory[:] = array
            given.append(memory)
        DirectSequence(plan_kernels(plan, target), target, threads=threads)(*given)
        for got, expected in zip(given, wanted, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.fast_cases
@pytest.mark.parametrize("targets", SIZES, ids=["near", "far"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "f16", "s8", "pred"])
@pytest.mark.parametrize("rows,width", [(1, 64), (2, 16), (70, 32), (7, 100), (5, 257), (9, 768), (3, 2500)])
def test_rows_are_gathered(targets, dtype, rows, width):
    agrees(gathered(rows, width, dtype), targets)


@pytest.mark.fast_cases
@pytest.mark.parametrize("targets", SIZES, ids=["near", "far"])
@pytest.mark.parametrize("make", [embedded, filled, along_columns])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rows,width,shift", [(1, 32, 0), (6, 96, 0), (20, 288, 3), (9, 77, 1)])
def test_real_forms_of_gathers(targets, make, dtype, rows, width, shift):
    agrees(make(rows, width, dtype), targets, shift=shift)
    agrees(make(rows, width, dtype), targets[:1], threads=3)


@pytest.mark.fast_cases
@pytest.mark.parametrize("targets", SIZES, ids=["near", "far"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s8"])
@pytest.mark.parametrize("rows,width,pitch", [(1, 64, 64), (12, 96, 96), (9, 77, 100), (5, 700, 700)])
def test_elements_of_rows_are_gathered(targets, dtype, rows, width, pitch):
    agrees(picked(rows, width, dtype, pitch), targets)


@pytest.mark.fast_cases
@pytest.mark.parametrize("targets", SIZES, ids=["near", "far"])
@pytest.mark.parametrize("dtype,result", [("bf16", "f32"), ("f32", "bf16"), ("s8", "f32"), ("f64", "bf16")])
@pytest.mark.parametrize("width", [16, 64, 160, 777])
def test_rows_are_converted_on_their_way(targets, dtype, result, width):
    agrees(gathered(13, width, dtype, result), targets)


@pytest.mark.fast_cases
@pytest.mark.parametrize("targets", SIZES, ids=["near", "far"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s32"])
@pytest.mark.parametrize("combine,guarded", [("add", True), ("add", False), ("maximum", True), ("", True)])
@pytest.mark.parametrize("rows,width", [(1, 64), (40, 32), (30, 100), (25, 768)])
def test_rows_are_scattered(targets, dtype, combine, guarded, rows, width):
    plan = scattered(rows, width, dtype, combine, guarded)
    agrees(plan, targets)
    agrees(plan, targets[:1], threads=5)


@pytest.mark.fast_cases
@pytest.mark.parametrize("targets", SIZES, ids=["near", "far"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("combine", ["add", "multiply", "minimum"])
@pytest.mark.parametrize("width,threads", [(64, 1), (95, 1), (768, 3)])
def test_every_sum_is_rounded(targets, dtype, combine, width, threads):
    agrees(scattered(40, width, dtype, combine), targets, threads=threads, rounding=True)


def module_of(plan, target):
    module = Module(target)
    for kernel in plan_kernels(plan, target).kernels:
        kernel.emit(module)
    return module


def assembly_of(plan, target):
    return emit_assembly(module_of(plan, target))


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("dtype,result", [("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16")])
def test_gathered_rows_go_past_the_caches(name, dtype, result):
    near = named_target(name)
    text = assembly_of(gathered(50, 768, dtype, result), small_caches(near))
    halves = result == "bf16" and name == "avx2"  # a vector of eight bf16s is no half of a line
    assert ("vmovnt" in text) == (not halves)
    text = assembly_of(gathered(50, 768, dtype, result), near)
    assert "vmovnt" not in text


def test_rounded_results_go_past_the_caches():
    b = PlanBuilder("sum", (4096,))
    x, y = (b.load_dense(b.operand(name, "bf16", 4096)) for name in "xy")
    b.store_dense(b.operand("z", "bf16", 4096), b.apply("add", x, y))
    for name in ("avx512", "avx512_bf16"):
        assert "vmovnt" in assembly_of(b.finish(), small_caches(named_target(name)))


def test_a_part_of_a_large_table_counts_as_that_part():
    target = dataclasses.replace(named_target("avx512"), l3_bytes=100_000)
    b = PlanBuilder("lookup", (16, 64))
    at = b.load(b.operand("places", "s32", 16), dim(0))
    x = b.load(b.operand("table", "f32", 64 * 10_000), value(at) * 64 + dim(1))
    b.store_dense(b.operand("y", "f32", 16 * 64), x)
    assert streamed_operands(b.finish(), target) == frozenset(), "what was looked up stays in a cache"
