"""Loops whose bodies hold names get a function for an iteration, however JAX wrote them down."""

from __future__ import annotations

import re

import pytest

import mpmd
from mpmd import ir
from mpmd.tracing.expand import Expansion

LOOP = """
module {
  func.func public @main(%x: tensor<3x4xf32>, %w: tensor<4xf32>) -> (tensor<4xf32>, tensor<3x4xf32>) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %out = stablehlo.constant dense<0.0> : tensor<3x4xf32>
    %r:4 = stablehlo.while(%rows = %x, %i = %zero, %sum = %w, %all = %out)
        : tensor<3x4xf32>, tensor<i32>, tensor<4xf32>, tensor<3x4xf32>
    cond {
      %n = stablehlo.constant dense<3> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %two = stablehlo.constant dense<2.0> : tensor<4xf32>
      %row = func.call @row(%rows, %i) : (tensor<3x4xf32>, tensor<i32>) -> tensor<4xf32>
      %a = func.call @mpmd.comp.f.(%row) : (tensor<4xf32>) -> tensor<4xf32>
      BETWEEN
      %b = stablehlo.multiply %a, %two : tensor<4xf32>
      %s = stablehlo.add %sum, %b : tensor<4xf32>
      %l = func.call @put(%all, %b, %i) : (tensor<3x4xf32>, tensor<4xf32>, tensor<i32>) -> tensor<3x4xf32>
      %t = func.call @mpmd.comp.f.(%s) : (tensor<4xf32>) -> tensor<4xf32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %rows, %next, %t, %l : tensor<3x4xf32>, tensor<i32>, tensor<4xf32>, tensor<3x4xf32>
    }
    return %r#2, %r#3 : tensor<4xf32>, tensor<3x4xf32>
  }
  func.func private @row(%x: tensor<3x4xf32>, %i: tensor<i32>) -> tensor<4xf32> {
    %z = stablehlo.constant dense<0> : tensor<i32>
    %r = stablehlo.dynamic_slice %x, %i, %z, sizes = [1, 4]
      : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
    %v = stablehlo.reshape %r : (tensor<1x4xf32>) -> tensor<4xf32>
    return %v : tensor<4xf32>
  }
  func.func private @put(%x: tensor<3x4xf32>, %v: tensor<4xf32>, %i: tensor<i32>) -> tensor<3x4xf32> {
    %z = stablehlo.constant dense<0> : tensor<i32>
    %r = stablehlo.reshape %v : (tensor<4xf32>) -> tensor<1x4xf32>
    %u = stablehlo.dynamic_update_slice %x, %r, %i, %z
      : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32>
    return %u : tensor<3x4xf32>
  }
  func.func private @mpmd.comp.f.(%x: tensor<4xf32>) -> tensor<4xf32> {
    %t = stablehlo.tanh %x : tensor<4xf32>
    return %t : tensor<4xf32>
  }
}
"""
AT_THE_COUNTER = """
      %wide = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
      %many = stablehlo.broadcast_in_dim %wide, dims = [] : (tensor<f32>) -> tensor<4xf32>
      %scaled = stablehlo.add %a, %many : tensor<4xf32>
"""


@pytest.mark.parametrize("between", ["", AT_THE_COUNTER], ids=["slices", "arithmetic with the counter"])
def test_what_an_iteration_computes_is_a_function_and_its_slices_stay(between):
    text = LOOP.replace("BETWEEN", between)
    module = ir.parse(text.replace("multiply %a,", "multiply %scaled,") if between else text)
    topology = mpmd.make_topology({"m0": 1}).ir()
    with ir.context(), ir.Location.unknown():
        Expansion(module, topology).run()
        assert module.operation.verify()
    function, main = str(module).split("func.func public @main")
    (call,) = re.findall(r"mpmd\.call @(\w+)\(", main)
    assert f"func.func private @{call}(" in function
    assert function.count("mpmd.named_computation") == 2 and "slice" not in function
    assert main.index("stablehlo.dynamic_slice") < main.index("mpmd.call")
    assert main.index("mpmd.call") < main.index("stablehlo.dynamic_update_slice")
    assert "multiply" not in main and ("stablehlo.convert" in main) == bool(between)
