"""The reference target against the evaluator: random programs, on one device and on four."""

from __future__ import annotations

import jax
import pytest

from tests.support.hlo_meaning import evaluate_devices
from tests.support.random_hlo import NATIVE_FAMILIES, differences, random_case
from tests.support.random_hlo.collective import DEVICES, collective_case
from tests.support.random_hlo.sweeping import sweep
from tests.support.random_hlo.wide import wide
from tests.support.reference_runs import run_module


def run(case):
    return run_module(case.module, [case.arguments])[0]


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_thunks_compute_what_the_evaluator_does(family):
    sweep((random_case(family, seed) for seed in range(2)), run)


def test_whole_programs_are_exact():
    sweep((wide(seed, 25) for seed in range(2)), run)


def compare_devices(seed):
    case, arguments = collective_case(seed)
    got = run_module(case.module, arguments, {"x": DEVICES})
    for mine, wanted in zip(got, evaluate_devices(case.module, arguments), strict=True):
        assert not differences(mine, jax.tree.leaves(wanted), case), case.name


def test_devices_exchange_what_the_evaluator_says():
    for seed in range(4):
        compare_devices(seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_many_programs(family):
    sweep((random_case(family, seed) for seed in range(1000, 1040)), run)


@pytest.mark.slow
def test_many_programs_of_several_devices():
    for seed in range(100, 140):
        compare_devices(seed)
