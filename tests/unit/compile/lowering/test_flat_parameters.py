"""Parameters that are tuples, as one parameter for each of their arrays."""

import numpy as np

from mpmd.compile.hlo import parse_module, print_module, verify
from mpmd.compile.lowering.lower import flatten_parameters
from tests.support.native_hlo import run_module

TEXT = """HloModule m, input_output_alias={ {0}: (0, {1,0}, may-alias), {1}: (1, {}, must-alias) },
  buffer_donor={ (0, {0}) }

ENTRY main {
  t = (f32[2,3]{0,1}, (s32[4], f32[])) parameter(0)
  x = f32[2,3]{1,0} parameter(1)
  a = f32[2,3]{0,1} get-tuple-element(t), index=0
  u = (s32[4], f32[]) get-tuple-element(t), index=1
  b = s32[4] get-tuple-element(u), index=0
  c = f32[] get-tuple-element(u), index=1
  d = f32[2,3]{1,0} broadcast(c), dimensions={}
  e = f32[2,3]{1,0} add(a, x)
  f = f32[2,3]{1,0} multiply(e, d)
  n = s32[4] negate(b)
  ROOT r = (s32[4], f32[2,3]{1,0}) tuple(n, f)
}"""


def test_numbers_layouts_aliases_and_donors_follow():
    module = parse_module(TEXT)
    flatten_parameters(module)
    verify(module)
    text = print_module(module)
    assert "entry_computation_layout={(f32[2,3]{0,1}, s32[4]{0}, f32[], f32[2,3]{1,0})->" in text
    assert "input_output_alias={ {0}: (1, {}, may-alias), {1}: (3, {}, must-alias) }" in text
    assert "buffer_donor={ (0, {}) }" in text


def test_a_module_without_tuples_stays():
    module = parse_module("HloModule m\nENTRY main {\n  ROOT x = f32[2]{0} parameter(0)\n}")
    before = print_module(module)
    flatten_parameters(module)
    assert print_module(module) == before


def test_the_program_computes_the_same():
    a, x = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    b, c = np.arange(4, dtype=np.int32), np.float32(3)
    text = TEXT.replace("{0,1}", "{1,0}")
    negated, product = run_module(parse_module(text), [a, b, c, x])
    np.testing.assert_array_equal(negated, -b)
    np.testing.assert_array_equal(product, (a + x) * c)
