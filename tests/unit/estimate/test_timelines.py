"""Timelines of a real step whose fragments sleep, so that what is measured is known."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time

import jax
import pytest

import mpmd
from examples.workloads.models import MODELS
from examples.workloads.sleeping import BROKEN, Durations, Stages
from examples.workloads.steps import sgd_momentum, training_step
from mpmd.compile.backends.native_cpu.handler import SLOT
from mpmd.cost.device import HOST
from mpmd.errors import FragmentError
from mpmd.estimate.program_timeline import WAITS_FOR_HOST, recorder_of, warn_of_unseen
from mpmd.runtime.measure.run_costs import ProgramCosts
from mpmd.runtime.program.streams import Run
from mpmd.scheduling.chrome_trace import chrome_trace
from mpmd.scheduling.render import render_text
from mpmd.scheduling.render_html import render_html
from mpmd.scheduling.render_svg import render_svg
from tests.support.observed_steps import executor_of

EACH = 0.004
STAGES = Stages((Durations(EACH, EACH, EACH),) * 2, 3, 2)


@pytest.fixture(scope="module")
def step():
    """Compiled step, its costs, and a measured timeline."""
    params, x = STAGES.arguments()
    compiled = STAGES.jitted("1f1b").lower(params, x).compile()
    (params, _), costs = compiled.costs(params, x)
    (params, loss), timeline = compiled.timeline(params, x)
    jax.block_until_ready((params, loss))
    yield compiled, costs, timeline
    compiled.close()


def tasks(timeline, mesh):
    return [str(span.task) for span in timeline.compute(mesh) if span.task is not None]


def test_fragments_cost_what_they_sleep(step):
    compiled, costs, _ = step
    assert set(costs.fragments) == {name for _, name in compiled.program.executables}
    works = {
        op.executable: {"F": 1, "B": 2 if op.stage == 0 else 3}[op.phase]
        for stream in compiled.program.streams
        for op in stream.instructions
        if isinstance(op, Run) and op.phase
    }
    assert sorted(works.values()) == [1, 2, 3]
    assert all(costs.fragments[name] >= parts * EACH for name, parts in works.items())
    kinds = {(source.mesh, target.mesh) for source, target in costs.transfers}
    assert kinds == {("m0", "m1"), ("m1", "m0")}
    assert all(seconds > 0 for seconds in costs.transfers.values())


def test_the_prediction_is_the_measured_step_in_kind(step):
    compiled, costs, measured = step
    predicted = compiled.schedule(costs)
    for mesh in ("m0", "m1"):
        assert tasks(predicted, mesh) == tasks(measured, mesh)
        for span in predicted.compute(mesh):
            parts = {"F": 1, "B": 2 + (mesh == "m1")}[span.task.phase.value] if span.task else 0
            assert span.seconds >= parts * EACH
        assert all(span.seconds > 0 for span in measured.compute(mesh))
    for timeline in (predicted, measured):
        assert timeline.makespan_s >= STAGES.ideal_1f1b_s()
        assert len(timeline.transfers) == 2 * 3
        assert {(t.mesh, t.peer) for t in timeline.transfers} == {("m0", "m1"), ("m1", "m0")}
        assert all(t.nbytes == 4 * 16 * 16 for t in timeline.transfers)


def test_the_host_bounds_steps_of_short_fragments(step):
    compiled, costs, _ = step
    assert 0 < costs.call_s < EACH
    short = ProgramCosts(dict.fromkeys(costs.fragments, 1e-9), call_s=1e-3)
    predicted = compiled.schedule(short)
    runs = sum(len(predicted.compute(mesh)) for mesh in predicted.meshes)
    assert predicted.makespan_s == pytest.approx(runs * 1e-3, rel=1e-3)
    notes = [span.note for mesh in predicted.meshes for span in predicted.idle(mesh)]
    assert any(note.endswith(WAITS_FOR_HOST) for note in notes)


def test_idle_meshes_say_what_they_wait_for(step):
    compiled, costs, measured = step
    predicted = compiled.schedule(costs)
    assert "0B0 waits for 1B0 on m1" in [span.note for span in predicted.idle("m0")]
    assert predicted.idle("m1")[-1].note == "has done its part of the step"
    for timeline in (predicted, measured):
        notes = [span.note for mesh in ("m0", "m1") for span in timeline.idle(mesh)]
        assert all(" waits for " in note or note == "has done its part of the step" for note in notes)
        for mesh in ("m0", "m1"):
            lane = sorted((*timeline.idle(mesh), *timeline.compute(mesh)), key=lambda s: (s.start_s, s.end_s))
            assert sum(span.seconds for span in lane) == pytest.approx(max(s.end_s for s in lane), rel=1e-6)


def test_spans_say_where_they_come_from(step):
    """The line of the model, a backward with its forward in it, and what reads what."""
    compiled, costs, measured = step
    for timeline in (compiled.schedule(costs), measured):
        tasks = [span for mesh in ("m0", "m1") for span in timeline.compute(mesh) if span.task is not None]
        assert all(f"stage{span.task.stage} (" in span.source and ".py:" in span.source for span in tasks)
        assert [span.with_forward for span in tasks] == [span.mesh == "m1" for span in tasks]
        by_number = {span.number: span for span in timeline.spans}
        sent = [span for span in timeline.transfers if span.peer == "m1"]
        assert [str(by_number[number].task) for span in sent for number in span.needs] == [
            "0F0",
            "0F1",
            "0F2",
        ]
        path = timeline.critical_path
        assert path[-1].end_s == pytest.approx(timeline.begin_s + timeline.makespan_s)
        assert {"m0", "m1"} == {span.mesh for span in path} and any(span.kind == "transfer" for span in path)
        waited = sum(max(0.0, b.start_s - a.end_s) for a, b in itertools.pairwise(path))
        assert waited < (1e-9 if timeline is not measured else timeline.makespan_s / 2) + 4 * costs.call_s


def test_costs_are_estimated_given_or_one_step_each(step):
    compiled, _, _ = step
    line = compiled.lowered.schedule({})
    first = next(s for s in line.compute("m0") if s.task)
    assert first.seconds == 1 and line.in_steps
    assert " steps, bubble" in render_text(line)
    estimated = compiled.lowered.schedule()
    given = compiled.lowered.schedule(compiled.lowered.estimated_costs())
    assert estimated.spans == compiled.schedule().spans == given.spans
    assert estimated.makespan_s < 1 and not estimated.in_steps
    assert compiled.lowered.schedule({first.name: 7.0}).compute("m0")[1].seconds == 7


def test_pictures_of_both(step):
    compiled, costs, measured = step
    predicted = compiled.schedule(costs)
    page = render_html(predicted, measured)
    assert "waits for" in page and "in the other timeline" in page
    assert "iB held on m0" in page and "sizes of the program&#x27;s buffers at the measured times" in page
    assert render_svg(predicted, measured).count("</g>") == 2 * render_svg(measured).count("</g>")
    assert "[" in render_text(measured)
    events = json.loads(chrome_trace(predicted, measured))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} >= {"step, measured: m0"}
    assert any(e["ph"] == "C" and sum(e["args"].values()) for e in events)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_meshes_work_at_the_same_time(devices):
    """Also those of several devices, whose fragments one client would run one after the other."""
    stages = Stages((Durations(0.03, 0.03, 0.03),) * 2, 4, 2, devices=devices)
    params, x = stages.arguments()
    compiled = stages.jitted("1f1b").lower(params, x).compile()
    (params, _), _ = compiled.timeline(params, x)
    timelines = []
    for _ in range(3):  # one that other work on the machine does not disturb is enough
        (params, _), timeline = compiled.timeline(params, x)
        timelines.append(timeline)
    assert any(_overlap_s(t) > 0.5 * min(t.busy_s("m0"), t.busy_s("m1")) for t in timelines)
    assert any(t.makespan_s < 0.85 * (t.busy_s("m0") + t.busy_s("m1")) for t in timelines)
    compiled.close()


def test_estimated_costs_follow_the_work():
    """Two stages, the second with twice the layers: a forward of it takes twice the time, a backward more."""
    params, loss, batch = MODELS["uneven"].build(2)
    init, update = sgd_momentum()
    config = mpmd.make_config(
        mpmd.make_topology({"m0": 1, "m1": 1}), {"stage0": "m0", "stage1": "m1"}, schedule="gpipe"
    )
    lowered = mpmd.jit(training_step(loss, 4, update), config).lower(init(params), *batch)
    speed = dataclasses.replace(
        HOST.with_products(1e9), levels=((math.inf, 1e15),), call_seconds=0.0, link_seconds=3.0
    )
    costs = lowered.estimated_costs(speed)
    assert set(costs.fragments) == {name for _, name in lowered.program.executables}
    line = lowered.schedule(costs)
    work = {str(s.task): s.seconds for m in ("m0", "m1") for s in line.compute(m) if s.task}
    assert work["1F0"] / work["0F0"] == pytest.approx(2, rel=0.1)
    assert work["0F0"] == pytest.approx((2 * 2 * 16 * 16 + 2 * 2 * 16) / 1e9, rel=0.1)
    assert work["0B0"] > work["0F0"]
    assert set(costs.transfers.values()) == {3.0 + 2 * 16 * 4 / speed.link_bandwidth}


def _overlap_s(timeline):
    """How long both meshes computed."""
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in timeline.compute("m0")
        for b in timeline.compute("m1")
    )


@pytest.fixture(scope="module")
def native():
    """A function of the devices of a mesh: a compiled step of native fragments, and its arguments."""

    @functools.cache
    def made(devices):
        params, loss, batch = MODELS["uneven"].build(2)
        init, update = sgd_momentum()
        config = mpmd.make_config(
            mpmd.make_topology({"m0": devices, "m1": devices}),
            {"stage0": "m0", "stage1": "m1"},
            schedule="1f1b",
            backend="native",
        )
        arguments = init(params), *batch
        return mpmd.jit(training_step(loss, 4, update), config).lower(*arguments).compile(), arguments

    yield made
    for devices in (1, 2):
        made(devices)[0].close()


@pytest.mark.parametrize("devices", [1, 2])
def test_native_fragments_take_their_own_time(native, devices):
    """Every run is there, with its device's clock, and none is written down once the timeline is there."""
    compiled, (state, *batch) = native(devices)
    timers = [e.timer for e in compiled.executables.values() if e.backend == "native"]
    assert timers
    for _ in range(2):
        begin = time.perf_counter()
        (state, *_), timeline = compiled.timeline(state, *batch)
        took = time.perf_counter() - begin
        for stream in compiled.program.streams:
            runs = [op.executable for op in stream.instructions if isinstance(op, Run)]
            spans = timeline.compute(stream.mesh)
            assert [span.name for span in spans] == runs
            assert all(0 <= span.seconds <= took for span in spans)
            assert sum(timeline.breakdown(stream.mesh).values()) == pytest.approx(timeline.makespan_s)
        assert not any(timer.memory.reshape(-1)[SLOT["log"] // 8] for timer in timers)


def test_a_timeline_of_a_step_that_fails_is_its_error():
    stages = Stages((Durations(0.0, 0.0, 0.0), Durations(BROKEN, 0.0, 0.0)), 2, 2)
    params, x = stages.arguments()
    compiled = stages.jitted("1f1b").lower(params, x).compile()
    with pytest.raises(FragmentError, match="the device is broken"):
        compiled.timeline(params, x)
    compiled.close()


def test_fragments_that_another_step_runs_meanwhile_are_reported(native):
    """Their entries cannot be told apart: the timeline goes without them, and says so."""
    compiled, (state, *batch) = native(1)
    names = [e.name for e in compiled.executables.values() if e.backend == "native"]
    leaves = jax.tree.leaves((state, *batch))
    executor, devices = executor_of(compiled)
    recorder = recorder_of(executor, devices)
    with recorder:
        executor.run(leaves, observers=[recorder])
        executor.run(leaves)
        executor.synchronize()
    executor.close()
    assert sorted(recorder.unseen) == sorted(names)
    assert not {span.name for span in recorder.spans} & set(names)
    with pytest.warns(UserWarning, match="another step with the same fragments ran at the same time"):
        warn_of_unseen(recorder)
