"""The rule by which launches and bytes of both compilers are counted."""

import pytest

from benchmarks.gpu.counting import totals, xla_launches
from mpmd.cost.device import H200

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: bf16[8,4], q: bf16[4,2]) -> bf16[8,2] {
  %p = bf16[8,4]{1,0} parameter(0)
  %q = bf16[4,2]{1,0} parameter(1)
  ROOT %d = bf16[8,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[8,4], b: bf16[4,2]) -> (bf16[8,2], f32[2,2]) {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,2]{1,0} parameter(1)
  %f = bf16[8,2]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
  %g = (f32[2,2]{1,0}, s8[16]{0}) custom-call(%b, %b), custom_call_target="__cublas$gemm", backend_config=\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}
  %e = f32[2,2]{1,0} get-tuple-element(%g), index=0
  ROOT %t = (bf16[8,2]{1,0}, f32[2,2]{1,0}) tuple(%f, %e)
}
"""


def test_distinct_operands_and_results_of_each_launch():
    fusion, product = xla_launches(PROGRAM)
    assert (fusion.kind, fusion.bytes, fusion.flops, fusion.dtype) == ("fusion", 64 + 16 + 32, 128.0, "bf16")
    assert (product.kind, product.bytes, product.flops) == ("__cublas$gemm", 16 + 16 + 16, 32.0)
    found = totals([fusion, product], H200)
    assert found["launches"] == 2 and found["bytes"] == 160
    assert found["modelled_ms"] == pytest.approx(2e3 * H200.start_seconds, rel=0.01)
