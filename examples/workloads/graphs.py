"""Graphs of calls made by hand: 1F1B pipelines, and plain helpers to build others."""

from __future__ import annotations

import dataclasses

import numpy as np

from mpmd.runtime.program.graph import BufferType, CallNode, EntryGraph, InputSpec, OutputSpec, TransferOp


@dataclasses.dataclass
class GraphBuilder:
    """Values and ops in the order they are added."""

    shape: tuple[int, ...] = (8,)
    dtype: str = "float32"
    ops: list = dataclasses.field(default_factory=list)
    types: dict = dataclasses.field(default_factory=dict)
    inputs: list = dataclasses.field(default_factory=list)
    outputs: list = dataclasses.field(default_factory=list)
    copies: list = dataclasses.field(default_factory=list)

    def value(self, mesh: str, **changes) -> int:
        number = len(self.types)
        shape = changes.pop("shape", self.shape)
        size = int(np.prod(shape)) * np.dtype(self.dtype).itemsize
        self.types[number] = BufferType(shape, self.dtype, mesh, **{"bytes": size, **changes})
        return number

    def input(self, mesh: str, path: str = "", donated: bool = False, **changes) -> int:
        value = self.value(mesh, **changes)
        self.inputs.append(InputSpec(value, len(self.inputs), path or f"x{len(self.inputs)}", donated))
        return value

    def call(self, name: str, mesh: str, inputs, results: int = 1, **fields) -> list[int]:
        outputs = [self.value(mesh) for _ in range(results)]
        self.ops.append(CallNode(name, mesh, tuple(inputs), tuple(outputs), **fields))
        return outputs

    def transfer(self, source: int, mesh: str, **changes) -> int:
        target = self.value(mesh, **changes)
        self.ops.append(TransferOp(source, target))
        return target

    def output(self, value: int, path: str = "") -> None:
        self.outputs.append(OutputSpec(value, len(self.outputs), path or f"y{len(self.outputs)}"))

    def graph(self) -> EntryGraph:
        edges = tuple(self.inputs), tuple(self.outputs)
        return EntryGraph(tuple(self.ops), dict(self.types), *edges, copies=tuple(self.copies))


def one_f_one_b(stages: int, microbatches: int) -> EntryGraph:
    """forward(w, x) -> (y, residual); backward(w, residual, dy, g) -> (dx, g); update(w, g) -> w."""
    b = GraphBuilder()
    meshes = [f"m{s}" for s in range(stages)]
    weights = [b.input(m, f"w{s}", donated=True) for s, m in enumerate(meshes)]
    grads = [b.input(m, f"g{s}", donated=True) for s, m in enumerate(meshes)]
    xs = [b.input(meshes[0], f"x{i}") for i in range(microbatches)]
    y, residual, dy = {}, {}, {}
    last = stages - 1

    def forward(s: int, i: int) -> None:
        x = xs[i] if s == 0 else b.transfer(y[s - 1, i], meshes[s])
        y[s, i], residual[s, i] = b.call(
            "forward", meshes[s], (weights[s], x), 2, stage=s, microbatch=i, phase="F", label=f"layer {s}"
        )

    def backward(s: int, i: int) -> None:
        d = y[s, i] if s == last else b.transfer(dy[s + 1, i], meshes[s])
        dy[s, i], grads[s] = b.call(
            "backward",
            meshes[s],
            (weights[s], residual[s, i], d, grads[s]),
            2,
            donated=(3,),
            stage=s,
            microbatch=i,
            phase="B",
            label=f"layer {s}",
        )

    tasks = {s: [*_one_f_one_b_tasks(s, stages, microbatches)] for s in range(stages)}
    done: set[tuple[str, int, int]] = set()
    while any(tasks.values()):  # a legal program order: whichever task of a mesh has its inputs
        for s in range(stages):
            while tasks[s]:
                phase, i = tasks[s][0]
                needs = ("F", s - 1, i) if phase == "F" else ("B", s + 1, i) if s < last else ("F", s, i)
                if needs not in done and not (phase == "F" and s == 0):
                    break
                (forward if phase == "F" else backward)(s, i)
                done.add((phase, s, i))
                tasks[s].pop(0)
    for s in range(stages):
        (w,) = b.call("update", meshes[s], (weights[s], grads[s]), donated=(0,), stage=s)
        b.output(w, f"w{s}")
    b.output(b.transfer(dy[0, microbatches - 1], meshes[last]), "dx")
    return b.graph()


def _one_f_one_b_tasks(s: int, stages: int, microbatches: int):
    warm_up = min(stages - 1 - s, microbatches)
    yield from (("F", i) for i in range(warm_up))
    for i in range(microbatches):
        if warm_up + i < microbatches:
            yield ("F", warm_up + i)
        yield ("B", i)
