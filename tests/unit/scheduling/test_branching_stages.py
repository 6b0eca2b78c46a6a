"""Tables of stages that branch, or that are frozen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpmd.errors import ScheduleError
from mpmd.scheduling import Task, get_schedule, simulate
from mpmd.scheduling.simulate import peak_activations
from mpmd.scheduling.table import Phase, branching
from mpmd.scheduling.validate import linearize

TOWERS = ((), (0,), (), (1, 2))
"""Two towers, of two stages and of one, and what joins them."""


def test_towers_warm_up_by_the_meshes_that_follow_them() -> None:
    table = get_schedule("1f1b").table(4, 4, 8, sources=TOWERS)
    assert peak_activations(table) == (3, 2, 2, 1)
    assert peak_activations(get_schedule("1f1b").table(4, 4, 8)) == (4, 3, 2, 1)
    assert peak_activations(get_schedule("eager_1f1b").table(4, 4, 8, sources=TOWERS)) == (5, 3, 3, 1)


def test_towers_run_at_the_same_time() -> None:
    """The step is as long as that of the longest way through the stages, three of them."""
    line = simulate(get_schedule("1f1b").table(4, 4, 8, sources=TOWERS))
    assert line.makespan_s == simulate(get_schedule("1f1b").table(3, 3, 8)).makespan_s
    when = {span.task: (span.start_s, span.end_s) for span in line.spans if span.kind == "compute"}
    for phase in (Phase.F, Phase.B):
        assert when[Task(1, 0, phase)][0] >= when[Task(0, 0, Phase.F)][1]
    assert when[Task(1, 7, Phase.B)] == when[Task(2, 7, Phase.B)]


graphs = st.lists(st.integers(0, 31), min_size=2, max_size=5).map(
    lambda bits: [{source for source in range(stage) if of >> source & 1} for stage, of in enumerate(bits)]
)


@settings(max_examples=12, deadline=None)
@given(graphs, st.integers(1, 6))
def test_every_order_of_a_chain_is_legal_for_branches(sources, microbatches) -> None:  # type: ignore[no-untyped-def]
    """And no slower: a stage waits for fewer others."""
    count = len(sources)
    for name in ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved_1f1b"):
        table = get_schedule(name).table(count, count, microbatches, sources=branching(sources))
        chain = get_schedule(name).table(count, count, microbatches)
        assert simulate(table).makespan_s <= simulate(chain).makespan_s
        assert all(a <= b for a, b in zip(peak_activations(table), peak_activations(chain), strict=True))


def test_frozen_stages_have_no_backward() -> None:
    table = get_schedule("1f1b").table(4, 4, 3, sources=TOWERS).without_backward([0, 1])
    assert [str(task) for task in table.orders[0]] == ["0F0", "0F1", "0F2"]
    assert peak_activations(table) == (1, 1, 2, 1)
    assert len(linearize(table)) == 4 * 3 + 2 * 3
    assert table.dependencies(Task(2, 0, Phase.B)) == (Task(2, 0, Phase.F), Task(3, 0, Phase.B))
    assert simulate(table).makespan_s < simulate(get_schedule("1f1b").table(4, 4, 3)).makespan_s


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        (TOWERS[:3], "sources are given for 3 stages, the program has 4"),
        (((), (2,), (), (1,)), "stage 1 cannot read stage 2: the sources of a stage have smaller numbers"),
    ],
)
def test_sources_that_cannot_be(sources, problem) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError, match=problem):
        get_schedule("1f1b").table(4, 4, 2, sources=sources)
