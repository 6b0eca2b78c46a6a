"""Random programs: the evaluator against XLA:CPU, text that reads back, literals that keep their bits."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.compile.hlo import (
    TOKEN,
    Layout,
    Shape,
    fingerprint,
    parse_module,
    print_module,
    tuple_of,
    verify,
)
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.literals import parse_literal, print_literal
from mpmd.compile.hlo.opcodes import OPCODES
from mpmd.compile.hlo.shape import array
from tests.support.hlo_meaning import evaluate
from tests.support.hlo_shapes import parse_shape
from tests.support.random_hlo import FAMILIES, differences, random_case
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.wide import wide
from tests.support.xla_hlo import XlaError, XlaWorker

FAST = 3
"""Cases of each family in every test run; of elementwise operations, which are many, five times as many."""
SLOW = 80
"""The same for the slow test: 2,400 cases in all."""

UNIMPLEMENTED = "UNIMPLEMENTED: "
"""XLA:CPU has no code for acos and its like; they are checked through JAX, which expands them."""


def _count(family: str, cases: int) -> int:
    return cases * (5 if family in ("unary", "binary") else 1)


def compare(family: str, seed: int, xla: XlaWorker) -> str:
    """What differs for one case; "" if nothing."""
    case = random_case(family, seed)
    verify(case.module)
    text = print_module(case.module)
    again = parse_module(text)
    assert print_module(again) == text and fingerprint(again) == fingerprint(case.module)
    got = jax.tree.leaves(evaluate(again, case.arguments))
    try:
        want = xla.run(text, case.arguments)
    except XlaError as error:
        if UNIMPLEMENTED in str(error):
            return ""
        return f"{case.name}: XLA says {error}\n{text}"
    problem = differences(got, want, case)
    return f"{case.name}: {problem}\n{text}" if problem else ""


@pytest.mark.fast_cases(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers_as_xla(family, xla):
    problems = [compare(family, seed, xla) for seed in range(_count(family, FAST))]
    assert not any(problems), "\n".join(p for p in problems if p)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers_as_xla_on_many(family, xla):
    problems = [compare(family, seed, xla) for seed in range(1000, 1000 + _count(family, SLOW))]
    assert not any(problems), "\n".join([p for p in problems if p][:5])


def compare_whole(case: Case, xla: XlaWorker) -> str:
    """What differs for a whole program; "" if nothing."""
    text = print_module(case.module)
    problem = differences(
        jax.tree.leaves(evaluate(case.module, case.arguments)), xla.run(text, case.arguments), case
    )
    return f"{case.name}: {problem}\n{text}" if problem else ""


@pytest.mark.parametrize("seed", range(2))
def test_whole_programs_as_xla_does(seed, xla):
    assert not compare_whole(wide(seed, 25), xla)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1100, 20))
def test_many_whole_programs_as_xla_does(first, xla):
    assert not any(problems := [compare_whole(wide(s), xla) for s in range(first, first + 20)]), problems


UNREACHED = {
    "a channel to outside, which a program alone has not": "infeed outfeed send send-done recv recv-done",
    "any value is right": "rng rng-get-and-update-state",
    "of arrays with run-time sizes": "set-dimension-size dynamic-reshape",
    "XLA:CPU has no code for it alone; unit tests compare with what it stands for": (
        "mulhi ragged-dot scaled-dot ragged-all-to-all bitcast"
    ),
    "no StableHLO becomes it": "scan",
    "its meaning is its target's": "custom-call",
}
"""Opcodes that no random program has, by the reason; collectives have test_hlo_collective_passes.py."""


def test_families_reach_every_other_opcode_and_every_type():
    opcodes, types = set(), set()
    for family, seed in itertools.product(FAMILIES, range(200)):
        for instruction in random_case(family, seed).module.instructions():
            opcodes.add(instruction.opcode)
            types |= {shape.dtype for _, shape in instruction.shape.leaves() if shape.is_array}
    unreached = {name for names in UNREACHED.values() for name in names.split()}
    unreached |= {n for n, info in OPCODES.items() if info.category.value in ("collective", "asynchronous")}
    assert set(OPCODES) - opcodes == unreached
    assert types == set(DTYPES)


# -- text -------------------------------------------------------------------------------------------

dims = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def array_shapes(draw):
    sizes = draw(dims)
    order = draw(st.permutations(range(len(sizes))))
    layout = draw(
        st.sampled_from(
            [None, Layout(tuple(order)), Layout(tuple(order), memory_space=draw(st.integers(0, 3)))]
        )
    )
    return Shape(draw(st.sampled_from(sorted(DTYPES))), tuple(sizes), layout)


shapes = st.recursive(
    array_shapes() | st.just(TOKEN), lambda inner: st.lists(inner, max_size=4).map(tuple_of), max_leaves=6
)


@given(shapes)
@settings(max_examples=80, deadline=None)
def test_shapes_read_back(shape):
    assert parse_shape(str(shape)) is shape


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_literals_keep_every_bit(data):
    name = data.draw(st.sampled_from(sorted(set(DTYPES) - {"pred", "f8e8m0fnu"})))
    sizes = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(sizes))
    info = DTYPES[name]
    raw = data.draw(st.binary(min_size=count * info.numpy.itemsize, max_size=count * info.numpy.itemsize))
    value = np.frombuffer(raw, info.numpy).reshape(sizes)
    if info.bits < 8 and info.kind != "float":
        value = value.astype(np.int32).astype(info.numpy)
    back = parse_literal(print_literal(value), array(name, sizes))
    if info.kind in ("float", "complex") and info.bits not in (16, 32, 64):
        wide = np.complex128 if info.kind == "complex" else np.float64
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(back.astype(wide), value.astype(wide))
    elif info.kind == "complex":
        np.testing.assert_array_equal(back, value)
    else:
        assert back.tobytes() == value.tobytes()


@given(st.floats(width=64), st.sampled_from(["bf16", "f16", "f8e4m3fn", "f8e5m2"]))
@settings(max_examples=100, deadline=None)
def test_narrowing_rounds_to_the_nearest(value, name):
    from mpmd.compile.hlo.evaluator.values import narrow

    info = ml_dtypes.finfo(DTYPES[name].numpy)
    if not np.isfinite(value) or abs(value) > float(info.max):
        return
    rounded = float(narrow(np.asarray(value), name))
    raw = narrow(np.asarray(value), name).reshape(1)
    for step in (-1, 1):
        bits = raw.view(f"u{info.bits // 8}").astype(np.int64) + step
        neighbour = float(bits.astype(f"u{info.bits // 8}").view(DTYPES[name].numpy)[0])
        if np.isfinite(neighbour):
            assert abs(rounded - value) <= abs(neighbour - value)
