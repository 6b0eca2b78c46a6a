from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.stream_memory import MemoryMeter, bytes_on_mesh, predict_memory
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from tests.support.pipeline_graphs import Plain, compiled, devices, random_inputs


@pytest.mark.parametrize("issue", ["one-thread", "thread-per-mesh"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8)])
def test_measured_bytes_are_the_predicted_ones(issue, stages, microbatches):
    graph = one_f_one_b(stages, microbatches)
    program = linearize(graph)
    meter = MemoryMeter(program)
    with Executor(program, compiled(program), devices(stages), RuntimeOptions(issue=issue)) as executor:
        executor.run(random_inputs(graph), observers=[meter])
    for memory in predict_memory(program):
        assert meter.peaks[memory.mesh] == memory.peak_bytes > 0
        assert sum(h.bytes for h in memory.holders) == memory.peak_bytes
        stream = next(s for s in program.streams if s.mesh == memory.mesh)
        feeds = len(memory.curve) - len(meter.curves[memory.mesh])
        kinds = [type(op).__name__ for op in stream.instructions[feeds:]]
        for kind, predicted, measured in zip(
            kinds, memory.curve[feeds:], meter.curves[memory.mesh], strict=True
        ):
            assert predicted == measured or (kind == "Free" and predicted > measured)


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_holds_no_more_for_more_microbatches(stages):
    """Only the first mesh grows, by its own arguments: one f32[8] per microbatch."""
    few, many = (predict_memory(linearize(one_f_one_b(stages, m))) for m in (8, 16))
    assert [b.peak_bytes - a.peak_bytes for a, b in zip(few, many, strict=True)] == [8 * 32] + [0] * (
        stages - 1
    )
    assert many[-1].peak_bytes < many[1].peak_bytes or stages == 2


def test_a_replica_counts_on_every_device():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    b = GraphBuilder()
    x = b.input("m0", sharding='[{"x"}]')
    (y,) = b.call("f", "m0", [x])
    b.output(y)
    b.types[y] = b.types[y].__class__((8,), "float32", "m0", None, None, 64)
    program = linearize(b.graph())
    place = MeshDevices({"m0": mesh})
    f = jax.jit(lambda x: (x + 1,), out_shardings=(place.sharding(b.types[y]),))
    meter = MemoryMeter(program)
    with Executor(program, {("m0", "f"): Plain("f", f)}, place) as executor:
        (result,) = executor.run([np.ones(8, np.float32)], observers=[meter])
    assert bytes_on_mesh(result) == 64
    assert meter.peaks == {"m0": 96} == {m.mesh: m.peak_bytes for m in predict_memory(program)}


def test_where_the_peak_stands_and_what_holds_it():
    b = GraphBuilder()
    x = b.input("m0", "batch")
    (y,) = b.call("f", "m0", [x], phase="F")
    (z,) = b.call("g", "m0", [y], phase="B", donated=(0,))
    b.output(z, "grad")
    program = linearize(b.graph())
    (memory,) = predict_memory(program, {("m0", "g"): 1000})
    assert (memory.peak_bytes, memory.workspace_bytes) == (1032, 1000)
    assert memory.instruction == "run g  # B"
    assert memory.by_category == {"result": 32, "workspace": 1000}
    (without,) = predict_memory(program)
    assert without.peak_bytes == 64 and without.by_category == {"activation": 32, "argument": 32}
    assert without.curve == (32, 64, 64, 32, 32)
    assert [(h.name, h.category, h.bytes) for h in memory.holders] == [("%2", "result", 32)]


def test_messages_on_their_way_are_bounded():
    memories = predict_memory(linearize(one_f_one_b(2, 8)))
    assert [m.in_flight_bytes for m in memories] == [64, 64]


def test_host_memory_does_not_count():
    """A residual of 32 bytes waits there; held on the device are the argument, a value and the next."""
    b = GraphBuilder()
    x = b.input("m0")
    (residual,) = b.call("f", "m0", [x])
    held = b.transfer(residual, "m0", memory_kind="pinned_host")
    value = x
    for _ in range(4):
        (value,) = b.call("g", "m0", [x, value])
    (y,) = b.call("g", "m0", [b.transfer(held, "m0"), value])
    b.output(y)
    program = linearize(b.graph())
    meter = MemoryMeter(program)
    functions = {"f": jax.jit(lambda x: (x + 1,)), "g": jax.jit(lambda x, y: (x + y,))}
    executables = {("m0", name): Plain(name, f) for name, f in functions.items()}
    with Executor(program, executables, devices(1)) as executor:
        (result,) = executor.run([np.ones(8, np.float32)], observers=[meter])
    (memory,) = predict_memory(program)
    assert (memory.peak_bytes, memory.host_bytes, meter.peaks) == (3 * 32, 32, {"m0": 3 * 32})
    np.testing.assert_array_equal(result, 7)
