"""How far a mesh may run ahead: as far as its memory allows, and no step holds more than that."""

from __future__ import annotations

import numpy as np
import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.runtime.program.streams import Free, Run
from mpmd.runtime.run.decode import SLACK_BYTES, SLACK_SHARE, unfinished_calls
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from tests.support.pipeline_graphs import compiled, devices, random_inputs, sequential


def pairs(count: int, size: int):
    """`f` makes `size` bytes that `g` reads, `count` times over; nothing else is large."""
    b = GraphBuilder()
    x = b.input("m")
    for _ in range(count):
        (large,) = b.call("f", "m", [x])
        b.types[large] = b.types[large].__class__((size // 4,), "float32", "m", bytes=size)
        b.output(*b.call("g", "m", [large]))
    (stream,) = linearize(b.graph()).streams
    return stream


def most_held(stream, limits) -> int:
    """Bytes held if every call is issued as early as its limit allows, and gives back when it has ended."""
    size = [buffer.type.bytes for buffer in stream.buffers]
    calls = [at for at, op in enumerate(stream.instructions) if isinstance(op, Run)]
    freed = {b: at for at, op in enumerate(stream.instructions) if isinstance(op, Free) for b in op.buffers}
    peak = 0
    for k, at in enumerate(calls):
        ended = calls[: max(0, k + 1 - limits[at])]
        held = set()
        for earlier in calls[: k + 1]:
            held |= set(stream.instructions[earlier].outputs)
        for buffer in list(held):
            users = [
                c
                for c in calls
                if buffer in (*stream.instructions[c].inputs, *stream.instructions[c].outputs)
            ]
            if freed.get(buffer, at) < at and users[-1] in ended:
                held.discard(buffer)
        peak = max(peak, sum(size[b] for b in held))
    return peak


@pytest.mark.parametrize(("size", "limit", "held"), [(1 << 20, 16, 9), (12 << 20, 3, 2), (64 << 20, 1, 1)])
def test_a_mesh_runs_ahead_as_far_as_its_memory_allows(size, limit, held):
    """Pairs of 1 MiB fit into the slack, a second one of 12; of 64 one waits for the one before."""
    stream = pairs(12, size)
    limits = unfinished_calls(stream, 16)
    makers = [at for at in limits if stream.instructions[at].executable == "f"]
    assert {limits[at] for at in makers[8:]} == {limit}
    assert held * size <= most_held(stream, limits) <= held * size + 4096
    assert held * size <= size + max(size // SLACK_SHARE, SLACK_BYTES)
    assert set(unfinished_calls(stream, 1).values()) == {1}


def test_no_limit_is_below_one_or_above_the_option():
    for stream in linearize(one_f_one_b(3, 8)).streams:
        for at_most in (1, 2, 16):
            limits = unfinished_calls(stream, at_most)
            assert set(limits) == {at for at, op in enumerate(stream.instructions) if isinstance(op, Run)}
            assert all(1 <= limit <= at_most for limit in limits.values())


@pytest.mark.parametrize("issue", ["one-thread", "thread-per-mesh"])
def test_a_step_that_may_not_run_ahead_at_all_runs(monkeypatch, issue):
    """The tightest limits: one unfinished call on each mesh."""
    graph = one_f_one_b(3, 4)
    program, place, inputs = linearize(graph), devices(3), random_inputs(graph)
    want = sequential(graph, inputs)
    monkeypatch.setattr("mpmd.runtime.run.decode.SLACK_BYTES", -(1 << 40))
    with Executor(program, compiled(program), place, RuntimeOptions(issue=issue)) as executor:
        for array, expected in zip(executor.run(inputs), want, strict=True):
            np.testing.assert_allclose(np.asarray(array), expected, rtol=1e-5, atol=1e-6)


def test_what_fragments_keep_counts_all_the_time():
    program = linearize(one_f_one_b(1, 2))
    (without,) = predict_memory(program)
    (kept,) = predict_memory(program, None, {"m0": 1000})
    assert (kept.peak_bytes, kept.kept_bytes) == (without.peak_bytes + 1000, 1000)
    assert kept.curve == tuple(size + 1000 for size in without.curve)
