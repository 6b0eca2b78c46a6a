"""The limits of this CPU, measured: multiply-adds, copies and reads of one core."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant, vector
from mpmd.cost.device import Device, cpu_device

_CHAINS = 12  # independent sums: more than latency times units of any core
_READ_STREAMS = 4  # far apart, each read in order: what prefetchers follow best
_READ_BYTES = 256  # of each of them in turn
_READ_AHEAD = 1536  # bytes
_LINE_BYTES = 64


def fma_peak(target: CpuTarget, dtype: str = "f32", *, steps: int = 200_000) -> Callable[[], float]:
    """A function that measures the peak rate of multiply-adds of one core, in FLOP/s.

    Args:
        target: the CPU.
        dtype: `f32`, or `bf16` for products of bf16 pairs.
        steps: length of the measured loop.
    """
    lanes = target.lanes()
    type_, module = vector("float", lanes), Module(target)
    pairs = dtype == "bf16" and target.bf16_dot
    factor = constant(0.001 if pairs else 0.999, vector("bfloat", 2 * lanes) if pairs else type_)

    with FunctionBuilder(module, "peak", [("steps", "i64"), ("out", "ptr")]) as f:

        def step(x: Value) -> Value:
            if pairs:
                return f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", type_, x, factor, factor)
            return f.fma(x, factor, x)

        start = [f.load(f.arguments["out"], type_, lanes * k) for k in range(_CHAINS)]
        with f.loop(0, f.arguments["steps"], carried=start) as loop:
            loop.carry([step(step(x)) for x in loop.carried])
        for k, value in enumerate(loop.carried):
            f.store(value, f.arguments["out"], lanes * k)
    function = compile_module(module, ["peak"]).function("peak", ctypes.c_int64, ctypes.c_void_p)
    out = np.ones(_CHAINS * lanes, np.float32)
    flops = steps * 2 * _CHAINS * lanes * (4 if pairs else 2)
    return _rate(lambda: function(steps, out.ctypes.data), flops)


def _rate(run: Callable[[], object], amount: float) -> Callable[[], float]:
    """A function that measures how much a call does in a second, if it does so much at once."""

    def measure() -> float:
        start = time.perf_counter()
        run()
        return amount / (time.perf_counter() - start)

    return measure


def copy_bandwidth(
    target: CpuTarget, *, elements: int, empty: Callable[..., np.ndarray] = aligned_empty
) -> Callable[[], float]:
    """A function that measures how fast one core copies memory, in bytes read and written per second.

    Args:
        target: the CPU.
        elements: how many floats are copied.
        empty: makes their arrays, of a shape and a dtype.
    """
    b = PlanBuilder("copy", (elements,))
    b.store_dense(b.operand("y", "f32", elements), b.load_dense(b.operand("x", "f32", elements)))
    copy = DirectSequence(plan_kernels(b.finish(), target), target)
    source, destination = empty((elements,), np.float32), empty((elements,), np.float32)
    source[:] = destination[:] = 1
    return _rate(copy.prepare(destination, source), 8.0 * elements)


def emit_read(module: Module, elements: int) -> int:
    """Add a function `read(x, out)` that adds up floats only to have read them.

    Four parts of an array are read side by side, each in its order and with sums of its own, and prefetched
    into the second cache: of many ways that were tried the fastest.

    Args:
        module: where the function goes.
        elements: how many floats `x` has; a remainder of whole rounds is not read.

    Returns:
        How many floats `out` gets: the sum of all of them is that of the elements that were read.
    """
    lanes = module.target.lanes()
    type_, width = vector("float", lanes), _READ_BYTES // 4
    part = elements // (_READ_STREAMS * width) * width
    starts = [stream * part for stream in range(_READ_STREAMS)]
    places = [start + offset for start in starts for offset in range(0, width, lanes)]
    with FunctionBuilder(module, "read", [("x", "ptr"), ("out", "ptr")]) as f:
        x, out = f.arguments["x"], f.arguments["out"]
        with f.loop(0, part, width, carried=[constant(0.0, type_)] * len(places)) as loop:
            for start in starts:
                for line in range(_READ_AHEAD, _READ_AHEAD + _READ_BYTES, _LINE_BYTES):
                    f.prefetch(f.offset(x, f.iadd(loop.i, start + line // 4), "float"), locality=2)
            read = [f.load(x, type_, f.iadd(loop.i, place)) for place in places]
            loop.carry([f.add(total, value) for total, value in zip(loop.carried, read, strict=True)])
        for k, total in enumerate(loop.carried):
            f.store(total, out, lanes * k)
    return lanes * len(places)


def read_bandwidth(
    target: CpuTarget, *, elements: int, empty: Callable[..., np.ndarray] = aligned_empty
) -> Callable[[], float]:
    """A function that measures how fast one core reads memory, in bytes per second; see `emit_read`.

    Args:
        target: the CPU.
        elements: how many floats are read.
        empty: makes their array, of a shape and a dtype.
    """
    module = Module(target)
    sums = aligned_empty((emit_read(module, elements),), np.float32)
    code = compile_module(module, ["read"])
    function = code.function("read", ctypes.c_void_p, ctypes.c_void_p)
    array = empty((elements,), np.float32)
    array[:] = 1
    arguments = (ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(sums.ctypes.data))

    def run(held: object = (array, sums, code)) -> None:
        function(*arguments)

    return _rate(run, 4.0 * elements)


@lru_cache(maxsize=4)
def measured_device(target: CpuTarget, cores: int) -> Device:
    """This CPU as the cost models see it, its peaks measured once per process in some 50 ms."""
    f32, bf16, copy = fma_peak(target), fma_peak(target, "bf16"), copy_bandwidth(target, elements=1 << 21)
    peaks = [max(measure() for _ in range(3)) for measure in (f32, bf16, copy)]
    return cpu_device(
        f"{target.cpu}x{cores}",
        cores=cores,
        vector_bytes=target.vector_bytes,
        registers=target.vector_registers,
        f32_flops=peaks[0],
        bf16_flops=peaks[1],
        memory_bandwidth=peaks[2],
        caches=(target.l1_bytes, target.l2_bytes, target.l3_bytes),
    )
