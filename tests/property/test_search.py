"""Whatever the costs, the numbers and the memory: a search is no worse than any schedule with a name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.errors import ScheduleError
from mpmd.scheduling import SCHEDULES, Costs, Link, StageCosts, simulate
from mpmd.scheduling.search import SchedulingProblem, search
from mpmd.scheduling.simulate import peak_activations
from mpmd.scheduling.validate import validate

costs_of_a_stage = st.builds(
    StageCosts,
    *(st.integers(1, 9) for _ in range(4)),
    residual_bytes=st.integers(0, 50),
    output_bytes=st.integers(0, 9),
    parameter_bytes=st.integers(0, 50),
    gradient_bytes=st.integers(0, 50),
)


@st.composite
def problems(draw: st.DrawFn) -> SchedulingProblem:
    meshes = draw(st.integers(1, 4))
    stages = draw(st.sampled_from([meshes, 2 * meshes, 2 * meshes + 1]))
    costs = Costs(tuple(draw(costs_of_a_stage) for _ in range(stages)))
    limited = draw(st.sampled_from(["not", "activations", "bytes"]))
    least = -(-stages // meshes)
    return SchedulingProblem(
        costs,
        meshes,
        draw(st.integers(1, 6)),
        Link(draw(st.integers(0, 3)), 10.0),
        limit_activations=draw(st.integers(least, 3 * least + meshes)) if limited == "activations" else None,
        limit_bytes=draw(st.integers(50, 1500)) if limited == "bytes" else None,
        copies=draw(st.booleans()),
    )


def named_tables(problem: SchedulingProblem):
    """Every named schedule that can order the problem and fits its limits, with what it takes."""
    for name, kind in SCHEDULES.items():
        if not kind.has_backward:
            continue
        try:
            table = kind().table(problem.num_stages, problem.num_meshes, problem.num_microbatches)
        except ScheduleError:
            continue
        line = simulate(table, problem.costs, problem.transfer)
        fits = problem.limit_activations is None or max(peak_activations(table)) <= problem.limit_activations
        fits &= problem.limit_bytes is None or max(m.peak_bytes for m in line.memory) <= problem.limit_bytes
        if fits and (table.mirror is None or problem.copies):
            yield name, line.makespan_s


@settings(max_examples=20, deadline=None)
@given(problem=problems())
def test_a_search_is_no_worse_than_any_named_schedule_that_fits(problem: SchedulingProblem) -> None:
    check(problem)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_nor_is_one_of_many_problems(problem: SchedulingProblem) -> None:
    check(problem)


def check(problem: SchedulingProblem) -> None:
    """A table that fits, with a bound that it does not fall below, and no named one that is shorter."""
    named = dict(named_tables(problem))
    try:
        found = search(problem)
    except ScheduleError as error:
        assert not named, f"{sorted(named)} would fit: {error}"
        return
    validate(found.table, problem.num_microbatches)
    assert found.bound_s <= found.makespan_s + 1e-9
    assert found.makespan_s == simulate(found.table, problem.costs, problem.transfer).makespan_s
    if problem.limit_activations is not None:
        assert max(peak_activations(found.table)) <= problem.limit_activations
    if problem.limit_bytes is not None:
        assert max(m.peak_bytes for m in found.timeline.memory) <= problem.limit_bytes
    for name, seconds in named.items():
        assert found.makespan_s <= seconds + 1e-9, name
    if found.proved:
        assert found.makespan_s <= found.bound_s * (1 + 1e-9)
