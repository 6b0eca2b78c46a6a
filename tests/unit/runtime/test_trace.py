from __future__ import annotations

import itertools
import json
import threading

import jax
import numpy as np
import pytest

from mpmd.runtime.executor import Executor, RuntimeOptions
from mpmd.runtime.instructions import Recv, Run
from mpmd.runtime.linearize import linearize
from mpmd.runtime.trace import MeasuredSpan, TraceRecorder, bubble_fraction, chrome_trace, spans_of

from .pipelines import GraphBuilder, compiled, devices, one_f_one_b, random_inputs, sequential


@pytest.mark.parametrize("issue", ["one-thread", "thread-per-mesh"])
def test_every_call_and_transfer_becomes_a_span(issue):
    graph = one_f_one_b(3, 4)
    program, place = linearize(graph), devices(3)
    inputs = random_inputs(graph)
    with Executor(program, compiled(program), place, RuntimeOptions(issue=issue)) as executor:
        with TraceRecorder(program, place.token) as recorder:
            for _ in range(2):
                got = executor.run(inputs, observers=[recorder])
        for array, want in zip(got, sequential(graph, inputs), strict=True):
            np.testing.assert_allclose(np.asarray(array), want, rtol=1e-5, atol=1e-6)
    for step in (0, 1):
        spans = [s for s in recorder.spans if s.step == step]
        for stream in program.streams:
            here = [s for s in spans if s.mesh == stream.mesh]
            runs = [s for s in here if s.kind == "run"]
            calls = [op for op in stream.instructions if isinstance(op, Run)]
            assert [(s.name, s.stage, s.microbatch, s.phase) for s in runs] == [
                (op.executable, op.stage, op.microbatch, op.phase) for op in calls
            ]
            assert sum(s.kind == "transfer" for s in here) == sum(
                isinstance(o, Recv) for o in stream.instructions
            )
            assert all(s.issued_s <= s.end_s and s.start_s <= s.end_s for s in runs)
            assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(runs))
    assert 0 <= bubble_fraction([s for s in recorder.spans if s.step == 1]) < 1
    assert not [t for t in threading.enumerate() if t.name.startswith("mpmd-watch")]


def two_meshes():
    """m0: f, g; m1: h of what f made."""
    b = GraphBuilder()
    (y,) = b.call("f", "m0", [b.input("m0")], microbatch=0, phase="F", stage=0)
    b.output(*b.call("g", "m0", [y], microbatch=0, phase="B", stage=0))
    b.output(*b.call("h", "m1", [b.transfer(y, "m1")], microbatch=0, phase="F", stage=1))
    program = linearize(b.graph())
    at = {
        type(op).__name__ + getattr(op, "executable", ""): k
        for s in program.streams
        for k, op in enumerate(s.instructions)
    }
    stamps = {
        "m0": [(0, at["Runf"], 0.0, 2.0), (0, at["Rung"], 0.1, 5.0)],
        "m1": [(0, at["Recv"], 0.2, 3.0), (0, at["Runh"], 0.3, 4.5)],
    }
    return spans_of(program, stamps)


def test_begins_are_computed_from_what_a_call_waits_for():
    assert [(s.mesh, s.name, s.kind, s.start_s, s.end_s) for s in two_meshes()] == [
        ("m0", "f", "run", 0.0, 2.0),
        ("m0", "g", "run", 2.0, 5.0),
        ("m1", "m0", "transfer", 2.0, 3.0),
        ("m1", "h", "run", 3.0, 4.5),
    ]
    assert bubble_fraction(two_meshes()) == pytest.approx(1 - (2 + 3 + 1.5) / 10)


def test_the_trace_file_has_a_process_per_mesh():
    trace = json.loads(chrome_trace(two_meshes()))
    events = trace["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"mesh m0", "mesh m1", "fragments", "transfers"}
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert (0, 0, "f 0", 0, 2e6) in spans and (1, 1, "from m0 0", 2e6, 1e6) in spans
    assert chrome_trace(()) == chrome_trace([])


def test_nothing_ran_is_no_bubble():
    assert bubble_fraction([]) == 0
    transfer = MeasuredSpan("m", "a", "transfer", None, None, "", 0, 0, 1, 0)
    assert bubble_fraction([transfer]) == 0


def test_a_token_is_ready_when_its_array_is():
    place = devices(1)
    x = jax.device_put(np.ones((400, 400), np.float32), jax.devices()[0])
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, c: c @ x / 400, x))
    slow(x).block_until_ready()
    pending = slow(x)
    token = place.token(pending)
    early = token.is_ready()
    assert not early or pending.is_ready()
    token.block_until_ready()
    assert pending.is_ready()
