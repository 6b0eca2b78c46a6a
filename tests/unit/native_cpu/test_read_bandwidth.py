"""The loop that only reads, a limit for kernels that do little else, and which kernels it is a limit for."""

import ctypes

import numpy as np
import pytest

from benchmarks.fused_kernels import FUSED, only_reads
from benchmarks.kernel_speed import FusedCase, fused_row
from mpmd.compile.backends.native_cpu.direct import aligned_empty
from mpmd.compile.backends.native_cpu.llvm.engine import compile_module
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.profile import emit_read, read_bandwidth
from mpmd.compile.backends.native_cpu.target import host_target, named_target

TARGETS = [t for t in (host_target(), named_target("avx2")) if t.runs_here()]


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


def test_which_kernels_only_read():
    found = {name for name, (make, shape) in FUSED.items() if only_reads(make(*shape, "f32"))}
    assert found == {"column_sums", "square_sum", "log_sums"}


def test_share_of_a_read_stands_only_where_there_is_one():
    case = FusedCase("column_sums", "f32", "memory", 1, {}, 1 << 20, 0.0)
    best = {"copy": 2.0, "own": 4.0}
    assert "of_read" not in fused_row(case, best)
    row = fused_row(case, {**best, "read": 3.0})
    assert (row["of_read"], row["of_copy"]) == (0.75, 0.5)
