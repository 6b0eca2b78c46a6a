"""Passes over random HLO keep its meaning, leave it valid, and say truly whether they changed it."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import HloModule, print_module, verify
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes import PASSES, expand, layout, simplify
from mpmd.compile.pipelines import GROUPS
from mpmd.support.pass_pipeline import Watch, run_pipeline
from mpmd.support.passes import Pass
from tests.support.hlo_meaning import evaluate
from tests.support.random_hlo import differences, random_case
from tests.support.random_hlo.draft import Case
from tests.support.random_hlo.rewritable import rewritable

STEPS = 14
FAST = 42
"""Programs in every test run: enough for every pass to find something to do."""
CHANGED = 3
"""So many programs that a pass changed are enough in every test run."""
SLOW = 200

ELSEWHERE = {
    "hlo-layout-assignment",  # these two need programs with layouts: see test_hlo_layouts.py
    "hlo-layout-normalization",
    "hlo-async-expander",  # the random programs start nothing
    "hlo-dot-algorithm-rewriter",  # nor do products name an algorithm
    "hlo-dot-padding",  # nor are they large: see test_dot_padding.py
    "hlo-scatter-widener",  # nor do they scatter numbers of two bytes
    "hlo-float-jitter",  # it changes numbers
    "hlo-rng-bit-generator-expander",  # bits are no small numbers: see the expanders below
    "hlo-bitcast-convert-expander",
    "hlo-argmax-rewriter",  # reductions of several arrays likewise
    "hlo-reduction-expander",
    "hlo-reduce-window-expander",
    "hlo-layout-removal",  # they are row-major; see test_hlo_layouts
    "hlo-complex-to-pairs",  # nor do they have complex numbers
    "hlo-reduce-precision-expander",
    "hlo-special-function-expander",
    "hlo-narrow-type-expander",
    "hlo-stochastic-convert-expander",
}
LOCAL = sorted({k.name for family in (expand, simplify, layout) for k in family.PASSES} - ELSEWHERE)
"""Collectives have their own programs, fusion and copies come after these passes."""
WATCH = Watch(verify=verify, text=print_module, verify_each=True, check_changed=True)


@functools.cache
def case(seed: int) -> Case:
    return rewritable(seed, STEPS)


@functools.cache
def wanted(seed: int) -> list[np.ndarray]:
    return jax.tree.leaves(evaluate(case(seed).module, case(seed).arguments))


def keeps_values(seed: int, passes: list[Pass]) -> bool:
    """Whether the passes changed anything; fails if they changed the numbers."""
    module: HloModule = case(seed).module.clone()
    before = print_module(module)
    run_pipeline(module, passes, WATCH)
    after = print_module(module)
    if after == before:
        return False
    got = jax.tree.leaves(evaluate(module, case(seed).arguments))
    problem = differences(got, wanted(seed), case(seed))
    assert not problem, f"seed {seed}: {problem}\n{before}\n---\n{after}"
    return True


@pytest.mark.parametrize("name", LOCAL)
def test_a_pass_keeps_the_numbers(name):
    tried = (keeps_values(seed, [PASSES[name]()]) for seed in range(FAST))
    changed = list(itertools.islice(filter(None, tried), CHANGED))
    assert changed, f"the random programs have nothing for {name}"


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_keeps_the_numbers(name):
    changed = [keeps_values(seed, GROUPS[name]()) for seed in range(FAST)]
    assert any(changed)


# -- control edges -------------------------------------------------------------------------------------


def with_control_edges(seed: int) -> HloModule:
    """A random program in which some instructions must run after others whose values they do not read."""
    module = case(seed).module.clone()
    rng = np.random.default_rng([seed, 9])
    for computation in module.computations:
        order = [i for i in computation.post_order() if i.opcode not in ("parameter", "constant")]
        for _ in range(len(order) // 3):
            early, late = sorted(rng.integers(0, len(order), 2))
            if early < late:
                order[late].add_control_predecessor(order[early])
    return module


def orders(module: HloModule) -> list[tuple[HloInstruction, HloInstruction]]:
    """All (early, late) that control edges alone join, directly or through others."""
    found = []
    for computation in module.computations:
        after: dict[HloInstruction, set[HloInstruction]] = {}
        for early in reversed(computation.post_order()):
            after[early] = set(early.control_successors).union(*(after[i] for i in early.control_successors))
        found += [(early, late) for early in computation for late in after[early]]
    return found


def keeps_order(seed: int, pass_: Pass) -> bool:
    """Whether a pass changed a program with control edges; fails if a cycle or another order came of it."""
    module = with_control_edges(seed)
    before, wanted_orders = print_module(module), orders(module)
    run_pipeline(module, [pass_], WATCH)
    after = print_module(module)
    problem = differences(jax.tree.leaves(evaluate(module, case(seed).arguments)), wanted(seed), case(seed))
    assert not problem, f"seed {seed}: {problem}\n{before}\n---\n{after}"
    for early, late in wanted_orders:
        if early.computation is not None and early.computation is late.computation:
            assert early.precedes(late), f"seed {seed}: {early} before {late}\n{before}\n---\n{after}"
    return after != before


@pytest.mark.fast_cases(16)
@pytest.mark.parametrize("name", [*LOCAL, "hlo-fusion", "hlo-copy-insertion", "hlo-attention-stitching"])
def test_a_pass_keeps_the_order_of_control_edges(name):
    changed = [keeps_order(seed, PASSES[name]()) for seed in range(FAST // 3)]
    assert len(changed) == FAST // 3


EXPANDERS = {
    "hlo-reduce-precision-expander": "reduce-precision",
    "hlo-special-function-expander": "unary",
    "hlo-complex-to-pairs": "complex",
    "hlo-argmax-rewriter": "argmax",
    "hlo-reduction-expander": "several",
    "hlo-reduce-window-expander": "several",
    "hlo-bitcast-convert-expander": "bitcast-convert",
    "hlo-batch-norm-expander": "batch-norm",
    "hlo-convolution-to-dot": "convolution",
    "hlo-dot-decomposer": "dot",
    "hlo-gather-simplifier": "gather",
    "hlo-map-inliner": "call",
    "hlo-rng-bit-generator-expander": "rng-bit-generator",
    "hlo-scatter-simplifier": "scatter",
    "hlo-select-and-scatter-expander": "select-and-scatter",
    "hlo-topk-decomposer": "topk",
    "hlo-narrow-type-expander": "narrow",
    "hlo-stochastic-convert-expander": "structure",
}


def expands(name: str, seed: int) -> bool:
    """Whether a pass changed a single operation; fails if it changed its numbers."""
    one = random_case(EXPANDERS[name], seed)
    one.exact = False
    module = one.module.clone()
    run_pipeline(module, [PASSES[name]()], WATCH)
    if print_module(module) == print_module(one.module):
        return False
    got, want = (jax.tree.leaves(evaluate(m, one.arguments)) for m in (module, one.module))
    problem = differences(got, want, one)
    assert not problem, f"{one.name}: {problem}\n{print_module(one.module)}\n---\n{print_module(module)}"
    return True


@pytest.mark.parametrize("name", EXPANDERS)
def test_an_expander_says_what_the_operation_means(name):
    changed = [expands(name, seed) for seed in range(20)]
    assert any(changed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EXPANDERS)
def test_many_operations(name):
    for seed in range(1000, 1300):
        expands(name, seed)


@pytest.mark.parametrize("name", LOCAL)
def test_a_pass_is_done_after_some_rounds(name):
    """No pass undoes what it did: it changes nothing in the end."""
    for seed in range(0, FAST, 4):
        module = case(seed).module.clone()
        assert any(not PASSES[name]().run(module) for _ in range(6)), f"seed {seed}: {print_module(module)}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*LOCAL, *GROUPS])
def test_many_programs(name):
    passes = GROUPS[name]() if name in GROUPS else [PASSES[name]()]
    for seed in range(1000, 1000 + SLOW):
        keeps_values(seed, passes)
