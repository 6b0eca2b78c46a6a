"""Each rule of the algebraic simplifier by itself: it applies, and keeps the numbers, NaN and inf too."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd.compile.hlo import HloBuilder, HloModule, print_module, verify
from mpmd.compile.hlo.attributes import DotDims, PadDim, Verbatim
from mpmd.compile.passes.rewriter import Rewriter
from mpmd.compile.passes.simplify import algebra
from tests.support.hlo_meaning import evaluate
from tests.support.hlo_shapes import parse_shape
from tests.support.rule_examples import EXAMPLES, F, k, marked, shaped, total, turned

SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 3e38, 1e-30, 2.0]


def values(shape, rng: np.random.Generator, special: bool):
    if shape.is_tuple:
        return tuple(values(e, rng, special) for e in shape.elements)
    if shape.info.kind == "float":
        made = rng.choice(SPECIAL, shape.dims) if special else rng.uniform(0.5, 3.0, shape.dims)
        return np.asarray(made).astype(shape.numpy_dtype)
    if shape.dtype == "pred":
        return rng.integers(0, 2, shape.dims).astype(bool)
    low = -9 if shape.info.kind == "signed" else 0
    return rng.integers(low, 90, shape.dims).astype(shape.numpy_dtype)


def module_of(shapes, program) -> HloModule:
    module = HloModule("rule")
    build = HloBuilder.create(module, "main")
    shapes = (shapes,) if isinstance(shapes, str) else shapes
    given = [build.parameter(parse_shape(s).filled(), f"p{n}") for n, s in enumerate(shapes)]
    module.set_entry(build.build(program(build, *given)))
    verify(module)
    return module


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda r: f"{r.__module__.rpartition('.')[2]}.{r.__name__}")
def test_rule(rule):
    shapes, program, expected = EXAMPLES[rule]
    module = module_of(shapes, program)
    before = module.clone()
    own = {opcode: (rule,) for opcode, rules in algebra.table().items() if rule in rules}
    assert own, "no opcode has this rule"
    assert Rewriter(module.entry).run(own, lambda instruction: True)
    verify(module)
    text = print_module(module)
    assert expected in text, text
    rng = np.random.default_rng(0)
    for special in (False, True, True):
        arguments = [values(p.shape, rng, special) for p in module.entry.parameters]
        got, want = evaluate(module, arguments), evaluate(before, arguments)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            assert a.dtype == b.dtype
            with np.errstate(all="ignore"):
                np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=3e-7)


def test_every_rule_is_tested():
    assert {r for rules in algebra.table().values() for r in rules} == set(EXAMPLES)


KEPT = {
    # arithmetic
    "a sum of NaN": (F, lambda b, x: b.add("subtract", x, x)),
    "a constant less a value": (F, lambda b, x: b.add("subtract", k(b, 2, x), x)),
    "one more": (F, lambda b, x: b.add("add", x, k(b, 1, x))),
    "different numbers more": (F, lambda b, x: b.add("add", x, b.constant(np.float32([0, 0, 0, 1])))),
    "one less": (F, lambda b, x: b.add("subtract", x, k(b, 1, x))),
    "less -0, which takes the sign from -0": (F, lambda b, x: b.add("subtract", x, k(b, -0.0, x))),
    "0 less a float, which is 0 for 0": (F, lambda b, x: b.add("subtract", k(b, 0, x), x)),
    "zero times infinity": (F, lambda b, x: b.add("multiply", x, k(b, 0, x))),
    "a complex infinity times one": ("c64[4]", lambda b, x: b.add("multiply", x, k(b, 1, x))),
    "a third": (F, lambda b, x: b.add("divide", x, k(b, 3, x))),
    "a division by zero": (F, lambda b, x: b.add("divide", x, k(b, 0, x))),
    "a division by infinity": (F, lambda b, x: b.add("divide", x, k(b, np.inf, x))),
    "a division into denormals": (F, lambda b, x: b.add("divide", x, k(b, 2.0**-127, x))),
    "a division by 2**14 of f16": ("f16[4]", lambda b, x: b.add("divide", x, k(b, 2.0**14, x))),
    "half of an integer": ("s32[4]", lambda b, x: b.add("divide", x, k(b, 2, x))),
    "a root of a negative number": (F, lambda b, x: b.add("power", x, k(b, 0.5, x))),
    "one by an integer": ("s32[4]", lambda b, x: b.add("power", x, k(b, -1, x))),
    # order and choice
    "a maximum with zero": (F, lambda b, x: b.add("maximum", x, k(b, 0, x))),
    "comparisons with NaN": ((F, F), lambda b, x, y: b.add("not", b.compare(x, y, "LT"))),
    "a choice by an argument": (("pred[4]", F, F), lambda b, p, x, y: b.select(p, x, y)),
    # conversions
    "rounding twice": (F, lambda b, x: b.convert(b.convert(x, "bf16"), "f32")),
    "false in a type without a zero": ("pred[4]", lambda b, x: b.convert(b.convert(x, "f8e8m0fnu"), "f32")),
    "integers that a float cannot hold": ("s32[4]", lambda b, x: b.convert(b.convert(x, "f32"), "s32")),
    "integers that a float saturates": ("s16[4]", lambda b, x: b.convert(b.convert(x, "f32"), "u8")),
    "integers that a real part saturates": ("u8[4]", lambda b, x: b.convert(b.convert(x, "c64"), "s8")),
    "a copy to another layout": (
        "f32[4,3]{0,1}",
        lambda b, x: b.add("copy", x, shape=parse_shape("f32[4,3]{1,0}")),
    ),
    # movement
    "a reshape": ("f32[4,3]", lambda b, x: shaped(b, x, 12)),
    "a transpose": ("f32[4,3]", lambda b, x: turned(b, x, 1, 0)),
    "a broadcast of the same dims in another order": (
        "f32[4,4]",
        lambda b, x: b.add("broadcast", x, shape=x.shape, dimensions=(1, 0)),
    ),
    "broadcasts along different dims": (
        (F, F),
        lambda b, x, y: b.add("add", b.broadcast(x, (4, 4), (0,)), b.broadcast(y, (4, 4), (1,))),
    ),
    "a broadcast beside an array": (
        (F, "f32[4,4]"),
        lambda b, x, y: b.add("add", b.broadcast(x, (4, 4), (0,)), y),
    ),
    "a slice": (F, lambda b, x: b.slice(x, (1,), (4,))),
    "a pad between elements": (F, lambda b, x: b.pad(x, b.constant(1.0, "f32"), [PadDim(0, 0, 1)])),
    "a pad that moves": (F, lambda b, x: b.pad(x, b.constant(1.0, "f32"), [PadDim(1, -1)])),
    "a slice at an argument": ((F, "s32[]"), lambda b, x, i: b.dynamic_slice(x, [i], (2,))),
    "an update of a part": (
        (F, "f32[2]", "s32[]"),
        lambda b, x, u, i: b.dynamic_update_slice(x, u, [i]),
    ),
    "updates at different places": (
        (F, "f32[2]", "s32[]", "s32[]"),
        lambda b, x, u, i, j: b.dynamic_slice(b.dynamic_update_slice(x, u, [i]), [j], (2,)),
    ),
    "a size that is less": (
        F,
        lambda b, x: b.add(
            "set-dimension-size", x, b.constant(3, "s32"), shape=x.shape.logical, dimensions=(0,)
        ),
    ),
    "a call of another target": (F, lambda b, x: marked(b, x, "other")),
    "a mark on several devices": (F, lambda b, x: marked(b, x, partitions=2)),
    "a mark of another shape": (F, lambda b, x: marked(b, x, shape=parse_shape("f32[2]{0}"))),
    "padding that is taken": (
        F,
        lambda b, x: b.slice(b.pad(x, b.constant(1.0, "f32"), [PadDim(2, 2)]), (1,), (4,)),
    ),
    # reductions and products
    "a reduction of several elements": ("f32[4,3]", lambda b, x: total(b, x, 1)),
    "reductions by different operations": (
        "f32[4,3]",
        lambda b, x: total(b, total(b, x, 0, init=-9, opcode="maximum"), 0),
    ),
    "a reduction whose dims would change order": (
        "f32[4,3,2]",
        lambda b, x: total(b, turned(b, x, 2, 0, 1), 1),
    ),
    "a product": (("f32[2,3]", "f32[3,4]"), lambda b, x, y: b.dot(x, y)),
    "a product of ones that rounds its factors": (
        ("f32[2,1]", "f32[1,4]"),
        lambda b, x, y: b.dot(x, y, dtype="bf16"),
    ),
    "a product of ones by an algorithm": (
        ("f32[2,1]", "f32[1,4]"),
        lambda b, x, y: rounding_product(b, x, y),
    ),
    "a product that is transposed in part": (
        ("f32[2,3,4]", "f32[4,5]"),
        lambda b, x, y: turned(b, b.dot(x, y, DotDims((2,), (0,))), 1, 0, 2),
    ),
    "a transposed product by an algorithm": (
        ("f32[2,3]", "f32[3,4]"),
        lambda b, x, y: turned(b, rounding_product(b, x, y), 1, 0),
    ),
    "a product that is read twice": (
        ("f32[2,3]", "f32[3,4]"),
        lambda b, x, y: (lambda z: b.tuple([turned(b, z, 1, 0), z]))(b.dot(x, y)),
    ),
    # tuples
    "the first elements of a tuple": (
        (F, F, F),
        lambda b, *x: (lambda t: b.tuple([b.element(t, 0), b.element(t, 1)]))(fenced(b, *x)),
    ),
    "the elements of a tuple in another order": (
        (F, F),
        lambda b, *x: (lambda t: b.tuple([b.element(t, 1), b.element(t, 0)]))(fenced(b, *x)),
    ),
    "elements of different tuples": (
        (F, F),
        lambda b, *x: b.tuple([b.element(fenced(b, *x), 0), b.element(fenced(b, *x), 1)]),
    ),
}


def fenced(b: HloBuilder, *values):
    """A tuple of which nothing is known."""
    return b.add("opt-barrier", b.tuple(values))


def rounding_product(b: HloBuilder, x, y):
    """A product whose factors are rounded to bf16."""
    return b.add("dot", x, y, dot_dims=DotDims((1,), (0,)), algorithm=Verbatim("dot_bf16_bf16_f32"))


@pytest.mark.parametrize("name", KEPT)
def test_no_rule_applies(name):
    shapes, program = KEPT[name]
    module = module_of(shapes, program)
    assert not Rewriter(module.entry).run(algebra.table(), lambda instruction: True), print_module(module)
