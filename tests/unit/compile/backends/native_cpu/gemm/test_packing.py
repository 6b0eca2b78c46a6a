"""What micro-kernels read: strips in their order, and the lines that are fetched for those who come after."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import Fetch, Fetching
from mpmd.compile.backends.native_cpu.gemm.packing import Pack
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from tests.support.targets import runs_here

TARGETS = {"host": host_target(), "avx2": named_target("avx2"), "avx512": named_target("avx512")}
NUMPY = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}
CANARY = 0xA5


def packed(pack, source, lane_stride, step_stride, depth, valid, size, target):
    """What a packing function writes, and that it writes nothing else but one register more."""
    module = Module(target)
    pack.emit(module)
    sizes = [ctypes.c_int64] * 4
    pointer = ctypes.c_void_p
    function = compile_module(module, [pack.name]).function(pack.name, pointer, *sizes, pointer)
    destination = aligned_empty((size + 256,), np.uint8)
    destination[:] = CANARY
    function(source.ctypes.data, lane_stride, step_stride, depth, valid, destination.ctypes.data)
    assert (destination[size + 64 :] == CANARY).all()
    return destination[:size]


@pytest.mark.fast_cases
@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("dtype,step", [("f32", "f32"), ("f64", "f64"), ("bf16", "f32"), ("bf16", "bf16x2")])
@pytest.mark.parametrize("width", [6, 8, 12])
def test_strips_beside_each_other_are_copied_together(target, dtype, step, width):
    target = TARGETS[target]
    if not runs_here(target) or (step == "bf16x2" and not target.bf16_dot):
        pytest.skip("not on this machine")
    pack = Pack(dtype, step, width, "lanes")
    per_step, element = (2, 4) if step == "bf16x2" else (1, 8 if step == "f64" else 4)
    if not pack.many_strips(target):
        pytest.skip("strips of whole registers are copied one by one")
    for valid, depth in (
        (1, 1),
        (width, 8),
        (2 * width, 7),
        (3 * width + 5, 21),
        (2 * width + 1, 36),
        (3, 3),
    ):
        matrix = aligned_empty((depth, valid), NUMPY[dtype])
        matrix[...] = np.random.default_rng(valid).standard_normal(matrix.shape)
        strips, steps = -(-valid // width), -(-depth // per_step)
        expected = np.zeros((steps * per_step, strips * width), NUMPY[dtype])
        expected[:depth, :valid] = matrix
        expected = expected.reshape(steps, per_step, strips, width).transpose(2, 0, 3, 1)
        if dtype == "bf16" and step == "f32":
            expected = expected.astype(np.float32)
        item = matrix.itemsize
        size = strips * steps * width * element
        found = packed(pack, matrix, item, valid * item, depth, valid, size, target)
        np.testing.assert_array_equal(found.view(expected.dtype), expected.reshape(-1), f"{valid}x{depth}")


def fetched(start, count, distance, size, lines, known):
    """Offsets from the first byte of the lines that a fetch asks for; `known` makes the sizes constants."""
    module = Module(host_target())
    names = ["count", "distance", "size", "lines"]
    arguments = [("start", "ptr"), *((n, "i64") for n in names), ("out", "ptr")]
    with FunctionBuilder(module, "walk", arguments) as f:
        fetch = Fetch(f)
        numbers = (count, distance, size) if known else [f.arguments[n] for n in names[:3]]
        fetch.runs(f.arguments["start"], *numbers)
        for half in range(2):  # as two tiles do, one after the other
            fetching = Fetching(f, fetch.place)
            with f.loop(0, f.arguments["lines"], carried=fetching.start) as loop:
                at = f.iadd(loop.i, f.imul(f.arguments["lines"], half))
                f.store(f.index(f.imin(loop.carried[0], 0)), f.arguments["out"], at)
                loop.carry(fetching.line(loop.carried))
            fetching.leave(loop.carried)
    function = compile_module(module, ["walk"]).function(
        "walk", ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p
    )
    out = np.zeros(2 * lines, np.int64)
    function(start.ctypes.data, count, distance, size, lines, out.ctypes.data)
    return out + (count - 1) * distance + size - 1


@pytest.mark.parametrize("known", [False, True])
def test_a_fetch_asks_for_every_line_of_every_run_and_then_for_the_last(known):
    for count, distance, size in ((3, 640, 128), (1, 640, 640), (5, 192, 64), (4, 200, 48), (2, 4096, 300)):
        start = aligned_empty((count * distance + size,), np.uint8)
        asked = fetched(start, count, distance, size, 40, known)
        lines = {run * distance + at for run in range(count) for at in range(0, size, 64)}
        assert lines <= set(asked.tolist()), "a line is missing"
        last = (count - 1) * distance + size - 1
        assert asked.max() == last and (asked[-20:] == last).all(), "beyond the end"
        exact = size % 64 == distance % 64 == 0 and known
        if exact:
            assert asked[: len(lines)].tolist() == sorted(lines), "lines are asked for once, in order"
