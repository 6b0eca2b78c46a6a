"""Casts that come before anything else a body does with an argument."""

from __future__ import annotations

import pytest

from mpmd import ir
from mpmd.sharding.gathers import cast_of

W, H = "tensor<3x4x4xf32>", "tensor<3x4x4xbf16>"
LAYER, X = "tensor<1x4x4xf32>", "tensor<4x4xbf16>"
AS_BF16 = f"%c = stablehlo.convert %w : ({W}) -> {H}"

CASTS = {
    "at once": AS_BF16,
    "twice": f"{AS_BF16}\n%d = stablehlo.convert %w : ({W}) -> {H}",
    "of a part": (
        f"%p = stablehlo.slice %w [1:2, 0:4, 0:4] : ({W}) -> {LAYER}\n"
        f"%q = stablehlo.transpose %p, dims = [0, 2, 1] : ({LAYER}) -> {LAYER}\n"
        f"%r = stablehlo.reshape %q : ({LAYER}) -> tensor<4x4xf32>\n"
        f"%c = stablehlo.convert %r : (tensor<4x4xf32>) -> {X}"
    ),
    "rematerialised": (
        f"%x = stablehlo.negate %v : {W}\n"
        f"%p, %q = stablehlo.optimization_barrier %x, %w : {W}, {W}\n"
        f"%c = stablehlo.convert %q : ({W}) -> {H}"
    ),
}
OTHERS = {
    "unused": "",
    "two types": f"{AS_BF16}\n%d = stablehlo.convert %w : ({W}) -> tensor<3x4x4xf16>",
    "a larger type": f"%c = stablehlo.convert %w : ({W}) -> tensor<3x4x4xf64>",
    "a norm": f"{AS_BF16}\n%n = stablehlo.multiply %w, %w : {W}",
    "after other work": f"%n = stablehlo.negate %w : {W}\n%c = stablehlo.convert %n : ({W}) -> {H}",
}

LOOP = """
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %end = stablehlo.constant dense<3> : tensor<i32>
  %l:3 = stablehlo.while(%i = %zero, %s = %w, %x = %a) : tensor<i32>, tensor<3x4x4xf32>, tensor<4x4xbf16>
  cond {{
    %c = stablehlo.compare LT, %i, %end, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %n = stablehlo.add %i, %one : tensor<i32>
    %p = stablehlo.dynamic_slice %s, %i, %zero, %zero, sizes = [1, 4, 4] :
      (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
    %q = stablehlo.reshape %p : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
    %h = stablehlo.convert %q : (tensor<4x4xf32>) -> tensor<4x4xbf16>
    %d = stablehlo.dot_general %x, %h, contracting_dims = [1] x [0] :
      (tensor<4x4xbf16>, tensor<4x4xbf16>) -> tensor<4x4xbf16>
    %o = stablehlo.reverse %v, dims = [0] : tensor<3x4x4xf32>
    stablehlo.return %n, {}, %d : tensor<i32>, tensor<3x4x4xf32>, tensor<4x4xbf16>
  }}
"""


def body(text: str) -> ir.Func:
    (main,) = ir.funcs(ir.parse(f"func.func @main(%w: {W}, %v: {W}, %a: {X}) {{\n{text}\n return }}"))
    return main


@pytest.mark.parametrize("text", [*CASTS.values(), LOOP.format("%s")], ids=[*CASTS, "of layers"])
def test_the_body_takes_the_cast(text):
    main = body(text)
    cast = cast_of(main.args[0])
    assert cast is not None
    cast.move_out()
    ir.return_types_changed(main)
    assert main.operation.verify()
    assert str(main.args[0].type) == H
    assert not any(op.operation.name == "stablehlo.convert" for op in ir.walk(main))


@pytest.mark.parametrize("text", [*OTHERS.values(), LOOP.format("%o")], ids=[*OTHERS, "changed by a loop"])
def test_a_body_that_reads_the_argument_itself(text):
    assert cast_of(body(text).args[0]) is None
