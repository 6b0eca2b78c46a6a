"""Native code for HLO that JAX does not write but optimised programs have; the evaluator is the oracle."""

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, verify
from mpmd.errors import CompileError
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module

X = "x = f32[4,8]{1,0} parameter(0)"
VALUES = np.linspace(-3, 5, 32, dtype=np.float32).reshape(4, 8)
SUMS = """sums {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  c = f32[] parameter(2)
  d = f32[] parameter(3)
  s = add(a, c)
  m = maximum(b, d)
  ROOT t = tuple(s, m)
}"""
NEGATE = """negated {
  p = f32[4,8] parameter(0)
  ROOT n = negate(p)
}"""
LOOP = """less {
  t = (s32[], s32[]) parameter(0)
  a = get-tuple-element(t), index=0
  k = s32[] constant(3)
  ROOT n = compare(a, k), direction=LT
}
next {
  t = (s32[], s32[]) parameter(0)
  a = get-tuple-element(t), index=0
  m = get-tuple-element(t), index=1
  k = s32[] constant(1)
  n = add(a, k)
  q = subtract(m, n)
  ROOT r = tuple(n, q)
}"""


def module(*lines: str, before: str = "", header: str = "HloModule m") -> str:
    return "\n".join([header, before, "ENTRY e {", *(f"  {line}" for line in lines), "}", ""])


PROGRAMS = {
    "constant tuple as result": module(
        X, "c = (f32[], (s32[2], pred[])) constant((1.5, ({1, 2}, true)))", "ROOT r = tuple(x, c)"
    ),
    "constant tuple taken apart": module(
        X,
        "c = (f32[], s32[2]) constant((1.5, {1, 2}))",
        "g = get-tuple-element(c), index=0",
        "b = f32[4,8] broadcast(g), dimensions={}",
        "ROOT r = add(x, b)",
    ),
    "constant tuple as state": module(
        X,
        "c = (s32[], s32[]) constant((0, 5))",
        "w = while(c), condition=less, body=next",
        "ROOT r = tuple(w, x)",
        before=LOOP,
    ),
    "copy started": module(
        X,
        "s = (f32[4,8], f32[4,8], u32[]) copy-start(x)",
        "n = negate(x)",
        "d = f32[4,8] copy-done(s)",
        "ROOT r = add(d, n)",
    ),
    "computation started": module(
        X,
        "s = ((f32[4,8]), f32[4,8], s32[]) async-start(x), calls=negated",
        "u = ((f32[4,8]), f32[4,8], s32[]) async-update(s)",
        "ROOT d = f32[4,8] async-done(u)",
        before=NEGATE,
    ),
    "scheduled": module(X, "n = negate(x)", "ROOT r = add(n, n)", header="HloModule m, is_scheduled=true"),
    "bitcast to another type": module(X, "b = s32[32] bitcast(x)", "ROOT r = add(b, b)"),
    "bitcast to narrower elements": module(X, "ROOT b = u16[4,16] bitcast(x)"),
    "bitcast to wider elements": module(X, "ROOT b = u64[16] bitcast(x)"),
    "several reductions": module(
        X,
        "z = f32[] constant(0)",
        "a = reduce(x, x, z, z), dimensions={1}, to_apply=sums",
        "w = reduce-window(x, x, z, z), window={size=1x2}, to_apply=sums",
        "ROOT r = tuple(a, w)",
        before=SUMS,
    ),
    "whole size": module(
        X, "n = s32[] constant(8)", "ROOT r = f32[4,8] set-dimension-size(x, n), dimensions={1}"
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_native_code_and_evaluator_agree(name):
    read = parse_module(PROGRAMS[name])
    verify(read)
    wanted = jax.tree.leaves(evaluate(read, [VALUES]))
    for got, value in zip(run_module(read, [VALUES]), wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lines", "before", "problem"),
    [
        (
            [
                X,
                "n = s32[] constant(3)",
                "d = f32[4,<=8] set-dimension-size(x, n), dimensions={1}",
                "ROOT r = s32[] get-dimension-size(d), dimensions={1}",
            ],
            "",
            "no kernel computes set-dimension-size",
        ),
        (
            [
                "x = c64[32769] parameter(0)",
                "ROOT r = fft(x), fft_type=IRFFT, fft_length={65536}",
            ],
            "",
            "no kernel computes fft",
        ),
        (
            [
                X,
                "i = s32[3,1] constant({{0},{2},{2}})",
                "u = f32[3,8] constant({" + ", ".join(["{0,1,2,3,4,5,6,7}"] * 3) + "})",
                "ROOT g = scatter(x, x, i, u, u), update_window_dims={1}, inserted_window_dims={0}, "
                "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=sums",
            ],
            SUMS.replace("maximum(b, d)", "maximum(b, c)"),
            "no kernel scatters into several arrays at once",
        ),
        (
            [X, 'ROOT r = f32[4,8] custom-call(x), custom_call_target="other"'],
            "",
            "no kernel calls other",
        ),
    ],
)
def test_what_has_no_native_code_is_refused_by_name(lines, before, problem):
    read = parse_module(module(*lines, before=before))
    with pytest.raises(CompileError, match=problem):
        run_module(read, [VALUES])
