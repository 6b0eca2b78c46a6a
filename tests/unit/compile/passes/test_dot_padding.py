"""Padded products: the same numbers as before, also beside infinities, and when padding pays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, print_module
from mpmd.compile.passes.expand.products import DotPadding
from mpmd.cost.device import H100
from tests.support.rewrite_checks import rewritten

LOSS = """HloModule loss

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

most {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] maximum(a, b)
}

ENTRY main {
  x = bf16[256,64] parameter(0)
  w = bf16[250,64] parameter(1)
  bias = f32[250] parameter(2)
  zero = f32[] constant(0)
  least = f32[] constant(-inf)
  turned = bf16[64,250] transpose(w), dimensions={1,0}
  s = bf16[256,250] dot(x, turned), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  f = f32[256,250] convert(s)
  biases = f32[256,250] broadcast(bias), dimensions={1}
  g = f32[256,250] add(f, biases)
  top = f32[256] reduce(g, least), dimensions={1}, to_apply=most
  tops = f32[256,250] broadcast(top), dimensions={0}
  h = f32[256,250] subtract(g, tops)
  total = f32[256] reduce(h, zero), dimensions={1}, to_apply=sum
  column = f32[250] reduce(h, zero), dimensions={0}, to_apply=sum
  places = f32[256,250] iota(), iota_dimension=1
  k = f32[256,250] multiply(places, h)
  q = f32[256,250] divide(k, biases)
  n = bf16[256,250] convert(q)
  dx = bf16[256,64] dot(n, turned), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  dw = bf16[250,64] dot(n, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT r = (f32[256], f32[256], f32[250], bf16[256,64], bf16[250,64]) tuple(top, total, column, dx, dw)
}
"""


def arguments(special):
    """Small integers, whose sums are exact in any order; one row of x has other numbers.

    No bias is 0, so what is divided by them is a number; behind their end it is none.
    """
    rng = np.random.default_rng(0)
    shapes = ((256, 64), (250, 64))
    x, w = (rng.integers(-2, 3, shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    if special is not None:
        x[5, 3] = special
    return [x, w, rng.integers(1, 3, 250).astype(np.float32)]


def pads(text):
    """Whether the pass changes a program."""
    return DotPadding(device=H100).run(parse_module(text))


@pytest.mark.parametrize("special", [None, np.inf, np.nan])
def test_numbers_stay_and_every_product_has_even_rows(special):
    module = parse_module(LOSS)
    assert rewritten(module, arguments(special), DotPadding().run, signs=False)
    DotPadding().run(module)
    dots = [i for i in module.entry.post_order() if i.opcode == "dot"]
    assert all(n % 64 == 0 for dot in dots for o in dot.operands for n in o.shape.dims)


def test_sums_that_start_with_a_number_read_it_once():
    module = parse_module(LOSS.replace("constant(0)", "constant(3)"))
    assert rewritten(module, arguments(None), DotPadding().run)


def test_rows_of_one_kernel_become_longer_together():
    """No row is copied to be longer, and all reductions read longer ones."""
    module = parse_module(LOSS)
    DotPadding().run(module)
    assert not [i for i in module.entry.post_order() if i.opcode == "pad" and i.shape.dims == (256, 256)]
    reductions = [i for i in module.entry.post_order() if i.opcode == "reduce"]
    assert [i.operands[0].shape.dims for i in reductions] == [(256, 256)] * 3, print_module(module)
    column = next(i for i in reductions if i.dimensions == (0,))
    assert [user.opcode for user in column.users] == ["slice"]


def product(m, k, n, dtype="bf16"):
    return (
        f"HloModule p\n\nENTRY main {{\n  x = {dtype}[{m},{k}] parameter(0)\n"
        f"  y = {dtype}[{k},{n}] parameter(1)\n"
        f"  ROOT r = {dtype}[{m},{n}] dot(x, y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n}}\n"
    )


@pytest.mark.parametrize(
    "sizes, padded",
    [
        ((8192, 50257, 768), True),
        ((8192, 768, 50257), True),
        ((8192, 1002, 4096), True),
        ((8192, 50256, 768), False),
        ((64, 50257, 768), False),
        ((50257, 768, 4096), False),
        ((8192, 129, 4096), False),
    ],
)
def test_what_pays(sizes, padded):
    """Rows are along k and n; a small product takes less than copying, and a dim grows by a 16th at most."""
    assert pads(product(*sizes)) == padded
    assert not pads(product(*sizes, dtype="f32"))
