"""The loop that only reads, and the limit that it and a copy are for kernels that read more."""

import ctypes

import numpy as np
import pytest

from benchmarks.cpu_limits import emit_read, read_bandwidth
from benchmarks.fused_kernels import FUSED, Traffic, traffic_of
from benchmarks.kernel_speed import FusedCase, fused_row
from mpmd.compile.backends.native_cpu.ffi import aligned_empty
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import Module
from tests.support.targets import runs_here

TARGETS = [t for t in (host_target(), named_target("avx2")) if runs_here(t)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("elements", [0, 255, 256, 511, 1024, 5000])
def test_every_float_is_read_once(target, elements):
    """The sum of whole rounds is that of all floats, and what lies behind them is left alone."""
    module = Module(target)
    out = aligned_empty((emit_read(module, elements),), np.float32)
    code = compile_module(module, ["read"])
    x = aligned_empty((elements + 64,), np.float32)
    x[:] = np.nan  # what lies after the end is not read
    x[:elements] = np.random.default_rng(elements).integers(0, 100, elements)
    code.function("read", ctypes.c_void_p, ctypes.c_void_p)(x.ctypes.data, out.ctypes.data)
    assert out.sum() == x[: elements // 256 * 256].sum()


def test_bandwidth_is_that_of_some_memory():
    assert 1e6 < read_bandwidth(host_target(), elements=1 << 16)() < 1e14


def test_what_a_kernel_changes_it_reads_and_writes():
    moved = {name: traffic_of(make(*shape, "f32")) for name, (make, shape) in FUSED.items()}
    assert moved["adam"].read * 3 == moved["adam"].written * 4  # also the gradient
    assert moved["residual"].read == 2 * moved["residual"].written
    assert moved["square_sum"].written == 4
    assert moved["transpose"].read == moved["transpose"].written


def test_the_limit_copies_what_is_written_and_reads_the_rest():
    assert Traffic(8, 8).limit(copy=2.0, read=3.0) == 2.0
    assert Traffic(16, 0).limit(copy=2.0, read=3.0) == 3.0
    assert Traffic(3, 1).limit(copy=2.0, read=4.0) == 3.0
    case = FusedCase("sum", "f32", "memory", 1, {}, Traffic(16, 0), 8, 3.5)
    row = fused_row(case, {"copy": 1.0, "memcpy": 2.5, "read": 1.5, "own": 4.0})
    assert [row[f"of_{name}"] for name in ("copy", "memcpy", "limit", "roofline")] == [0.5, 1.25, 0.75, 0.875]
    assert not row["memory_bound"]
