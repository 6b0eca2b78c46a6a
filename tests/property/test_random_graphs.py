"""Random graphs of stages, under every schedule: `jax.jit`'s numbers, or an error in the user's words."""

from __future__ import annotations

import random

import jax
import pytest

from mpmd.errors import ScheduleError
from mpmd.scheduling.schedule import SCHEDULES
from tests.support.comparing import copied, relative_difference
from tests.support.random_graphs import TOLERANCE, draw_graph, report

pytestmark = pytest.mark.usefixtures("plain_xla")

# 17: a merge moves a fragment behind its sibling; 128: meshes of two sizes share a sharded body;
# 3: several fragments of a task, one stage after the other; 6: zero-bubble schedules refuse it.
FAST = (3, 6, 17, 128)


@pytest.mark.parametrize("seed", FAST)
def test_a_graph_under_every_schedule(seed):
    text, bad = report([seed])
    assert not bad, f"{draw_graph(seed)}\n{text}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_new_graphs_under_every_schedule(part):
    """A hundred graphs in all; the seeds are others each time, and shown if one fails."""
    first = random.SystemRandom().randrange(2**31)
    text, bad = report(range(first, first + 10))
    assert not bad, text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_graph_runs_under_a_random_schedule(seed):
    graph, schedule = draw_graph(seed), random.Random(seed).choice(list(SCHEDULES))
    arguments = graph.arguments()
    try:
        got = graph.jitted(schedule)(*copied(arguments))
    except ScheduleError as error:
        pytest.skip(str(error))
    want = jax.jit(graph.step())(*copied(arguments))
    assert relative_difference(got, want) <= TOLERANCE, graph
