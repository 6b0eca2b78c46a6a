"""Layouts: whatever the caller's are, the numbers stay."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import HloModule, Shape, print_module, tuple_of, verify
from mpmd.compile.passes.groups import GROUPS
from mpmd.compile.passes.layout.layout_removal import LayoutRemoval, order_of
from mpmd.support.pipeline import Watch, run_pipeline
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module
from tests.support.random_hlo import differences
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.rewritable import rewritable

WATCH = Watch(verify=verify, text=print_module, verify_each=True, check_changed=True)


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


def in_memory(value: np.ndarray, shape: Shape) -> np.ndarray:
    """An array with the dims of its memory."""
    return value.transpose(order_of(shape)).copy(order="C")


def from_memory(value: np.ndarray, shape: Shape) -> np.ndarray:
    """An array as the program means it, from its memory."""
    lying = value.reshape([shape.dims[d] for d in order_of(shape)])
    return lying.transpose(np.argsort(order_of(shape)))


def laid_out(seed: int) -> tuple[HloModule, Case, list, list]:
    """A program with a random border, its arguments as they lie, and what it should give."""
    case = rewritable(seed)
    wanted = jax.tree.leaves(evaluate(case.module, case.arguments))
    module = with_random_border(case, seed)
    given = [in_memory(np.asarray(a), s) for a, s in zip(case.arguments, module.parameter_layouts)]
    return module, case, given, wanted


def results_of(values: list[np.ndarray], border: Shape) -> list[np.ndarray]:
    return [from_memory(v, s) for v, (_, s) in zip(values, border.leaves(), strict=True)]


def test_a_program_without_layouts_computes_the_same_in_the_same_memory():
    changed = 0
    for seed in range(12):
        module, case, given, wanted = laid_out(seed)
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
        module, case, given, wanted = laid_out(seed)
        shapes = [p.shape for p in module.entry.parameters]
        labelled = [g.reshape(s.dims) for g, s in zip(given, shapes, strict=True)]
        got = results_of(run_module(module, labelled), module.result_layout)
        problem = differences(got, wanted, case)
        assert not problem, f"{seed}: {problem}\n{print_module(module)}"
