import dataclasses

import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectKernel, row_major
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import GemmKernel, gemm_kernel
from mpmd.compile.backends.native_cpu.gemm.tiling import choose_tiling
from mpmd.compile.backends.native_cpu.kernels.loop import PlanEpilogue
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.errors import CompileError
from tests.support.targets import runs_here


def bias_gelu_residual(space, dtype):
    """u = sums + bias; y = gelu(u) + residual: both are results."""
    rank, n, size = len(space), space[-1], int(np.prod(space))
    b = PlanBuilder("bias_gelu_residual", space)
    op = b.apply
    sums = b.load_dense(b.operand("sums", "f32", size))
    bias = b.convert(b.load_dense(b.operand("bias", dtype, n), (rank - 1,)), "f32")
    residual = b.convert(b.load_dense(b.operand("residual", dtype, size)), "f32")
    u = op("add", sums, bias)
    half = op("multiply", u, b.constant(0.5, "f32"))
    gelu = op(
        "multiply",
        half,
        op("add", b.constant(1.0, "f32"), op("erf", op("multiply", u, b.constant(0.5**0.5, "f32")))),
    )
    b.store_dense(b.operand("u", dtype, size), b.convert(u, dtype))
    b.store_dense(b.operand("y", dtype, size), b.convert(op("add", gelu, residual), dtype))
    return b.finish()


@pytest.mark.parametrize("target", ["host", "avx2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("batch,kc", [((), 512), ((2, 3), 16)])
def test_plan_as_epilogue(dtype, batch, kc, target):
    cpu = host_target() if target == "host" else named_target(target)
    if not runs_here(cpu):
        pytest.skip(f"{target} does not run here")
    m, n, k = 29, 75, 40
    gemm = row_major(m, n, k, dtype, out_dtype="f32", batch=batch)
    plan = bias_gelu_residual((*batch, m, n), dtype)
    epilogue = PlanEpilogue(plan, 0)
    epilogue.check(gemm)
    tiling = dataclasses.replace(choose_tiling(gemm, cpu), kc=kc)
    kernel = DirectKernel(GemmKernel("product", gemm, tiling, epilogue=epilogue), cpu, threads=2)
    rng = np.random.default_rng(0)
    kind = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[dtype]
    a, b = (rng.standard_normal(s).astype(kind) for s in ((*batch, m, k), (*batch, k, n)))
    bias, residual = rng.standard_normal(n).astype(kind), rng.standard_normal((*batch, m, n)).astype(kind)
    u, y = np.zeros((*batch, m, n), kind), np.zeros((*batch, m, n), kind)
    kernel(a, b, bias, residual, u, y)
    sums = a.astype(np.float32) @ b.astype(np.float32)
    expected = [sums, bias, residual, np.zeros_like(u), np.zeros_like(y)]
    evaluate(plan, expected)
    tolerance = 2e-5 if dtype == "f32" else 1e-2
    for got, wanted in ((u, expected[3]), (y, expected[4])):
        np.testing.assert_allclose(
            got.astype(np.float32), wanted.astype(np.float32), rtol=tolerance, atol=5 * tolerance
        )


def test_epilogues_that_do_not_fit_are_refused():
    gemm = row_major(4, 8, 4)
    with pytest.raises(
        CompileError, match=r"loop kernel over \(4, 9\); the product needs a loop over \(4, 8\)"
    ):
        PlanEpilogue(bias_gelu_residual((4, 9), "f32"), 0).check(gemm)
    with pytest.raises(CompileError, match="reads the sums as f32; they are f64"):
        PlanEpilogue(bias_gelu_residual((4, 8), "f32"), 0).check(row_major(4, 8, 4, "f64"))
    with pytest.raises(CompileError, match="reads the sums at d1, not at"):
        PlanEpilogue(bias_gelu_residual((4, 8), "f32"), 1).check(gemm)
    assert gemm_kernel("product", gemm, host_target()).pointers == ("a", "b", "c")
