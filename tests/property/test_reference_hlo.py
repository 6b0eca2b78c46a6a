"""The reference target against the evaluator: random programs, on one device and on four."""

from __future__ import annotations

import jax
import pytest

from mpmd.compile.kernels.planning.trace import NoPlan
from tests.support.hlo_meaning import evaluate, evaluate_devices
from tests.support.random_hlo import FAMILIES, differences, random_case
from tests.support.random_hlo.collective import DEVICES, collective_case
from tests.support.random_hlo.wide import wide
from tests.support.reference_runs import run_module


def compare(case):
    """What differs for a case, or why it was refused; "" if nothing."""
    try:
        (got,) = run_module(case.module, [case.arguments])
    except NoPlan as error:
        return f"{case.name}: refused: {error}"
    problem = differences(got, jax.tree.leaves(evaluate(case.module, case.arguments)), case)
    return f"{case.name}: {problem}" if problem else ""


def sweep(cases):
    assert not any(problems := [compare(case) for case in cases]), "\n".join(p for p in problems if p)


@pytest.mark.parametrize("family", FAMILIES)
def test_thunks_compute_what_the_evaluator_does(family):
    sweep(random_case(family, seed) for seed in range(2))


def test_whole_programs_are_exact():
    sweep(wide(seed, 25) for seed in range(2))


def compare_devices(seed):
    case, arguments = collective_case(seed)
    got = run_module(case.module, arguments, {"x": DEVICES})
    for mine, wanted in zip(got, evaluate_devices(case.module, arguments), strict=True):
        assert not differences(mine, jax.tree.leaves(wanted), case), case.name


def test_devices_exchange_what_the_evaluator_says():
    for seed in range(4):
        compare_devices(seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_programs(family):
    sweep(random_case(family, seed) for seed in range(1000, 1040))


@pytest.mark.slow
def test_many_programs_of_several_devices():
    for seed in range(100, 140):
        compare_devices(seed)
