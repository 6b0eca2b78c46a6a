"""The critical path of a step: each of its spans begins when the one before lets it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mpmd.scheduling import Costs, Link, Span, StageCosts, Timeline, get_schedule, simulate
from mpmd.scheduling.timeline import TRANSFER

SHAPES = (("1f1b", 4, 4, 8), ("gpipe", 3, 3, 5), ("zb_h1", 4, 4, 6), ("interleaved_1f1b", 8, 4, 8))
LINKS = (Link(), Link(latency_s=0.3), Link(latency_s=0.1, bytes_per_s=10.0))


def costs(stages: int) -> Costs:
    each = [StageCosts(1.0 + k % 3 * 0.25, 2.0 + k % 2 * 0.5, 1.1, 0.9 + k % 2 * 0.5) for k in range(stages)]
    return Costs(tuple(dataclasses.replace(cost, output_bytes=5) for cost in each))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_path_fills_the_step(shape, link):
    """From 0 to the end without a gap; neighbours are a value and its reader, or of one mesh or link."""
    name, *sizes = shape
    line = simulate(get_schedule(name).table(*sizes), costs(sizes[0]), link)
    path = line.critical_path
    assert path[0].start_s == 0.0 and path[-1].end_s == line.makespan_s
    for earlier, later in itertools.pairwise(path):
        same_place = earlier.mesh == later.mesh and earlier.peer == later.peer
        assert earlier.number in later.needs or same_place
        waits_for_link = later.kind == TRANSFER and earlier.kind == TRANSFER
        assert earlier.end_s == later.start_s or (waits_for_link and earlier.start_s < later.start_s)


def test_a_longer_task_of_the_path_makes_the_step_longer():
    table = get_schedule("1f1b").table(3, 3, 4)
    base = Costs.uniform(3, StageCosts(1.0, 2.0))
    slow = dataclasses.replace(base, stages=(base.stages[0], StageCosts(1.5, 3.0), base.stages[2]))
    line = simulate(table, slow)
    on_path = [span for span in line.critical_path if span.mesh == "mesh1"]
    assert len(on_path) >= 6  # the slow mesh decides
    faster = dataclasses.replace(slow, stages=(StageCosts(0.9, 1.8), *slow.stages[1:]))
    saved = line.makespan_s - simulate(table, faster).makespan_s
    of_first = sum(span.seconds for span in line.critical_path if span.mesh == "mesh0")
    assert 0 < saved <= 0.1 * of_first + 1e-9


def test_a_timeline_without_data_flow_has_no_path():
    spans = (Span("a", "f", None, 0.0, 1.0), Span("b", "g", None, 1.0, 2.0))
    assert Timeline(spans, ("a", "b")).critical_path == ()


def test_clocks_that_contradict_each_other_end_the_path():
    first = Span("a", "f", None, 0.0, 2.0, number=0, needs=(1,))
    second = Span("b", "g", None, 1.0, 3.0, number=1, needs=(0,))
    assert Timeline((first, second), ("a", "b")).critical_path == (first, second)
