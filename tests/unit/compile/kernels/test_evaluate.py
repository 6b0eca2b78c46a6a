"""The meaning of plans: a large space is computed in slices."""

import tracemalloc

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.planner.planned_kernel import plan_instruction

SUM = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }"
RUNNING = """HloModule m
{sum}
ENTRY main {{
  x = f32[{n}] parameter(0)
  z = f32[] constant(0)
  ROOT r = f32[{n}] reduce-window(x, z), window={{size={n} pad={last}_0}}, to_apply=add
}}"""
COLUMNS = """HloModule m
{sum}
ENTRY main {{
  x = f32[{n},3] parameter(0)
  z = f32[] constant(0)
  ROOT r = f32[3] reduce(x, z), dimensions={{0}}, to_apply=add
}}"""
TURNED = """HloModule m
ENTRY main {{
  x = f32[3,{n}] parameter(0)
  ROOT t = f32[{n},3] transpose(x), dimensions={{1,0}}
}}"""
MEANING = {
    RUNNING: lambda x: np.cumsum(x),
    COLUMNS: lambda x: x.sum(0),
    TURNED: lambda x: x.T,
}


def run(text: str, n: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """What the plan of the root gives, and what it means."""
    root = parse_module(text.format(n=n, last=n - 1, sum=SUM)).entry.root
    x = np.arange(root.operands[0].shape.size, dtype=np.float32).reshape(root.operands[0].shape.dims)
    planned = plan_instruction("kernel", root)
    result = np.full(root.shape.dims, np.nan, np.float32)
    given = {"x": x, "z": np.zeros((), np.float32)}
    evaluate(planned.plan, [*(given[a.name] for a in planned.arrays), result], most)
    return result, MEANING[text](x)


@pytest.mark.parametrize("most", [1, 5, 40, 10_000])
@pytest.mark.parametrize("n", [1, 2, 9, 33])
@pytest.mark.parametrize("text", MEANING, ids=["running", "columns", "turned"])
def test_slices_of_a_space_give_what_the_whole_gives(text, n, most):
    np.testing.assert_array_equal(*run(text, n, most))


def test_the_space_of_a_running_sum_is_never_whole_in_memory():
    tracemalloc.start()
    result, wanted = run(RUNNING, 2_000, 1 << 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(result, wanted, rtol=1e-5)
    assert peak < 2_000 * 2_000 * 4, "the space has 16 MB in f32"
