"""Forms of HLO text that XLA's parser takes beside those that it prints; XLA itself judges."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module, print_module, verify
from mpmd.errors import HloError
from tests.support.hlo_meaning import evaluate
from tests.support.xla_hlo import XlaError

X = "x = f32[4,8]{1,0} parameter(0)"
ADD = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = add(a, b)\n}"
NEGATE = "f {\n  a = f32[] parameter(0)\n  ROOT n = negate(a)\n}"
LESS = "less {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT r = compare(a, b), direction=LT\n}"
PAIRS = """pairs {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  c = f32[] parameter(2)
  d = f32[] parameter(3)
  s = add(a, c)
  m = maximum(b, d)
  ROOT t = tuple(s, m)
}"""
LOOP = """c {
  a = s32[] parameter(0)
  k = s32[] constant(3)
  ROOT n = compare(a, k), direction=LT
}
b {
  a = s32[] parameter(0)
  k = s32[] constant(1)
  ROOT n = add(a, k)
}"""


def module(*lines: str, before: str = "") -> str:
    return "\n".join(["HloModule m", before, "ENTRY e {", *(f"  {line}" for line in lines), "}", ""])


ZERO = "z = f32[] constant(0)"
INDEX = "i = s32[3] constant({0,1,2})"
UNSTATED = {
    "elementwise": module(X, "n = negate(x)", "ROOT r = add(n, x)"),
    "layout": module(
        "x = f32[4,8]{0,1} parameter(0)", "n = negate(x)", "ROOT t = transpose(n), dimensions={1,0}"
    ),
    "tuple": module(X, "t = tuple(x, x)", "g = get-tuple-element(t), index=1", "ROOT r = tuple(g, t)"),
    "compare": module(X, "p = compare(x, x), direction=LE", "ROOT r = select(p, x, x)"),
    "dot": module(X, "ROOT t = dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"),
    "reduce": module(X, ZERO, "ROOT t = reduce(x, z), dimensions={1}, to_apply=add", before=ADD),
    "pairs": module(X, ZERO, "ROOT t = reduce(x, x, z, z), dimensions={1}, to_apply=pairs", before=PAIRS),
    "window": module(
        X, ZERO, "ROOT r = reduce-window(x, z), window={size=1x2 stride=1x2}, to_apply=add", before=ADD
    ),
    "call": module("x = f32[] parameter(0)", "ROOT c = call(x), to_apply=f", before=NEGATE),
    "map": module(X, "ROOT r = map(x), dimensions={0,1}, to_apply=f", before=NEGATE),
    "while": module("i = s32[] parameter(0)", "ROOT w = while(i), condition=c, body=b", before=LOOP),
    "conditional": module(
        "p = pred[] parameter(0)",
        "y = f32[] parameter(1)",
        "ROOT r = conditional(p, y, y), true_computation=f, false_computation=f",
        before=NEGATE,
    ),
    "pad": module(X, ZERO, "p = pad(x, z), padding=1_1x0_0", "ROOT c = concatenate(p, x), dimensions={0}"),
    "gather": module(
        X,
        INDEX,
        "ROOT g = gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, "
        "index_vector_dim=1, slice_sizes={1,8}",
    ),
    "scatter": module(
        X,
        INDEX,
        "u = f32[3,8] parameter(1)",
        "ROOT g = scatter(x, i, u), update_window_dims={1}, inserted_window_dims={0}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add",
        before=ADD,
    ),
    "sort": module(X, "ROOT s = sort(x), dimensions={1}, to_apply=less", before=LESS),
    "clamp": module(X, ZERO, "ROOT r = clamp(z, x, z)"),
    "fft": module("x = c64[8] parameter(0)", "ROOT r = fft(x), fft_type=FFT, fft_length={8}"),
    "convolution": module(
        "x = f32[1,8,1] parameter(0)",
        "k = f32[2,1,1] parameter(1)",
        "ROOT r = convolution(x, k), window={size=2}, dim_labels=b0f_0io->b0f",
    ),
    "scalar broadcast": module("x = f32[] parameter(0)", "ROOT r = broadcast(x), dimensions={}"),
}
OLD = {
    "starts": module(
        X, "i = s32[2] parameter(1)", "ROOT r = f32[1,8] dynamic-slice(x, i), dynamic_slice_sizes={1,8}"
    ),
    "one start": module(
        "x = f32[4] parameter(0)",
        "i = s32[1] parameter(1)",
        "ROOT r = f32[2] dynamic-slice(x, i), dynamic_slice_sizes={2}",
    ),
    "update": module(
        X,
        "u = f32[1,8] parameter(1)",
        "i = s32[2] parameter(2)",
        "ROOT r = f32[4,8] dynamic-update-slice(x, u, i)",
    ),
    "map": module(X, "ROOT r = f32[4,8] map(x), to_apply=f", before=NEGATE),
    "broadcast": module("x = f32[] parameter(0)", "ROOT r = f32[8] broadcast(x)"),
    "literal": module(X, 'ROOT r = f32[1] custom-call(x), custom_call_target="f", literal=s32[2]{0} {1, 2}'),
    "literals": module('ROOT r = f32[1] custom-call(), custom_call_target="f", literal=(s32[] 1)'),
    "no header": (
        "ENTRY %e (x: f32[2]) -> f32[2] {\n  %x = f32[2] parameter(0)\n"
        "  ROOT %n = f32[2] negate(f32[2] %x)\n}\n"
    ),
}


@pytest.mark.parametrize("name", UNSTATED)
def test_a_shape_that_is_not_stated_is_xlas(name, xla):
    read = parse_module(UNSTATED[name])
    verify(read)
    theirs = parse_module(xla.parse(UNSTATED[name]))
    shapes = [sorted(str(i.shape.filled()) for i in m.instructions()) for m in (read, theirs)]
    assert shapes[0] == shapes[1] and read.entry.root.shape.filled() is theirs.entry.root.shape.filled()


@pytest.mark.parametrize("name", OLD)
def test_an_old_form_is_read(name, xla):
    xla.parse(OLD[name])  # XLA reads it
    read = parse_module(OLD[name])
    verify(read)
    xla.parse(print_module(read))  # and what we make of it
    assert print_module(parse_module(print_module(read))) == print_module(read)


@pytest.mark.parametrize("form", ["starts", "update"])
def test_starts_in_one_vector_mean_the_same(form):
    x, u = np.arange(32, dtype=np.float32).reshape(4, 8), np.ones((1, 8), np.float32)
    given = [x, np.array([2, 0], np.int32)] if form == "starts" else [x, u, np.array([2, 0], np.int32)]
    wanted = x[2:3] if form == "starts" else np.concatenate([x[:2], u, x[3:]])
    np.testing.assert_array_equal(evaluate(parse_module(OLD[form]), given), wanted)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ROOT r = reshape(x)", "r states no shape: the shape of reshape does not follow from its operands"),
        ("ROOT r = convert(x)", "r states no shape: the shape of convert"),
        ("ROOT r = constant(1)", "constant r must state its shape"),
        ("ROOT r = call(x), to_apply=later", "later, which it calls, must be defined above"),
        ("ROOT r = add(x)", "add takes 2 operands, got 1"),
        ("ROOT r = ad(x)", "unknown opcode 'ad'"),
        ("ROOT r = dot(x, x), lhs_contracting_dims={7}, rhs_contracting_dims={1}", "names dim 7"),
    ],
)
def test_a_shape_that_cannot_be_told_is_refused(line, problem, xla):
    text = module(X, line)
    with pytest.raises(HloError, match=problem):
        parse_module(text)
    with pytest.raises(XlaError):
        xla.parse(text)
