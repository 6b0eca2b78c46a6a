"""Groups of several results compute nothing twice: what runs more than once was priced and is cheap."""

import pytest

from examples.workloads.fragments import cases
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.options import CompileOptions
from mpmd.compile.passes.fusion import fusion
from tests.support.native_fragments import fragment_of
from tests.support.repeated_values import repeated_values

SIZE = {"batch": 2, "tokens": 32, "width": 64, "heads": 2, "vocabulary": 128}
CASES = {name: (function, arrays) for name, function, arrays in cases(SIZE, "f32")}


def repeated_in(name, known=CASES, **options):
    function, arrays = known[name]
    made = prepare_fragment(fragment_of(function, *arrays), NativeCpu(), CompileOptions(**options))
    return repeated_values(made.module)


@pytest.mark.parametrize("name", CASES)
def test_fusion_computes_nothing_twice(name, monkeypatch):
    monkeypatch.setattr(fusion, "repeat_cheap_results", lambda grouping, prices: None)
    assert repeated_in(name, attention_stitching="off") == {}


@pytest.mark.parametrize("name", CASES)
def test_what_is_computed_twice_is_cheap(name):
    for opcode, instructions in repeated_in(name, attention_stitching="off").items():
        assert all(i.is_elementwise for i in instructions), opcode
        assert opcode not in OPERATIONS or not OPERATIONS[opcode].is_expensive, opcode


def test_attention_computes_scores_again_and_no_other_product():
    size = {"batch": 4, "tokens": 64, "width": 128, "heads": 4, "vocabulary": 8}
    known = {name: (function, arrays) for name, function, arrays in cases(size, "f32")}
    again = repeated_in("block forward+backward", known)
    assert [i.shape.dims for i in again["dot"]] == [(4, 4, 64, 64)]


def test_values_across_fusions_are_told_apart_and_recognised():
    text = """HloModule twice

f {
  p = f32[8]{0} parameter(0)
  q = f32[8]{0} parameter(1)
  t = f32[8]{0} tanh(p)
  ROOT a = f32[8]{0} add(t, q)
}

g {
  p = f32[8]{0} parameter(0)
  t = f32[8]{0} tanh(p)
  n = f32[8]{0} negate(p)
  ROOT r = (f32[8]{0}, f32[8]{0}) tuple(t, n)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  y = f32[8]{0} parameter(1)
  one = f32[8]{0} fusion(x, y), kind=kLoop, calls=f
  two = (f32[8]{0}, f32[8]{0}) fusion(x), kind=kLoop, calls=g
  three = f32[8]{0} fusion(y, x), kind=kLoop, calls=f
  e = f32[8]{0} get-tuple-element(two), index=1
  n = f32[8]{0} negate(x)
  ROOT all = (f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(one, e, three, n)
}
"""
    found = repeated_values(parse_module(text, "text"))
    assert {opcode: len(instructions) for opcode, instructions in found.items()} == {"tanh": 1, "negate": 1}
