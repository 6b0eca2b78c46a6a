"""The last vector of a row: nothing is written beyond it, whatever is stored."""

import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.direct import DirectSequence, aligned_empty
from mpmd.compile.backends.native_cpu.emit.kernels import plan_kernels
from mpmd.compile.backends.native_cpu.target import host_target, named_target
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.operations import NUMPY_DTYPE

TARGETS = [t for t in (host_target(), named_target("avx512"), named_target("avx2")) if t.runs_here()]


@pytest.mark.parametrize("size", [17, 18, 31, 33])
@pytest.mark.parametrize(
    "of,to", [("s32", "s8"), ("s32", "u16"), ("s64", "s32"), ("f32", "bf16"), ("f32", "f16")]
)
def test_narrow_results_end_where_they_end(of, to, size):
    """A single lane that is left over is stored as narrow as the others."""
    b = PlanBuilder("narrow", (size,))
    x = b.load_dense(b.operand("x", of, size))
    b.store_dense(b.operand("y", to, size), b.convert(b.apply("add", x, x), to))
    given = np.full(size, 3, NUMPY_DTYPE[of])
    for target in TARGETS:
        memory = aligned_empty((size + 64,), NUMPY_DTYPE[to])
        memory[:] = 1
        DirectSequence(plan_kernels(b.finish(), target), target)(given, memory[:size])
        np.testing.assert_array_equal(memory.astype(np.float32), [6] * size + [1] * 64)
