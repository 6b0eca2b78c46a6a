"""Attention and sorts: programs that their planners accept, against the meaning of HLO and against f64."""

import functools

import jax
import numpy as np
import pytest

from mpmd.compile.thunks.thunk import AttentionThunk
from tests.support.directed import seeds
from tests.support.directed.attention import case, recipe, wrong
from tests.support.directed.attention_sorts import sorts
from tests.support.hlo_meaning import evaluate
from tests.support.native_fragments import run
from tests.support.native_hlo import compile_module, quick_code, run_module
from tests.support.random_hlo.draft import Draft
from tests.support.random_hlo.sweeping import compare

FAST_ATTENTION, FAST_SORTS = 4, 12
SLOW = 2000


def sweep_attention(count):
    problems, stitched, masked = [], 0, 0
    for seed in seeds(count):
        made = recipe(seed)
        program = case(made)
        with quick_code():
            fragment, compiled = compile_module(program.module)
        kernels = [t for t in compiled.thunks if isinstance(t, AttentionThunk)]
        stitched += bool(kernels)
        masked += any(k.plan.triangle is not None for k in kernels)
        problems.append(wrong(made, functools.partial(run, fragment, made=compiled)))
    assert not any(problems), "\n".join(p for p in problems if p)
    assert stitched >= count / 2, f"{stitched} of {count} are kernels of attention"
    assert masked >= count / 4, f"{masked} of {count} leave out what is behind their mask"


def sweep_sorts(count):
    drafts = [Draft(np.random.default_rng((8, seed)), f"sort {seed}", seed) for seed in seeds(count)]
    with quick_code():
        problems = [compare(sorts(d), lambda c: run_module(c.module, c.arguments)) for d in drafts]
    assert not any(problems), "\n".join(p for p in problems if p)


def test_attention_is_what_f64_gives():
    sweep_attention(FAST_ATTENTION)


def test_results_that_are_less_exact_on_the_average_are_found():
    made = recipe(7)
    module = case(made).module
    assert not wrong(made, lambda arrays: jax.tree.leaves(evaluate(module, arrays)))
    assert wrong(made, lambda arrays: [x * 1.01 for x in jax.tree.leaves(evaluate(module, arrays))])


def test_sorts_are_exact_and_all_accepted():
    sweep_sorts(FAST_SORTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_attention_is_what_f64_gives():
    sweep_attention(SLOW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_sorts_are_exact_and_all_accepted():
    sweep_sorts(SLOW)
