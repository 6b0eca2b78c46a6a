"""What passes report is given to users in terms of JAX and of their code."""

from __future__ import annotations

import pytest

from mpmd.support.user_code import readable

TEXTS = {
    'from #sdy.sharding<@mesh, [{"x", "y"}, {}]> to #sdy.sharding<@m, [{"x", ?}p1], unreduced={"y"}>.': (
        "from P(('x', 'y'), None) to P('x'), unreduced={\"y\"}."
    ),
    "w (tensor<4x8xf32>), tensor<bf16>, tensor<2xcomplex<f32>> and <3xi1>": (
        "w (f32[4,8]), bf16[], c64[2] and i1[3]"
    ),
    'at loc("params[\'w (\\")\']"), then': "at params['w (\\\")'], then",
    'loc(callsite("f"("/u/a.py":3:4 to :5) at "g"("/u/b (1).py":1:1))) and loc(unknown)': (
        "/u/a.py:3, in f and an unknown place"
    ),
    "nothing of this: block(1), alloc(2), <mesh>": "nothing of this: block(1), alloc(2), <mesh>",
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_notation_of_the_ir_becomes_that_of_users(text):
    assert readable(text) == TEXTS[text]
