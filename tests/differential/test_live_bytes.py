"""What meshes hold during real steps: the streams' own count, and that of the devices' clients."""

from __future__ import annotations

import gc

import jax
import pytest

from examples.workloads.models import MODELS
from examples.workloads.steps import sgd_momentum, training_step
from mpmd.runtime.measure.run_costs import OneAtATime
from mpmd.runtime.program.stream_memory import bytes_on_mesh, predict_memory
from mpmd.runtime.run.interpreter import BoundFeed
from tests.support.comparing import copied
from tests.support.observed_steps import executor_of
from tests.support.scheduled_steps import jitted, placement

pytestmark = pytest.mark.usefixtures("plain_xla")

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved_1f1b")
FAST = {("skip", "zb_h1")}
CASES = [
    pytest.param(name, schedule, marks=[] if (name, schedule) in FAST else pytest.mark.slow)
    for name in ("mlp", "tied", "skip")
    for schedule in SCHEDULES
]


class ClientBytes:
    """Counts all arrays of each mesh's client after every instruction."""

    def __init__(self, meshes) -> None:
        self.clients = {name: mesh.devices.flat[0].client for name, mesh in meshes.items()}
        assert len(set(map(id, self.clients.values()))) == len(self.clients), "a client per mesh"
        self.peaks = dict.fromkeys(self.clients, 0)

    def calling(self, call, frame) -> None:
        pass

    def ran(self, call, frame, issued) -> None:
        pass

    def issued(self, instruction, frame) -> None:
        if not isinstance(instruction, BoundFeed):
            arrays = (a for a in self.clients[instruction.mesh].live_arrays() if not a.is_deleted())
            self.peaks[instruction.mesh] = max(self.peaks[instruction.mesh], sum(map(bytes_on_mesh, arrays)))


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_the_predicted_peak_is_reached_and_not_exceeded(name, schedule):
    meshes = placement(schedule, 2)
    params, loss, batch = MODELS[name].build(len(meshes))
    init, update = sgd_momentum()
    step = jitted(training_step(loss, 4, update), schedule, meshes)
    compiled = step.lower(init(params), *batch).compile()
    predicted = {m.mesh: m for m in predict_memory(compiled.program)}
    state, _ = compiled(copied(init(params)), *batch)
    (state, _), measured = compiled.live_bytes(state, *batch)
    assert measured == {mesh: m.peak_bytes for mesh, m in predicted.items()}

    leaves = jax.tree.leaves((jax.block_until_ready(state), *batch))
    compiled.synchronize()
    del state, _
    gc.collect()
    counted = ClientBytes(compiled.lowered.config.topology)
    others = {
        mesh: sum(bytes_on_mesh(a) for a in client.live_arrays() if not a.is_deleted())
        for mesh, client in counted.clients.items()
    }
    mine = dict.fromkeys(others, 0)
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            (mesh,) = [m for m, c in counted.clients.items() if c is next(iter(leaf.devices())).client]
            mine[mesh] += bytes_on_mesh(leaf)
    executor, _ = executor_of(compiled)
    executor.run(leaves, observers=[OneAtATime(), counted], one_by_one=True)
    executor.close()
    for mesh, memory in predicted.items():
        live = counted.peaks[mesh] - (others[mesh] - mine[mesh])
        # A message that was sent and not yet received is held by the receiver's device, and by no stream.
        assert memory.peak_bytes <= live <= memory.peak_bytes + memory.in_flight_bytes


def test_the_timeline_holds_what_the_memory_analysis_says():
    params, loss, batch = MODELS["mlp"].build(2)
    init, update = sgd_momentum()
    step = jitted(training_step(loss, 4, update), "1f1b", [0, 1])
    compiled = step.lower(init(params), *batch).compile()
    (state, _), costs = compiled.costs(copied(init(params)), *batch)
    _, measured = compiled.timeline(state, *batch)
    for timeline in (compiled.schedule(costs), measured):
        for mesh, analysis in compiled.memory_analysis().items():
            assert timeline.memory_of(mesh).peak_bytes == analysis.peak_bytes
            assert timeline.memory_of(mesh).peak_activations == (2 if mesh == "m0" else 0)
