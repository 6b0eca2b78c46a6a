"""Rounds of several vectors, strided loads, stores past the caches: kernels against the evaluator."""

import ctypes
import dataclasses
import mmap

import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.loop import needed_nodes, vectors_at_once
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import streamed_operands
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, dim, value
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import Module
from tests.support.targets import runs_here

TARGETS = {"host": host_target(), "avx2": named_target("avx2")}


def at_the_end_of_a_page(values):
    """The array, its last byte the last one that may be read."""
    pages = -(-values.nbytes // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    end = (pages - 1) * mmap.PAGESIZE
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + end), mmap.PAGESIZE, 0)
    placed = whole[end - values.nbytes : end].view(values.dtype)
    placed[:] = values
    return placed


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("step", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "s32"])
def test_every_second_or_third_element(target, step, dtype):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    rows, width = 3, 75
    size = (rows - 1) * width * step + (width - 1) * step + 1
    b = PlanBuilder("strided", (rows, width))
    x = b.load(b.operand("x", dtype, size), dim(0) * (width * step) + dim(1) * step)
    b.store_dense(b.operand("y", dtype, rows * width), b.apply("add", x, x))
    x = at_the_end_of_a_page(np.arange(size).astype(NUMPY_DTYPE[dtype]))
    y = np.zeros(rows * width, NUMPY_DTYPE[dtype])
    DirectSequence(plan_kernels(b.finish(), TARGETS[target]), TARGETS[target])(x, y)
    np.testing.assert_array_equal(
        y, np.concatenate([2 * x[r * width * step :: step][:width] for r in range(rows)])
    )


def chain(length, dtype="f32", size=1000):
    """((x · x + x) · x + x) ...: every operation waits for the one before."""
    b = PlanBuilder("chain", (size,))
    x = value = b.load_dense(b.operand("x", dtype, size))
    for _ in range(length):
        value = b.apply("add", b.apply("multiply", value, x), x)
    b.store_dense(b.operand("y", dtype, size), value)
    return b.finish()


def wide(count, size=1000):
    """A sum of many values that all exist before the first addition."""
    b = PlanBuilder("wide", (size,))
    x = b.load_dense(b.operand("x", "f32", size))
    values = [b.apply("multiply", x, b.constant(1.0 + k, "f32")) for k in range(count)]
    total = values[-1]
    for item in reversed(values[:-1]):
        total = b.apply("add", total, item)
    b.store_dense(b.operand("y", "f32", size), total)
    return b.finish()


def test_a_round_has_as_many_vectors_as_the_registers_hold():
    few, many, long = chain(3), wide(20), chain(40)
    roots = {plan: [plan.stores[0].node] for plan in (few, many, long)}
    avx512, avx2 = named_target("avx512"), named_target("avx2")
    assert vectors_at_once(few, avx512, roots[few]) == 4
    assert vectors_at_once(many, avx512, roots[many]) == 1
    assert vectors_at_once(many, avx2, roots[many]) == 1
    some = wide(6)
    root = [some.stores[0].node]
    assert vectors_at_once(some, avx512, root) == 4
    assert vectors_at_once(some, avx2, root) == 1, "half the registers"
    assert vectors_at_once(long, avx512, roots[long]) == 1, "more code than it is worth"
    assert vectors_at_once(few, avx512, roots[few], sums=20) == 1


def test_needed_nodes_stop_at_what_is_known():
    plan = chain(2)
    last = plan.stores[0].node
    assert needed_nodes(plan, [last]) == [0, 1, 2, 3, 4]
    assert needed_nodes(plan, [last], known=[0, 2]) == [3, 4]
    assert needed_nodes(plan, [last], known=[last]) == []


def test_operations_of_a_round_stand_side_by_side():
    """All vectors are loaded before the first result is stored."""
    target = named_target("avx512")
    module = Module(target)
    for kernel in plan_kernels(chain(1, size=64), target).kernels:
        kernel.emit(module)
    text = module.text()
    assert text.index("store <16 x float>") > text.rindex(
        "load <16 x float>", 0, text.index("store <16 x float>")
    )
    before = text[: text.index("store <16 x float>")]
    assert before.count("load <16 x float>") == 4


@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("size", [1, 15, 64, 130, 1000])
def test_long_chains_of_any_length(length, dtype, size):
    plan = chain(length, dtype, size)
    x = np.random.default_rng(0).uniform(-0.9, 0.9, size).astype(NUMPY_DTYPE[dtype])
    arrays, expected = [x.copy(), np.zeros_like(x)], [x.copy(), np.zeros_like(x)]
    evaluate(plan, expected)
    DirectSequence(plan_kernels(plan, host_target()), host_target())(*arrays)
    loose = {"f32": 1e-5, "bf16": 2e-2}[dtype]
    np.testing.assert_allclose(
        arrays[1].astype(np.float64), expected[1].astype(np.float64), rtol=loose, atol=loose
    )


@pytest.mark.fast_cases
@pytest.mark.parametrize("dtype", ["pred", "s8", "bf16", "s16", "f32", "f64"])
@pytest.mark.parametrize("width", [1, 31, 64, 100, 300])
def test_rows_are_moved_in_whole_registers(dtype, width):
    rows, places = 7, [3, 0, 3, 5, 1]
    b = PlanBuilder("gather", (len(places), width))
    row = b.load(b.operand("places", "s32", len(places)), dim(0))
    x = b.load(b.operand("x", dtype, rows * width), value(row) * width + dim(1))
    b.store_dense(b.operand("y", dtype, len(places) * width), x)
    x = np.random.default_rng(0).integers(0, 2, (rows, width)).astype(NUMPY_DTYPE[dtype])
    for target in TARGETS.values():
        if not runs_here(target):
            continue
        y = np.zeros((len(places), width), NUMPY_DTYPE[dtype])
        sequence = DirectSequence(plan_kernels(b.finish(), target), target)
        sequence(np.array(places, np.int32), x.reshape(-1), y.reshape(-1))
        np.testing.assert_array_equal(y, x[places])


def test_copies_of_bf16_keep_every_bit():
    """What is loaded, chosen among and stored is not rounded again: denormals and all NaNs stay."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16)
    b = PlanBuilder("copy", (bits.size,))
    b.store_dense(b.operand("y", "bf16", bits.size), b.load_dense(b.operand("x", "bf16", bits.size)))
    y = np.zeros_like(x)
    plan = b.finish()
    arrays = {"x": x.copy(), "y": y}
    DirectSequence(plan_kernels(plan, host_target()), host_target())(*(arrays[o.name] for o in plan.operands))
    np.testing.assert_array_equal(y.view(np.uint16), bits)


# -- stores past the caches --------------------------------------------------------------------------------


def small_cache(target):
    return dataclasses.replace(target, l3_bytes=1024)


def rows_plan(rows, width, offset=0, dtype="f32"):
    b = PlanBuilder("rows", (rows, width), row_dims=1)
    x = b.load_dense(b.operand("x", dtype, rows * width))
    y = b.apply("multiply", x, b.reduce_row("maximum", x))
    b.store(b.operand("y", dtype, rows * width + offset), dim(0) * width + dim(1) + constant(offset), y)
    return b.finish()


def test_which_results_go_past_the_caches():
    target = small_cache(named_target("avx512"))
    plan = rows_plan(8, 64)
    (result,) = plan.results
    assert streamed_operands(plan, target) == {result}
    assert streamed_operands(plan, named_target("avx512")) == frozenset(), "the caches hold it"
    assert streamed_operands(plan, small_cache(named_target("neon"))) == frozenset()
    assert streamed_operands(plan, target, in_place=[result]) == frozenset(), "its lines were just read"
    assert streamed_operands(rows_plan(8, 65), target) == frozenset(), "rows that do not start at a vector"
    assert streamed_operands(rows_plan(8, 64, offset=1), target) == frozenset()
    assert streamed_operands(rows_plan(8, 64, dtype="bf16"), target) == {result}
    assert streamed_operands(rows_plan(8, 80, dtype="bf16"), target) == frozenset(), "half a line is left"
    b = PlanBuilder("update", (4096,))
    x = b.operand("x", "f32", 4096)
    b.store_dense(x, b.apply("negate", b.load_dense(x)))
    assert streamed_operands(b.finish(), target) == frozenset(), "in place"
    b = PlanBuilder("scatter", (4096,))
    b.store(b.operand("y", "f32", 4096), constant(0), b.constant(1.0, "f32"), combine="add")
    assert streamed_operands(b.finish(), target) == frozenset()


@pytest.mark.fast_cases
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "s32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("kind", ["rows", "loop"])
def test_streamed_results_are_right_wherever_they_start(aligned, dtype, kind):
    target = small_cache(host_target())
    rows, width = 9, 128
    plan = rows_plan(rows, width, dtype=dtype) if kind == "rows" else chain(2, dtype, rows * width)
    sequence = plan_kernels(plan, target)
    module = Module(target)
    for kernel in sequence.kernels:
        kernel.emit(module)
    if target.is_x86:
        assert "vmovnt" in emit_assembly(module)
    x = np.random.default_rng(0).uniform(-9, 9, rows * width).astype(NUMPY_DTYPE[dtype])
    memory = aligned_empty((x.size + 8,), x.dtype)
    y = memory[: x.size] if aligned else memory[1 : x.size + 1]
    expected = [x.copy(), np.zeros_like(x)]
    evaluate(plan, expected)
    DirectSequence(sequence, target, threads=2)(x, y)
    loose = 2e-2 if dtype in ("bf16", "f16") else 1e-5
    np.testing.assert_allclose(y.astype(float), expected[1].astype(float), rtol=loose, atol=1e-4)
