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
    "marks": module(
        X,
        's = f32[4,8] custom-call(x), custom_call_target="Sharding", sharding={replicated}',
        'h = f32[4,8] custom-call(s), custom_call_target="MoveToHost", custom_call_has_side_effect=true',
        'd = f32[4,8] custom-call(h), custom_call_target="MoveToDevice"',
        "ROOT r = negate(d)",
    ),
    "parts of real numbers": module(X, "a = real(x)", "b = imag(x)", "ROOT r = tuple(a, b)"),
    "several arrays scattered into": module(
        X,
        "i = s32[3,1] constant({{0},{2},{2}})",
        "u = f32[3,8] iota(), iota_dimension=1",
        "ROOT g = scatter(x, x, i, u, u), update_window_dims={1}, inserted_window_dims={0}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=sums",
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
            "no kernel computes set-dimension-size, which d is: .*; keep the bound, and mask",
        ),
        (
            [
                "x = c64[32769] parameter(0)",
                "ROOT r = fft(x), fft_type=IRFFT, fft_length={65536}",
            ],
            "",
            "no kernel computes fft, which r is: .*XLA has a library",
        ),
        (
            [
                X,
                "o = f32[] constant(1)",
                "w = f32[2,8,3] broadcast(o), dimensions={}",
                "n = s32[2] constant({1,3})",
                "ROOT r = f32[4,3] ragged-dot(x, w, n), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
                "lhs_ragged_dims={0}, rhs_group_dims={0}",
            ],
            "",
            "no kernel computes ragged-dot, which r is: write a product for each group",
        ),
        (
            [
                X,
                "o = f32[] constant(1)",
                "s = f32[4,1] broadcast(o), dimensions={}",
                "ROOT r = f32[4,4] scaled-dot(x, x, s, s), lhs_contracting_dims={1}, "
                "rhs_contracting_dims={1}",
            ],
            "",
            "no kernel computes scaled-dot, which r is: convert both operands",
        ),
        (
            [
                "x = f32[4] parameter(0)",
                "i = f32[] constant(0)",
                "ROOT r = (f32[4], f32[]) scan(x, i), dimensions={0}, num_carries=1, to_apply=totals",
            ],
            """totals {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  s = add(a, b)
  ROOT t = tuple(s, s)
}""",
            "no kernel computes scan, which r is: write it as a while",
        ),
        (
            ["a = f32[] constant(0)", "ROOT r = f32[4] rng(a, a), distribution=rng_uniform"],
            "",
            "no kernel computes rng, which r is: its numbers come from a hidden state; use rng-bit-generator",
        ),
        (
            ["ROOT r = u64[2] rng-get-and-update-state(), delta=1"],
            "",
            "no kernel computes rng-get-and-update-state, which r is: it reads a hidden state",
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


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        pytest.param(
            "ROOT r = f32[8,8] all-gather(x), replica_groups={}, dimensions={0}",
            r"makes f32\[8,8\] of f32\[4,8\], which groups of 1 devices do not: the header's",
            id="all-gather",
        ),
        pytest.param(
            "ROOT r = f32[2,8] reduce-scatter(x), replica_groups={}, dimensions={0}, to_apply=total",
            r"makes f32\[2,8\] of f32\[4,8\], which groups of 1 devices do not: the header's",
            id="reduce-scatter",
        ),
        pytest.param(
            "ROOT r = f32[4,8] all-to-all(x), replica_groups={}, dimensions={0}",
            r"makes f32\[4,8\] of f32\[4,8\], which groups of 3 devices do not: the header's",
            id="all-to-all",
        ),
    ],
)
def test_a_collective_whose_groups_do_not_fit_its_shapes_is_refused(line, problem):
    total = "total { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT s = add(a, b) }"
    header = "HloModule m, replica_count=3" if "all-to-all" in line else "HloModule m"
    read = parse_module(module(X, line, before=total, header=header))
    verify(read)
    with pytest.raises(CompileError, match=problem):
        run_module(read, [VALUES])
