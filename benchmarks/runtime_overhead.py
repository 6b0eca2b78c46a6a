"""What the runtime itself costs per instruction, in µs, with fragments that compute next to nothing.

    python benchmarks/runtime_overhead.py [--meshes 4] [--microbatches 32] [--repeats 60]

A 1F1B pipeline of forward and backward calls goes through every mesh.  The time to issue one step is
divided by its instructions, with one thread for all meshes and with a thread per mesh, interleaved in one
run.  With one thread its CPU time is taken too (`one_thread_cpu_us`), which other load on the machine hardly
changes.  The last line is one JSON object; `us_per_instruction` belongs to what `issue="auto"` picks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import script
from mpmd.runtime.channels.mesh_devices import MeshDevices
from mpmd.runtime.program.graph import BufferType, CallNode, EntryGraph, InputSpec, OutputSpec, TransferOp
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Program
from mpmd.runtime.run.executor import Executor, RuntimeOptions


class Pipeline:
    """forward(x) -> (y, residual) up the meshes, backward(residual, dy, g) -> (dx, g) down again."""

    def __init__(self, meshes: int, microbatches: int, size: int) -> None:
        self.meshes, self.size = meshes, size
        self.types: dict[int, BufferType] = {}
        self.ops: list[CallNode | TransferOp] = []
        self.gradients = [self.value(s) for s in range(meshes)]
        self.xs = [self.value(0) for _ in range(microbatches)]
        self.residuals: dict[tuple[int, int], int] = {}
        self.tops: list[int] = []
        inputs = [
            InputSpec(v, k, f"x{k}", donated=k < meshes) for k, v in enumerate([*self.gradients, *self.xs])
        ]
        for i in range(min(meshes, microbatches)):
            self.forward(i)
        for i in range(microbatches):
            self.backward(i)
            if meshes + i < microbatches:
                self.forward(meshes + i)
        outputs = tuple(OutputSpec(g, k, f"g{k}") for k, g in enumerate(self.gradients))
        self.graph = EntryGraph(tuple(self.ops), self.types, tuple(inputs), outputs, "overhead")

    def value(self, mesh: int) -> int:
        self.types[len(self.types)] = BufferType((self.size,), "float32", f"m{mesh}", bytes=4 * self.size)
        return len(self.types) - 1

    def move(self, source: int, mesh: int) -> int:
        target = self.value(mesh)
        self.ops.append(TransferOp(source, target))
        return target

    def forward(self, i: int) -> None:
        x = self.xs[i]
        for s in range(self.meshes):
            x = x if s == 0 else self.move(x, s)
            y, self.residuals[s, i] = self.value(s), self.value(s)
            self.ops.append(CallNode("forward", f"m{s}", (x,), (y, self.residuals[s, i]), (), s, i, "F"))
            x = y
        self.tops.append(x)

    def backward(self, i: int) -> None:
        dy = self.tops[i]
        for s in reversed(range(self.meshes)):
            dy = dy if s == self.meshes - 1 else self.move(dy, s)
            dx, g = self.value(s), self.value(s)
            arguments = (self.residuals[s, i], dy, self.gradients[s])
            self.ops.append(CallNode("backward", f"m{s}", arguments, (dx, g), (2,), s, i, "B"))
            dy, self.gradients[s] = dx, g


def executables(program: Program, devices: MeshDevices, size: int) -> dict:
    functions = {
        "forward": (jax.jit(lambda x: (x + 1, x * 2)), 1),
        "backward": (jax.jit(lambda r, dy, g: (dy * r, g + dy), donate_argnums=2), 3),
    }
    made = {}
    for mesh, name in program.executables:
        sharding = devices.sharding(BufferType((size,), "float32", mesh))
        function, arity = functions[name]
        aval = jax.ShapeDtypeStruct((size,), np.float32, sharding=sharding)
        made[mesh, name] = function.lower(*[aval] * arity).compile()
    return made


def measure(pipeline: Pipeline, program: Program, repeats: int) -> dict[str, list[float]]:
    devices = MeshDevices({f"m{s}": [jax.devices()[s]] for s in range(pipeline.meshes)})
    compiled = executables(program, devices, pipeline.size)
    executors = {
        "one_thread": Executor(program, compiled, devices, RuntimeOptions(issue="one-thread")),
        "thread_per_mesh": Executor(program, compiled, devices, RuntimeOptions(issue="thread-per-mesh")),
    }
    shardings = [devices.sharding(pipeline.types[spec.value]) for spec in pipeline.graph.inputs]
    seconds: dict[str, list[float]] = {kind: [] for kind in (*executors, "one_thread_cpu")}
    for repeat in range(repeats + 3):
        for kind, executor in executors.items():
            arguments = [jax.device_put(np.ones(pipeline.size, np.float32), s) for s in shardings]
            jax.block_until_ready(arguments)
            t0, cpu = time.perf_counter(), time.thread_time()
            executor.run(arguments)
            issued, cpu = time.perf_counter() - t0, time.thread_time() - cpu
            executor.synchronize()
            if repeat >= 3:
                seconds[kind].append(issued)
                if kind == "one_thread":
                    seconds["one_thread_cpu"].append(cpu)
    for executor in executors.values():
        executor.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meshes", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--size", type=int, default=8, help="elements of every array")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.meshes)
    pipeline = Pipeline(options.meshes, options.microbatches, options.size)
    t0 = time.perf_counter()
    program = linearize(pipeline.graph)
    linearize_ms = (time.perf_counter() - t0) * 1e3
    count = program.num_instructions
    result = {"instructions": count, "meshes": options.meshes, "linearize_ms": round(linearize_ms, 2)}
    for kind, times in measure(pipeline, program, options.repeats).items():
        result[f"{kind}_us"] = round(statistics.median(times) / count * 1e6, 2)
        result[f"{kind}_min_us"] = round(min(times) / count * 1e6, 2)
        result[f"{kind}_step_ms"] = round(statistics.median(times) * 1e3, 2)
    result["us_per_instruction"] = result["one_thread_us"]
    print(json.dumps(result))


if __name__ == "__main__":
    script.run(main)
