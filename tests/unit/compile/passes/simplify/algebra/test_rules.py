"""Each rule of the algebraic simplifier by itself: it applies, and keeps the numbers, NaN and inf too."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd.compile.hlo import HloBuilder, HloModule, print_module, verify
from mpmd.compile.hlo.attributes import DotDims, PadDim
from mpmd.compile.passes.rewriter import Rewriter
from mpmd.compile.passes.simplify import algebra
from tests.support.hlo_meaning import evaluate
from tests.support.hlo_shapes import parse_shape
from tests.support.rule_examples import EXAMPLES, F, k, total, turned

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
    "a sum of NaN": (F, lambda b, x: b.add("subtract", x, x)),
    "zero times infinity": (F, lambda b, x: b.add("multiply", x, k(b, 0, x))),
    "a third": (F, lambda b, x: b.add("divide", x, k(b, 3, x))),
    "a division into denormals": (F, lambda b, x: b.add("divide", x, k(b, 2.0**-127, x))),
    "rounding twice": (F, lambda b, x: b.convert(b.convert(x, "bf16"), "f32")),
    "false in a type without a zero": ("pred[4]", lambda b, x: b.convert(b.convert(x, "f8e8m0fnu"), "f32")),
    "integers that a float cannot hold": ("s32[4]", lambda b, x: b.convert(b.convert(x, "f32"), "s32")),
    "integers that a float saturates": ("s16[4]", lambda b, x: b.convert(b.convert(x, "f32"), "u8")),
    "integers that a real part saturates": ("u8[4]", lambda b, x: b.convert(b.convert(x, "c64"), "s8")),
    "comparisons with NaN": ((F, F), lambda b, x, y: b.add("not", b.compare(x, y, "LT"))),
    "a root of a negative number": (F, lambda b, x: b.add("power", x, k(b, 0.5, x))),
    "updates at different places": (
        (F, "f32[2]", "s32[]", "s32[]"),
        lambda b, x, u, i, j: b.dynamic_slice(b.dynamic_update_slice(x, u, [i]), [j], (2,)),
    ),
    "padding that is taken": (
        F,
        lambda b, x: b.slice(b.pad(x, b.constant(1.0, "f32"), [PadDim(2, 2)]), (1,), (4,)),
    ),
    "reductions by different operations": (
        "f32[4,3]",
        lambda b, x: total(b, total(b, x, 0, init=-9, opcode="maximum"), 0),
    ),
    "a reduction whose dims would change order": (
        "f32[4,3,2]",
        lambda b, x: total(b, turned(b, x, 2, 0, 1), 1),
    ),
    "a product that is transposed in part": (
        ("f32[2,3,4]", "f32[4,5]"),
        lambda b, x, y: turned(b, b.dot(x, y, DotDims((2,), (0,))), 1, 0, 2),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_no_rule_applies(name):
    shapes, program = KEPT[name]
    module = module_of(shapes, program)
    assert not Rewriter(module.entry).run(algebra.table(), lambda instruction: True), print_module(module)
