"""Random programs of four devices in their memory: what is under way is touched by nothing else."""

from __future__ import annotations

import pytest

from mpmd.compile.backends.native_cpu.compilation import NativeCpu
from mpmd.compile.backends.native_cpu.exchange import Exchange, Publish, Settle
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.options import CompileOptions
from mpmd.compile.thunks.check import check_thunks
from mpmd.compile.thunks.emission import KernelPlans
from mpmd.compile.thunks.thunk import StartThunk
from tests.support.assignment_check import check_assignment
from tests.support.native_hlo import fragment_of_module
from tests.support.random_hlo.collective import DEVICES, collective_case

EAGER = CompileOptions(
    pass_options=("hlo-latency-hiding-schedule{latency=1 most-in-flight=3 keep-peak=false}",)
)
"""Messages take so long that everything else is better done meanwhile."""


def prepared(seed, *, poison=False):
    module = collective_case(seed)[0].module
    fragment = fragment_of_module(module)
    axes = {"x": DEVICES}
    return prepare_fragment(fragment, NativeCpu(), EAGER, module.clone(), axes=axes, poison=poison)


def check(seed):
    """Checks the memory and the order of steps; returns how many collectives had other work beside them."""
    made = prepared(seed)
    plans, assignment = KernelPlans(), made.assignment
    plans.plan_all(made.module.call_order())
    check_assignment(assignment, plans.may_share)
    check_thunks(made.module, made.thunks, assignment.at, assignment.allocations, assignment.results)
    poisoned = prepared(seed, poison=True)
    places = poisoned.assignment
    check_thunks(poisoned.module, poisoned.thunks, places.at, places.allocations, places.results)
    steps = made.program.threaded.steps
    at = {(type(s), s.number): k for k, s in enumerate(steps) if isinstance(s, Publish | Exchange | Settle)}
    numbers = [s.number for s in steps if isinstance(s, Publish)]
    for number in numbers:
        assert at[Publish, number] < at[Exchange, number] < at[Settle, number]
    assert len(at) == 3 * len(numbers), "each part of each exchange once"
    assert sum(isinstance(t, StartThunk) for t in made.thunks) == len(numbers)
    return sum(at[Exchange, n] > at[Publish, n] + 1 for n in numbers)


def test_what_is_under_way_is_touched_by_nothing_else():
    assert sum(check(seed) for seed in range(4)) > 3


@pytest.mark.slow
def test_many_programs():
    assert sum(check(seed) for seed in range(100, 200)) > 100
