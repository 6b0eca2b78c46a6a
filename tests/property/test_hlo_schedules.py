"""Random programs in order, with equal instructions side by side, and with values computed again: valid, of
the same meaning, and within bounds.
"""

from __future__ import annotations

import jax
import pytest

from mpmd.compile.hlo import verify
from mpmd.compile.pipelines import inlining
from mpmd.compile.schedule.heap import peak_of
from mpmd.compile.schedule.memory_schedule import SCHEDULERS, MemorySchedule
from mpmd.compile.schedule.rematerialization import Rematerialization
from mpmd.compile.schedule.side_by_side import SideBySide
from mpmd.support import diagnostics
from tests.support.hlo_meaning import evaluate
from tests.support.random_hlo import differences
from tests.support.random_hlo.rewritable import rewritable

FAST, SLOW = 24, 200


def ordered(seed):
    module = rewritable(seed, 20).module.clone()
    for pass_ in inlining():
        pass_.run(module)
    MemorySchedule().run(module)
    return module


def test_some_random_programs_need_less_when_values_are_computed_again():
    won = 0
    for seed in range(FAST):
        module = ordered(seed)
        before = peak_of(module)
        with diagnostics.collecting():
            Rematerialization(limit=max(1, before * 6 // 10)).run(module)
        won += peak_of(module) < before
    assert won >= 2


@pytest.mark.fast_cases(10)
@pytest.mark.parametrize(
    "seed", [s if s < FAST else pytest.param(s, marks=pytest.mark.slow) for s in range(SLOW)]
)
def test_orders_and_repetitions_keep_values(seed):
    case = rewritable(seed, 20)
    want = jax.tree.leaves(evaluate(case.module, case.arguments))
    module = case.module.clone()
    for pass_ in inlining():
        pass_.run(module)
    single = {}
    for name in SCHEDULERS:
        ordered = module.clone()
        assert MemorySchedule(scheduler=name, exchange=False).run(ordered)
        verify(ordered)
        single[name] = peak_of(ordered)
    assert MemorySchedule().run(module)
    verify(module)
    assert peak_of(module) <= min(single.values())
    before = peak_of(module)
    SideBySide().run(module)
    verify(module)
    assert peak_of(module) <= before + before // 16
    before = peak_of(module)
    with diagnostics.collecting():
        Rematerialization(limit=max(1, before * 6 // 10)).run(module)
    verify(module)
    assert peak_of(module) <= before
    got = jax.tree.leaves(evaluate(module, case.arguments))
    assert not differences(got, want, case), f"seed {seed}"
