"""Programs of several devices: each device gets its part, and passes over collectives keep all numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mpmd.compile.hlo import print_module, verify
from mpmd.compile.passes import make_pass
from tests.support.directed import seeds
from tests.support.directed.devices import DEVICES, PASSES, collective_program, resharding
from tests.support.hlo_meaning import evaluate_devices
from tests.support.reference_runs import run_module
from tests.support.rewrite_checks import identical

FAST, SLOW = 10, 2000


def moves(seed: int) -> bool:
    """Whether devices communicate in a change of shardings, after which each has its part."""
    case = resharding(seed)
    found = evaluate_devices(case.module, [[part] for part in case.given])
    for device, (got, want) in enumerate(zip(found, case.wanted, strict=True)):
        assert np.array_equal(got, want), f"seed {seed}, device {device}\n{print_module(case.module)}"
    return any(i.info.category.name == "COLLECTIVE" for i in case.module.instructions())


def changes(name: str, seed: int, through_kernels: bool = False) -> bool:
    """Whether a pass changes a program; fails if a device's numbers change."""
    case, rows = collective_program(name, seed)
    after = case.module.clone()
    changed = make_pass(name).run(after)
    verify(after)
    wanted = [jax.tree.leaves(v) for v in evaluate_devices(case.module, rows)]
    got = [jax.tree.leaves(v) for v in evaluate_devices(after, rows)]
    if through_kernels:
        got += run_module(case.module, rows, {"x": DEVICES})
        wanted += wanted
    for mine, theirs in zip(got, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            message = f"{case.name}: {a}, expected {b}\n{print_module(case.module)}"
            assert identical(np.asarray(a), np.asarray(b), signs=False), message
    return changed


def test_each_device_gets_its_part():
    assert sum(moves(seed) for seed in seeds(40)) >= 20


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_the_numbers_of_all_devices(name):
    assert sum(changes(name, seed) for seed in seeds(FAST)) >= FAST / 2


def test_kernels_exchange_what_the_program_says():
    for number, name in enumerate(PASSES):
        changes(name, seeds(FAST)[number], through_kernels=True)


@pytest.mark.slow
def test_each_device_gets_its_part_of_many():
    assert sum(moves(seed) for seed in seeds(SLOW)) >= SLOW / 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_the_numbers_of_many(name):
    assert sum(changes(name, seed, seed % 10 == 0) for seed in seeds(SLOW)) >= SLOW / 2
