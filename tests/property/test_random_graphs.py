"""Random graphs of stages, under every schedule: `jax.jit`'s numbers, or an error in the user's words."""

from __future__ import annotations

import dataclasses
import random

import jax
import numpy as np
import pytest

import mpmd
from mpmd.errors import ScheduleError
from mpmd.scheduling.catalogue import SCHEDULES
from tests.support.comparing import copied, relative_difference
from tests.support.evaluate_mpmd import evaluate
from tests.support.random_graphs import TOLERANCE, draw_graph, report
from tests.support.wide_graphs import draw_wide

pytestmark = pytest.mark.usefixtures("plain_xla")

# 17: a merge moves a fragment behind its sibling; 128: meshes of two sizes share a sharded body;
# 3: several fragments of a task, one stage after the other; 6: zero-bubble schedules refuse it.
FAST = (3, 6, 17, 128)

# 51: a loop that has not all stages, of which some have second copies under dualpipe.
WIDE = (51,)


@pytest.mark.parametrize("seed", FAST)
def test_a_graph_under_every_schedule(seed):
    text, bad = report([seed])
    assert not bad, f"{draw_graph(seed)}\n{text}"


@pytest.mark.parametrize("seed", WIDE)
def test_a_wide_graph_under_every_schedule(seed):
    text, bad = report([seed], draw_wide)
    assert not bad, f"{draw_wide(seed)}\n{text}"


def test_what_graphs_are_evaluated_by_leaves_the_operands_of_a_scatter_alone():
    named = mpmd.named_computation(lambda x: (x.at[0].add(1.0), x * 2), name="f")
    config = mpmd.make_config(mpmd.make_topology({"m": 1}), {"f": "m"})
    x = np.ones((4, 4), np.float32)
    got = evaluate(mpmd.jit(named, config).lower(x).partitioned.module, [x])
    assert relative_difference(got, [x + np.eye(4, dtype=np.float32)[0][:, None], x * 2]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_graph, draw_wide])
@pytest.mark.parametrize("part", range(10))
def test_many_new_graphs_under_every_schedule(part, draw):
    """A hundred graphs of either kind; the seeds are others each time, and shown if one fails."""
    first = random.SystemRandom().randrange(2**31)
    text, bad = report(range(first, first + 10), draw)
    assert not bad, text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_graph_runs_under_a_random_schedule(seed):
    """Compiled by XLA: this is about streams and placement; native code has random programs of its own."""
    graph, schedule = draw_graph(seed), random.Random(seed).choice(list(SCHEDULES))
    arguments = graph.arguments()
    config = dataclasses.replace(graph.config(schedule), backend="xla")
    try:
        got = mpmd.jit(graph.step(), config, donate_argnums=0 if graph.donate else ())(*copied(arguments))
    except ScheduleError as error:
        pytest.skip(str(error))
    want = jax.jit(graph.step())(*copied(arguments))
    assert relative_difference(got, want) <= TOLERANCE, graph
