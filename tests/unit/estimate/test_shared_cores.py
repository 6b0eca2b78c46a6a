"""Timelines of meshes that share the cores of a machine."""

from __future__ import annotations

import itertools
import json

import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.estimate.program_timeline import predicted_timeline
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Run
from mpmd.scheduling.chrome_trace import chrome_trace
from mpmd.scheduling.render_html import render_html

STAGES, MICROBATCHES = 4, 6


@pytest.fixture(scope="module")
def program():
    return linearize(one_f_one_b(STAGES, MICROBATCHES))


@pytest.mark.parametrize("cores", [None, 1])
def test_copies_to_and_from_the_host_are_drawn_and_waited_for(cores):
    """The copy back, of 5 s, begins when the first of two tasks of 1 s has ended: the backward waits 4 s."""
    b = GraphBuilder()
    x = b.input("m0")
    (residual,) = b.call("f", "m0", [x], stage=0, microbatch=0, phase="F")
    held = b.transfer(residual, "m0", memory_kind="pinned_host")
    others = [b.call("f", "m0", [x], stage=0, microbatch=i, phase="F")[0] for i in (1, 2)]
    (y,) = b.call("f", "m0", [b.transfer(held, "m0")], stage=0, microbatch=0, phase="B")
    for value in (*others, y):
        b.output(value)
    program = linearize(b.graph())
    there, back = ((b.types[s], b.types[t]) for s, t in ((residual, held), (held, residual)))
    costs = ProgramCosts({"f": 1.0}, {there: 0.5, back: 5.0})
    timeline = predicted_timeline(program, costs, ["m0"], cores=cores)
    assert [(s.mesh, s.peer, s.start_s, s.end_s) for s in timeline.transfers] == [
        ("m0", "m0#pinned_host", 1.0, 1.5),
        ("m0#pinned_host", "m0", 2.0, 7.0),
    ]
    assert timeline.makespan_s == 8.0
    assert [span.note for span in timeline.idle("m0")] == ["0B0 waits for a copy from host memory"]
    drawn = json.loads(chrome_trace(timeline))["traceEvents"]
    assert {"to m0#pinned_host", "from m0#pinned_host"} <= {
        e["args"].get("name") for e in drawn if "args" in e
    }
    assert not any("bind_id" in event for event in drawn)
    page = render_html(timeline)
    assert "to m0#pinned_host" in page and "from m0#pinned_host" in page


def costs_of(program, message_s=0.0):
    runs = [op for stream in program.streams for op in stream.instructions if isinstance(op, Run)]
    fragments = {op.executable: 1.0 + 0.25 * (k % 3) for k, op in enumerate(runs)}
    kinds = {}
    for channel in program.channels:
        for stream in program.streams:
            for buffer in stream.buffers:
                kinds |= {(buffer.type, type_): message_s for type_ in channel.types}
    return ProgramCosts(fragments, kinds), sum(fragments[op.executable] for op in runs)


@pytest.mark.parametrize("message_s", [0.0, 0.3])
def test_with_a_core_for_each_mesh_nothing_is_slower(program, message_s):
    costs, _ = costs_of(program, message_s)
    meshes = [stream.mesh for stream in program.streams]
    alone = predicted_timeline(program, costs, meshes)
    shared = predicted_timeline(program, costs, meshes, cores=STAGES)
    assert shared.makespan_s == pytest.approx(alone.makespan_s)
    for mesh in meshes:
        for one, other in zip(alone.compute(mesh), shared.compute(mesh), strict=True):
            assert (one.name, one.start_s, one.end_s) == (
                other.name,
                pytest.approx(other.start_s),
                pytest.approx(other.end_s),
            )


def test_one_core_does_all_the_work_of_all_meshes(program):
    costs, work = costs_of(program)
    meshes = [stream.mesh for stream in program.streams]
    assert predicted_timeline(program, costs, meshes, cores=1).makespan_s == pytest.approx(work)


def test_fewer_cores_take_longer_and_never_less_than_the_work_divided(program):
    costs, work = costs_of(program, 0.1)
    meshes = [stream.mesh for stream in program.streams]
    steps = [predicted_timeline(program, costs, meshes, cores=k).makespan_s for k in range(1, STAGES + 1)]
    assert all(more > less - 1e-9 for more, less in itertools.pairwise(steps))
    assert steps[0] > steps[1] > steps[2]
    assert all(step >= work / k - 1e-9 for k, step in enumerate(steps, 1))
