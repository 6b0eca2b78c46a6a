"""Passes over collectives keep every device's numbers."""

from __future__ import annotations

import functools

import jax
import pytest

from mpmd.compile.hlo import print_module, verify
from mpmd.compile.passes import collectives
from mpmd.compile.passes.collectives.spmd_partitioner import SpmdPartitioner
from mpmd.compile.pipelines import GROUPS
from mpmd.support.pass_pipeline import Watch, run_pipeline
from mpmd.support.passes import Pass
from tests.support.hlo_meaning import evaluate_devices
from tests.support.random_hlo import differences
from tests.support.random_hlo.collective import DEVICES, collective_case

WATCH = Watch(verify=verify, text=print_module, verify_each=True, check_changed=True)
FAST = 12
SLOW = 200
PASSES = [kind for kind in collectives.PASSES if kind is not SpmdPartitioner]
"""The partitioner takes programs of whole arrays, without collectives."""


@functools.cache
def prepared(seed: int):
    case, rows = collective_case(seed)
    return case, rows, [jax.tree.leaves(v) for v in evaluate_devices(case.module, rows)]


def keeps_values(seed: int, passes: list[Pass]) -> bool:
    """Whether the passes changed anything; fails if they changed a device's numbers."""
    case, rows, wanted = prepared(seed)
    module = case.module.clone()
    before = print_module(module)
    run_pipeline(module, passes, WATCH)
    after = print_module(module)
    if before == after:
        return False
    got = evaluate_devices(module, rows)
    for device in range(DEVICES):
        problem = differences(jax.tree.leaves(got[device]), wanted[device], case)
        assert not problem, f"seed {seed}, device {device}: {problem}\n{before}\n---\n{after}"
    return True


@pytest.mark.parametrize("kind", PASSES, ids=lambda k: k.name)
def test_a_pass_keeps_the_numbers(kind):
    changed = [keeps_values(seed, [kind()]) for seed in range(FAST)]
    assert any(changed), f"the random programs have nothing for {kind.name}"


def test_all_together_keep_the_numbers():
    passes = [pass_ for make in GROUPS.values() for pass_ in make()]
    changed = [keeps_values(seed, passes) for seed in range(FAST)]
    assert all(changed)


@pytest.mark.slow
def test_many_programs():
    passes = [pass_ for make in GROUPS.values() for pass_ in make()]
    for seed in range(1000, 1000 + SLOW):
        for kind in PASSES:
            keeps_values(seed, [kind()])
        keeps_values(seed, passes)
