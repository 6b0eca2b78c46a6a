"""Layouts: whatever the caller's are, the numbers stay, and operands lie as operations need them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import HloModule, Shape, print_module, tuple_of, verify
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes import make_pass
from mpmd.compile.passes.layout.layout_assignment import LayoutAssignment
from mpmd.compile.passes.layout.layout_normalization import (
    LayoutNormalization,
    LayoutRemoval,
    ReshapeDecomposer,
)
from mpmd.compile.passes.layout.physical import is_bitcast, order_of
from mpmd.compile.pipelines import GROUPS
from mpmd.support.pass_pipeline import Watch, run_pipeline
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module
from tests.support.random_hlo import differences
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.rewritable import rewritable

WATCH = Watch(verify=verify, text=print_module, verify_each=True, check_changed=True)
OPTIONS = ({}, {"free_transposes": True}, {"free_transposes": True, "free_products": True})


def shuffled(shape: Shape, rng: np.random.Generator) -> Shape:
    """The shape with random layouts."""
    if shape.is_tuple:
        return tuple_of([shuffled(e, rng) for e in shape.elements])
    return shape.with_layout(tuple(int(d) for d in rng.permutation(shape.rank)))


def with_random_border(case: Case, seed: int) -> HloModule:
    """The program, passes before layouts run, called with arrays in random orders."""
    module = case.module.clone()
    rng = np.random.default_rng(seed)
    for name in ("hlo-inlining", "hlo-expansion"):
        run_pipeline(module, GROUPS[name](), WATCH)
    module.parameter_layouts = tuple(shuffled(p.shape, rng) for p in module.entry.parameters)
    module.result_layout = shuffled(module.entry.root.shape, rng)
    return module


def misplaced(module: HloModule) -> list[str]:
    """Operations whose operands do not lie as their results do, though they should."""
    wrong = []
    for i in module.instructions():
        if not i.shape.has_layouts:
            wrong.append(f"{i} has no layout")
        if i.is_elementwise and i.opcode not in ("copy", "bitcast-convert"):
            wrong += [repr(i) for o in i.operands if o.shape.rank and o.shape.layout is not i.shape.layout]
        if i.opcode == "tuple" and i.shape is not tuple_of([o.shape for o in i.operands]):
            wrong.append(repr(i))
    if module.entry.root.shape is not module.result_layout:
        wrong.append(f"result {module.entry.root.shape}, expected {module.result_layout}")
    stated = [p.shape for p in module.entry.parameters]
    return wrong if stated == list(module.parameter_layouts) else [*wrong, "parameters"]


def check(seed: int, options: dict) -> tuple[int, int]:
    """Copies that assignment inserted, and operations that are not row-major after normalisation."""
    case = rewritable(seed)
    wanted = jax.tree.leaves(evaluate(case.module, case.arguments))
    module = with_random_border(case, seed)
    run_pipeline(module, [LayoutAssignment(**options)], WATCH)
    assert misplaced(module) == [], print_module(module)
    copies = sum(i.opcode == "copy" for i in module.instructions())
    assert not differences(jax.tree.leaves(evaluate(module, case.arguments)), wanted, case), seed
    simplifier = make_pass("hlo-algebraic-simplifier", "layout-sensitive=true")
    passes = [ReshapeDecomposer(), LayoutNormalization(), simplifier, ReshapeDecomposer()]
    run_pipeline(module, passes, WATCH)
    assert misplaced(module) == [], print_module(module)
    problem = differences(jax.tree.leaves(evaluate(module, case.arguments)), wanted, case)
    assert not problem, f"{seed}: {problem}\n{print_module(module)}"
    assert not any(i.opcode in ("reshape", "copy") and i.shape.rank for i in module.instructions())
    return copies, len(strange(module))


def in_memory(value: np.ndarray, shape: Shape) -> np.ndarray:
    """An array with the dims of its memory."""
    return value.transpose(order_of(shape)).copy(order="C")


def from_memory(value: np.ndarray, shape: Shape) -> np.ndarray:
    """An array as the program means it, from its memory."""
    lying = value.reshape([shape.dims[d] for d in order_of(shape)])
    return lying.transpose(np.argsort(order_of(shape)))


def without_layouts(seed: int, passes=()) -> tuple[HloModule, Case, list, list]:
    """A program with a random border after passes, its arguments as they lie, and what it should give."""
    case = rewritable(seed)
    wanted = jax.tree.leaves(evaluate(case.module, case.arguments))
    module = with_random_border(case, seed)
    run_pipeline(module, passes, WATCH)
    given = [in_memory(np.asarray(a), s) for a, s in zip(case.arguments, module.parameter_layouts)]
    return module, case, given, wanted


def results_of(values: list[np.ndarray], border: Shape) -> list[np.ndarray]:
    return [from_memory(v, s) for v, (_, s) in zip(values, border.leaves(), strict=True)]


@pytest.mark.parametrize("assigned", [False, True])
def test_a_program_without_layouts_computes_the_same_in_the_same_memory(assigned):
    layouts = [LayoutAssignment(), ReshapeDecomposer(), LayoutNormalization()] if assigned else []
    changed = 0
    for seed in range(12):
        module, case, given, wanted = without_layouts(seed, layouts)
        border = module.result_layout
        before = print_module(module)
        run_pipeline(module, [LayoutRemoval()], WATCH)
        changed += print_module(module) != before
        assert all(i.shape.layout is None or i.shape.layout.is_row_major for i in module.instructions())
        got = results_of(jax.tree.leaves(evaluate(module, given)), border)
        problem = differences(got, wanted, case)
        assert not problem, f"{seed}: {problem}\n{print_module(module)}"
    assert changed == 12


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(100, 160), marks=pytest.mark.slow)], ids=str)
def test_native_code_reads_and_writes_arrays_in_any_order(seeds):
    for seed in seeds:
        module, case, given, wanted = without_layouts(seed)
        shapes = [p.shape for p in module.entry.parameters]
        labelled = [g.reshape(s.dims) for g, s in zip(given, shapes, strict=True)]
        got = results_of(run_module(module, labelled), module.result_layout)
        problem = differences(got, wanted, case)
        assert not problem, f"{seed}: {problem}\n{print_module(module)}"


def strange(module: HloModule) -> list[str]:
    """Operations that normalisation should have made row-major."""
    return [
        repr(i)
        for i in module.instructions()
        if (i.is_elementwise or i.opcode in ("broadcast", "reduce", "slice", "pad", "concatenate", "iota"))
        and i.shape.is_array
        and not i.shape.layout.is_row_major
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layouts_keep_the_numbers(options):
    found = [check(seed, options) for seed in range(12)]
    assert any(copies for copies, _ in found)
    assert not any(left for _, left in found)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_layouts(options):
    assert not any(check(seed, options)[1] for seed in range(1000, 1200))


@pytest.mark.parametrize(
    ("source", "target", "moves_nothing"),
    [
        (array("f32", (4, 6)), array("f32", (24,)), True),
        (array("f32", (4, 6), (0, 1)), array("f32", (24,)), False),
        (array("f32", (4, 6), (0, 1)), array("f32", (2, 2, 6), (1, 0, 2)), True),
        (array("f32", (4, 6), (0, 1)), array("f32", (2, 2, 6), (0, 1, 2)), False),
        (array("f32", (1, 4), (0, 1)), array("f32", (4,)), True),
        (array("f32", (4, 1, 6), (0, 1, 2)), array("f32", (4, 6), (0, 1)), True),
        (array("f32", (4, 6)), array("f32", (6, 4)), True),
        (array("f32", (4, 6)), array("f32", (6, 4), (0, 1)), False),
        (array("f32", (0, 6), (0, 1)), array("f32", (0,)), True),
        (array("f32", (1, 1)), array("f32", ()), True),
    ],
)
def test_reshapes_that_move_nothing(source, target, moves_nothing):
    assert is_bitcast(source, target) == is_bitcast(target, source) == moves_nothing
    numbers = np.arange(source.size).reshape(source.dims)
    here = numbers.transpose(order_of(source)).reshape(-1)
    there = numbers.reshape(target.dims).transpose(order_of(target)).reshape(-1)
    assert np.array_equal(here, there) == moves_nothing
