"""Programs that are mostly one kernel: the kernel's plan, and its code, compute the program's values."""

from __future__ import annotations

from unittest import mock

import jax
import pytest

from mpmd.compile.kernels import plan_builder
from mpmd.compile.kernels.planner import NoPlan
from mpmd.compile.kernels.planner.elements import Trace
from tests.support.directed import seeds
from tests.support.directed.kernels import planned_differences
from tests.support.directed.planner import FAMILIES, case_of, fused
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module
from tests.support.random_hlo import Case, differences


def plans(family: str, numbers: range) -> list[str]:
    """Wrong results of a family's kernels; at least half of the programs are one kernel."""
    accepted, problems = 0, []
    for seed in numbers:
        case = case_of(family, seed)
        try:
            problem = planned_differences(fused(case))
        except NoPlan:
            continue
        accepted += 1
        problems += [f"{case.name}: {problem}"] if problem else []
    assert accepted >= len(numbers) / 2, f"{accepted} of {len(numbers)} programs are one kernel"
    return problems


def code(case: Case) -> str:
    """Wrong results of the program's code: as one kernel if it is one, else as passes divide it."""
    try:
        found = run_module(fused(case).module, case.arguments)
    except NoPlan:
        found = run_module(case.module, case.arguments)
    problem = differences(found, jax.tree.leaves(evaluate(case.module, case.arguments)), case)
    return f"{case.name}: {problem}" if problem else ""


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_mean_what_the_program_does(family):
    assert plans(family, seeds(50)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compute_what_the_program_means(family):
    assert [p for seed in seeds(3) if (p := code(case_of(family, seed)))] == []


@pytest.mark.parametrize("family", ["rows", "windows"])
def test_rules_that_hand_everything_to_a_reduction_are_noticed(family):
    """Guards and loop dims of a reader, which are no part of what a reduction runs over."""
    with (
        mock.patch.object(Trace, "reduced", lambda trace, at, where, dims: where),
        mock.patch.object(plan_builder, "guard_problems", lambda plan: []),
    ):
        assert plans(family, range(120)) != []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_plans(family):
    assert plans(family, seeds(2000)) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_kernels(family):
    assert [p for seed in seeds(500) if (p := code(case_of(family, seed)))] == []
