"""Which roundings to bf16 between products and what is stored a plan keeps."""

import pytest

from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import Apply
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.precision import without_narrow_sums

ROWS, WIDTH = 4, 6


def weights(*, scale=0.3, stored="", loaded="", kept=False, compared=False):
    """A softmax of rounded scores, and its product with other rounded sums; returns the roundings left."""
    b = PlanBuilder("rows", (ROWS, WIDTH), row_dims=1)

    def rounded(value):
        return b.convert(b.convert(value, "bf16"), "f32")

    sums, others = (b.load_dense(b.operand("", "f32", ROWS * WIDTH)) for _ in range(2))
    x = rounded(b.apply("multiply", rounded(sums), b.constant(scale, "f32")))
    top = b.reduce_row("maximum", x)
    if loaded:
        top = b.convert(b.load(b.operand("", loaded, ROWS), dim(0)), "f32")
    e = b.apply("exponential", b.apply("subtract", x, top))
    g = rounded(others)
    if compared:
        e = b.apply("select", b.apply("compare-gt", g, b.constant(0.0, "f32")), e, x)
    factor = b.operand("", "bf16", ROWS * WIDTH)
    b.store_dense(factor, b.convert(b.apply("multiply", e, g), "bf16"))
    if stored:
        b.store(b.operand("", stored, ROWS), dim(0), b.convert(top, stored))
    if kept:
        b.store_dense(b.operand("", "f32", ROWS * WIDTH), g)
    plan = without_narrow_sums(b.finish(), {factor})
    narrow = [n for n in plan.nodes if isinstance(n, Apply) and n.op == "convert" and n.dtype == "bf16"]
    return len(narrow) - 1 - (stored == "bf16")


def test_values_inside_of_a_kernel_are_not_rounded():
    assert weights() == 0


@pytest.mark.parametrize("how", ["stored", "loaded"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_exponents_are_rounded_if_their_maximum_is_in_memory(how, dtype):
    """Other kernels subtract it from exponents that they have rounded."""
    assert weights(**{how: dtype}) == 2


def test_a_rounded_value_times_a_power_of_two_is_rounded():
    assert weights(scale=0.25, stored="f32") == 1


def test_values_that_others_read_are_rounded():
    assert weights(kept=True) == 1


def test_values_that_are_compared_are_rounded():
    assert weights(compared=True) == 1
