"""Random programs: what is accepted runs and means what the graph means; what is rejected would not."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.workloads.graphs import GraphBuilder
from mpmd.errors import ProgramError
from mpmd.runtime.program.graph import EntryGraph
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.order import issue_order, linear_order, messages, waits_for
from mpmd.runtime.program.stream_memory import predict_memory
from mpmd.runtime.program.streams import Program, Recv, Run, Send, reads
from mpmd.runtime.program.verify_streams import verify
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from tests.support.fake_engine import FakeEngine, expected, fake_arguments, fake_executables


def random_graph(rng: random.Random) -> EntryGraph:
    """Random calls on random meshes; every kind of transfer; donations, some of them unwise."""
    b = GraphBuilder(shape=(1,))
    meshes = [f"m{k}" for k in range(rng.randint(1, 4))]
    values = [
        b.input(rng.choice(meshes), f"x{k}", donated=rng.random() < 0.5) for k in range(rng.randint(1, 4))
    ]

    def on(mesh: str) -> int:
        value = rng.choice(values)
        if b.types[value].mesh != mesh:
            value = b.transfer(value, mesh)
            values.append(value)
        return value

    for number in range(rng.randint(1, 10)):
        mesh = rng.choice(meshes)
        arguments = [on(mesh) for _ in range(rng.randint(0 if number else 1, 3))]
        donated = tuple(k for k in range(len(arguments)) if rng.random() < 0.3)
        phase = rng.choice(["F", "B", ""])
        values += b.call(f"f{number}", mesh, arguments, rng.randint(1, 2), donated=donated, phase=phase)
        if rng.random() < 0.2:
            value = rng.choice(values)
            values.append(b.transfer(value, b.types[value].mesh, memory_kind="pinned_host"))
    for value in rng.sample(values, rng.randint(1, min(4, len(values)))):
        b.output(value)
    return b.graph()


graphs = st.integers(0, 2**32).map(lambda seed: random_graph(random.Random(seed)))
processes = st.sampled_from(
    [
        {},
        {"m1": (1,)},
        {"m1": (1,), "m2": (2,), "m3": (1,)},
        {"m0": (2,), "m1": (1,), "m3": (1,)},
        {"m0": (0, 1), "m1": (1, 2), "m2": (3,)},
    ]
)


def results(program: Program, graph: EntryGraph, issue: str, rng: random.Random) -> list[str]:
    pause = (lambda: rng.random() * 3e-4) if issue == "thread-per-mesh" else (lambda: 0.0)
    executables = fake_executables(program, pause)
    arguments = fake_arguments(graph)
    with Executor(program, executables, FakeEngine(), RuntimeOptions(issue=issue)) as executor:
        values = [array.value for array in executor.run(arguments)]
    forwarded = {value for value in values if "(" not in value}
    for spec, argument in zip(graph.inputs, arguments, strict=True):
        if not spec.donated:
            assert not argument.is_deleted()
        elif spec.path not in forwarded:
            assert argument.is_deleted()
    return values


@settings(max_examples=100, deadline=None)
@given(graphs, st.sampled_from(["one-thread", "thread-per-mesh"]), st.randoms(use_true_random=False))
def test_an_accepted_program_means_what_its_graph_means(graph, issue, rng):
    program = linearize(graph)
    assert results(program, graph, issue, rng) == expected(graph)


@settings(max_examples=100, deadline=None)
@given(graphs, st.randoms(use_true_random=False))
def test_a_damaged_program_is_rejected_or_still_right(graph, rng):
    """Instructions left out, doubled, moved or taken from elsewhere."""
    program = damaged(linearize(graph), rng)
    try:
        verify(program)
    except ProgramError as error:
        assert str(error).strip()
        with pytest.raises(ProgramError):
            Executor(program, fake_executables(program), FakeEngine())
    else:
        assert results(program, graph, "one-thread", rng) == expected(graph)


def damaged(program: Program, rng: random.Random) -> Program:
    streams = list(program.streams)
    s = rng.randrange(len(streams))
    code = list(streams[s].instructions)
    at, to = rng.randrange(len(code)), rng.randrange(len(code))
    match rng.choice(["drop", "double", "move"]):
        case "drop":
            del code[at]
        case "double":
            code.insert(to, code[at])
        case "move":
            code.insert(to, code.pop(at))
    streams[s] = dataclasses.replace(streams[s], instructions=tuple(code))
    return dataclasses.replace(program, streams=tuple(streams))


@settings(max_examples=80, deadline=None)
@given(graphs, processes, st.randoms(use_true_random=False))
def test_deadlock_and_occupancy_agree_with_random_execution(graph, processes, rng):
    """Receives moved at random."""
    program = shuffled_receives(linearize(graph, processes), rng)
    _, blocked = linear_order(program, waits_for(program, messages(program)))
    stuck = bool(blocked)
    runs = [random_execution(program, random.Random(rng.random())) for _ in range(5)]
    assert [run is None for run in runs] == [stuck] * 5
    if not stuck:
        bound = verify(program).occupancy
        for run in runs:
            assert all(waiting <= most for waiting, most in zip(run, bound, strict=True))


def shuffled_receives(program: Program, rng: random.Random) -> Program:
    streams = []
    for stream in program.streams:
        code = list(stream.instructions)
        for op in [op for op in code if isinstance(op, Recv) and rng.random() < 0.5]:
            at = code.index(op)
            first = next(k for k, o in enumerate(code) if type(o).__name__ != "Feed")
            code.insert(rng.randint(first, at), code.pop(at))
        streams.append(dataclasses.replace(stream, instructions=tuple(code)))
    return dataclasses.replace(program, streams=tuple(streams))


def random_execution(program: Program, rng: random.Random) -> list[int] | None:
    """Advances random streams that can go on; the most waiting messages per channel, None if stuck.

    A receive from another process only posts a request; a reader of its buffer waits.
    """
    at = [0] * len(program.streams)
    waiting: list[set[int]] = [set() for _ in program.channels]
    posted: list[set[int]] = [set() for _ in program.channels]
    arriving: dict[tuple[int, int], tuple[int, int]] = {}  # (stream, buffer) -> (channel, message)
    worst = [0] * len(program.channels)
    while True:
        able = []
        for s, stream in enumerate(program.streams):
            if at[s] == len(stream.instructions):
                continue
            op = stream.instructions[at[s]]
            if isinstance(op, Recv) and op.channel not in program.posted:
                if op.sequence not in waiting[op.channel]:
                    continue
            needed = [arriving[s, b] for b in reads(op) if (s, b) in arriving]
            if all(k not in posted[channel] for channel, k in needed):
                able.append(s)
        if not able:
            done = all(k == len(stream.instructions) for k, stream in zip(at, program.streams, strict=True))
            return worst if done else None
        s = rng.choice(able)
        op = program.streams[s].instructions[at[s]]
        if isinstance(op, Send):
            if op.sequence in posted[op.channel]:
                posted[op.channel].remove(op.sequence)
            else:
                waiting[op.channel].add(op.sequence)
            worst[op.channel] = max(worst[op.channel], len(waiting[op.channel]))
        elif isinstance(op, Recv):
            if op.sequence in waiting[op.channel]:
                waiting[op.channel].remove(op.sequence)
            else:
                posted[op.channel].add(op.sequence)
                arriving[s, op.buffer] = op.channel, op.sequence
        at[s] += 1


@settings(max_examples=50, deadline=None)
@given(graphs)
def test_the_issue_order_is_legal_and_whole(graph):
    program = linearize(graph)
    order = verify(program)
    nodes = issue_order(program, order)
    rank = {node: k for k, node in enumerate(nodes)}
    assert sorted(nodes) == sorted(
        (s, k) for s, t in enumerate(program.streams) for k in range(len(t.instructions))
    )
    assert all(rank[s, k] < rank[s, k + 1] for s, k in nodes if (s, k + 1) in rank)
    assert all(rank[earlier] < rank[node] for node, before in order.before.items() for earlier in before)


@settings(max_examples=50, deadline=None)
@given(graphs)
def test_building_is_deterministic_and_frees_are_exact(graph):
    program = linearize(graph)
    assert program.as_text() == linearize(graph).as_text()
    for stream in program.streams:
        ends = [b for op in stream.instructions if type(op).__name__ == "Free" for b in op.buffers]
        ends += [op.inputs[k] for op in stream.instructions if isinstance(op, Run) for k in op.donated]
        results_ = {op.buffer for op in stream.instructions if type(op).__name__ == "Fetch"}
        assert sorted(ends) == sorted(set(range(len(stream.buffers))) - results_)
    for memory in predict_memory(program):
        assert sum(h.bytes for h in memory.holders) == memory.peak_bytes
