"""Arithmetic of numbers of two and four bits: every pair of values, before and after the expander."""

from __future__ import annotations

import numpy as np
import pytest

from mpmd.compile.hlo import HloBuilder, HloModule
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes import make_pass
from tests.support.rewrite_checks import rewritten

BINARY = [
    "add",
    "and",
    "atan2",
    "divide",
    "maximum",
    "minimum",
    "mulhi",
    "multiply",
    "or",
    "power",
    "remainder",
    "shift-left",
    "shift-right-arithmetic",
    "shift-right-logical",
    "subtract",
    "xor",
]
UNARY = ["abs", "count-leading-zeros", "negate", "not", "popcnt", "sign"]
TYPES = ("s2", "u2", "s4", "u4")


def every(dtype: str) -> np.ndarray:
    """All values of a type."""
    known = DTYPES[dtype]
    least = -(1 << (known.bits - 1)) if known.kind == "signed" else 0
    return np.arange(least, least + (1 << known.bits)).astype(known.numpy)


def check(arguments: list[np.ndarray], dtype: str, program) -> None:
    module = HloModule("narrow")
    build = HloBuilder.create(module, "main")
    given = [build.parameter(array(dtype, a.shape)) for a in arguments]
    module.set_entry(build.build(program(build, *given)))
    assert rewritten(module, arguments, make_pass("hlo-narrow-type-expander").run)


@pytest.mark.parametrize("opcode", BINARY)
@pytest.mark.parametrize("dtype", TYPES)
def test_two_numbers(dtype, opcode):
    a, b = (side.ravel() for side in np.meshgrid(every(dtype), every(dtype)))
    check([a, b], dtype, lambda build, x, y: build.add(opcode, x, y))


@pytest.mark.parametrize("opcode", UNARY)
@pytest.mark.parametrize("dtype", TYPES)
def test_one_number(dtype, opcode):
    check([every(dtype)], dtype, lambda build, x: build.add(opcode, x))


@pytest.mark.parametrize("opcode", ["add", "multiply", "maximum", "minimum", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", TYPES)
def test_reductions_wrap_once(dtype, opcode):
    rows = np.random.default_rng(0).choice(every(dtype), (9, 7))

    def program(build, x):
        called = scalar_computation(build.computation.module, opcode, dtype)
        init = build.constant(np.asarray(1).astype(DTYPES[dtype].numpy))
        return build.reduce([x], [init], (1,), called)

    check([rows], dtype, program)


@pytest.mark.parametrize("dtype", [*TYPES, "f8e4m3fn", "f8e5m2"])
def test_a_computation_rounds_each_step(dtype):
    """(a + b) * b of each step of a reduction, which a wide type would not round in between."""
    known = DTYPES[dtype]
    values = np.random.default_rng(1).integers(0, 3, (9, 5)).astype(known.numpy)

    def program(build, x):
        body = HloBuilder.create(build.computation.module, "step")
        a, b = (body.parameter(array(dtype)) for _ in range(2))
        called = body.build(body.add("multiply", body.add("add", a, b), body.add("maximum", b, a)))
        return build.reduce([x], [build.constant(np.asarray(1).astype(known.numpy))], (1,), called)

    check([values], dtype, program)


def test_products_of_truths_are_truths():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 2, (5, 300)).astype(bool), rng.integers(0, 2, (300, 4)).astype(bool)
    check([a, b], "pred", lambda build, x, y: build.dot(x, y))
