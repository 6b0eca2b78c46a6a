"""Graphs made by hand for tests: 1F1B pipelines, and plain helpers to build others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from examples.workloads.graphs import GraphBuilder
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.program.graph import CallNode, EntryGraph
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.run.executor import Executor, RuntimeOptions


def forward(w, x):
    return jnp.tanh(w * x), x


def backward(w, residual, dy, g):
    d = dy * (1 - jnp.tanh(w * residual) ** 2)
    return d * w, g + d * residual


def update(w, g):
    return (w - 0.1 * g,)


BODIES = {"forward": (forward, ()), "backward": (backward, (3,)), "update": (update, (0,))}


class JittedExecutable:
    """A jitted function as an executable of the runtime."""

    def __init__(self, name: str, function, donated=()) -> None:
        self.name = name
        self._function = jax.jit(function, donate_argnums=donated)

    def __call__(self, *arrays):
        return self._function(*arrays)


def compiled(program, bodies=BODIES) -> dict:
    return {(mesh, name): JittedExecutable(name, *bodies[name]) for mesh, name in program.executables}


def sequential(graph: EntryGraph, inputs, bodies=BODIES) -> list:
    """The graph's meaning: every op in program order on one device, nothing donated."""
    values = {spec.value: jnp.asarray(inputs[spec.index]) for spec in graph.inputs}
    for op in graph.ops:
        if isinstance(op, CallNode):
            results = bodies[op.name][0](*[values[v] for v in op.inputs])
            values.update(zip(op.outputs, results, strict=True))
        else:
            values[op.target] = values[op.source]
    return [np.asarray(values[spec.value]) for spec in graph.outputs]


def random_inputs(graph: EntryGraph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=graph.types[s.value].shape).astype(graph.types[s.value].dtype) for s in graph.inputs
    ]


X = np.arange(8, dtype=np.float32)


def devices(meshes: int) -> MeshDevices:
    return MeshDevices({f"m{s}": [jax.devices()[s]] for s in range(meshes)})


def make(graph, bodies=BODIES, **options) -> Executor:
    program = linearize(graph)
    return Executor(
        program, compiled(program, bodies), devices(len(program.streams)), RuntimeOptions(**options)
    )


def chain(donated: bool = False):
    """a: f, then g; b: h of what g made."""
    b = GraphBuilder()
    x = b.input("m0", "state.x", donated=donated)
    (y,) = b.call(
        "f", "m0", [x], stage=0, microbatch=2, phase="F", donated=(0,) * donated, label="model.py:7 (f)"
    )
    (z,) = b.call("g", "m0", [y], stage=0, microbatch=2, phase="B")
    b.output(*b.call("h", "m1", [b.transfer(z, "m1")], stage=1))
    return b.graph()


def good(x):
    return (x + 1,)


class Plain:
    """An executable that is called as it is."""

    def __init__(self, name, function, asynchronous=True):
        self.name, self.function, self.asynchronous = name, function, asynchronous

    def __call__(self, *arrays):
        return self.function(*arrays)


def chain_executor(bodies, graph=None, **options) -> Executor:
    program = linearize(graph or chain())
    executables = {(m, n): Plain(n, bodies.get(n, good)) for m, n in program.executables}
    return Executor(program, executables, devices(2), RuntimeOptions(**options))


class FailedArray:
    """An array whose computation failed on its device, as JAX shows it."""

    def __init__(self, like, message, arrived=(True,)):
        self.like, self.message, self.arrived = like, message, arrived
        self.shape, self.dtype, self.sharding = like.shape, like.dtype, like.sharding

    def is_deleted(self):
        return False

    def is_ready(self):
        return bool(self.arrived)

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError(self.message)
