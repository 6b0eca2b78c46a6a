"""Random traced programs with names, broadcasts and calls; and what they compute."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpmd import ir
from mpmd.options import DIALECT_DEFAULTS
from mpmd.partition import pipeline
from mpmd.passes.verify import verify
from mpmd.support.passes import Watch, run_pipeline

TENSOR = "tensor<4xf32>"
UNARY = {"negate": np.negative, "tanh": np.tanh, "abs": np.abs}
BINARY = {"add": np.add, "multiply": np.multiply, "subtract": np.subtract}


class NamedProgram:
    """A random program with an entry `@main` and, if wanted, a function `@body` that it calls.

    `text` has no topology; `meshes` and `assignment` say what goes where.
    """

    def __init__(self, seed: int, calls: bool = False, meshes: int = 3, size: int = 12) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self.meshes = {f"m{i + 1}": {"x": 2} for i in range(meshes)}
        self._names = [f"f{i}" for i in range(5)]
        self._tensors = [f"t{i}" for i in range(3)]
        named = [*self._names, *(t for t in self._tensors if self._random.random() < 0.7)]
        self.assignment = {name: self._random.choice(list(self.meshes)) for name in named}
        args = [f"%arg{i}" for i in range(self._random.randint(1, 4))]
        lines, values = self._ops(args, size)
        if not calls:
            self.text = self._function("public @main", args, lines, values[-5:])
            return
        results = self._random.randint(1, len(args))
        callee = self._function("private @body", args, lines, values[-5:], results)
        outer = [f"%arg{i}" for i in range(self._random.randint(1, 4))]
        lines, values = self._ops(outer, size // 3)
        more, values = self._calls(values, len(args), results)
        last, values = self._ops(values, size // 4)
        main = self._function("public @main", outer, [*lines, *more, *last], values[-6:])
        self.text = f"{main}\n{callee}"

    def _new(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _function(
        self, name: str, args: list[str], lines: list[str], values: list[str], results: int = 0
    ) -> str:
        returned = [self._random.choice(values) for _ in range(results or self._random.randint(1, 3))]
        kinds = ", ".join([TENSOR] * len(returned))
        signature = ", ".join(f"{a}: {TENSOR}" for a in args)
        body = "\n  ".join([*lines, f"return {', '.join(returned)} : {kinds}"])
        return f"func.func {name}({signature}) -> ({kinds}) {{\n  {body}\n}}"

    def _compute(self, values: list[str]) -> str:
        kind = self._random.random()
        if kind < 0.2:
            return f"stablehlo.iota dim = 0 : {TENSOR}"
        pick = self._random.choice
        if kind < 0.5:
            return f"stablehlo.{pick(list(UNARY))} {pick(values)} : {TENSOR}"
        return f"stablehlo.{pick(list(BINARY))} {pick(values)}, {pick(values)} : {TENSOR}"

    def _ops(self, values: list[str], count: int) -> tuple[list[str], list[str]]:
        lines, values = [], list(values)
        for _ in range(count):
            kind, value = self._random.random(), self._random.choice(values)
            if kind < 0.35:
                made, text = self._named(values)
                lines.append(text)
                values += made
                continue
            if kind < 0.45:
                text = f'mpmd.named_tensor {value} name="{self._random.choice(self._tensors)}" : {TENSOR}'
            elif kind < 0.5:
                text = f"mpmd.broadcast {value} : {TENSOR}"
            else:
                text = self._compute(values)
            values.append(self._new())
            lines.append(f"{values[-1]} = {text}")
        return lines, values

    def _named(self, values: list[str]) -> tuple[list[str], str]:
        """A named computation of one to three operands."""
        operands = [self._random.choice(values) for _ in range(self._random.randint(1, 3))]
        args = [self._new() for _ in operands]
        inner, lines = list(args), []
        for _ in range(self._random.randint(1, 3)):
            text = self._compute(inner)
            inner.append(self._new())
            lines.append(f"{inner[-1]} = {text}")
        results = self._random.randint(1, 2)
        returned = [self._random.choice(inner[-3:]) for _ in range(results)]
        name = f'"{self._random.choice(self._names)}"' + self._random.choice(["", "", "(1)"])
        made, kinds = self._new(), ", ".join([TENSOR] * results)
        lines.append(f"mpmd.return {', '.join(returned)} : {kinds}")
        signature = ", ".join(f"{a}: {TENSOR}" for a in args)
        inputs = ", ".join([TENSOR] * len(operands))
        head = f"{made}:{results} = mpmd.named_computation<{name}> ({', '.join(operands)}) ({signature}) {{"
        text = "\n    ".join([head, *lines]) + f"\n  }} : ({inputs}) -> ({kinds})"
        return [f"{made}#{i}" for i in range(results)], text

    def _calls(self, values: list[str], operands: int, results: int) -> tuple[list[str], list[str]]:
        """Microbatches; each may use the results of the one before it."""
        lines, values, before = [], list(values), list[str]()
        for number in range(self._random.randint(1, 4)):
            given = [self._random.choice(values) for _ in range(operands)]
            for i, value in enumerate(before):
                if self._random.random() < 0.7:
                    given[i] = value
            made = self._new()
            inputs, kinds = ", ".join([TENSOR] * operands), ", ".join([TENSOR] * results)
            lines.append(
                f"{made}:{results} = mpmd.call @body({', '.join(given)}) "
                f"{{call_counter = {number} : ui32}} : ({inputs}) -> ({kinds})"
            )
            before = [f"{made}#{i}" for i in range(results)]
            values += before
        return lines, values


def imported(program: NamedProgram, **options: Any) -> ir.Module:
    """The module after our import pipeline, verified after each pass."""
    module = ir.parse(program.text)
    with ir.context():
        ir.symbol_table(module)["main"].topology = ir.TopologyAttr.from_axes(program.meshes)
    names = tuple(f"{name}@{mesh}" for name, mesh in program.assignment.items())
    steps = pipeline.import_pipeline(
        dataclasses.replace(DIALECT_DEFAULTS, name_to_mesh_assignment=names, **options)
    )
    watch = Watch(verify=verify, text=ir.to_text, verify_each=True, check_changed=True)
    run_pipeline(module, [step.pass_ for step in steps], watch)
    return module


def evaluated(module: ir.Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What `@main` computes, at any moment of the pipeline."""
    symbols = ir.symbol_table(module)
    return _run(symbols["main"], list(inputs), symbols)


def _run(body: Any, inputs: list[np.ndarray], symbols: dict[str, ir.Func]) -> list[np.ndarray]:
    values = dict(zip(body.args, inputs))
    for op in ir.ops(body):
        operands = [values[v] for v in op.operands]
        values.update(zip(op.results, _one(op, operands, symbols)))
    return [values[v] for v in body.returned]


def _one(op: Any, operands: list[np.ndarray], symbols: dict[str, ir.Func]) -> list[np.ndarray]:
    name = op.operation.name.partition(".")[2]
    if name in UNARY:
        return [UNARY[name](*operands)]
    if name in BINARY:
        return [BINARY[name](*operands)]
    if name == "iota":
        return [np.arange(4, dtype=np.float64)]
    if isinstance(op, ir.Call):
        return _run(symbols[op.callee_name], operands, symbols)
    if isinstance(op, (ir.NamedComputation, ir.Fragment)):
        return _run(op, operands, symbols)
    assert isinstance(op, (ir.NamedTensor, ir.Broadcast, ir.Transfer)), name
    return operands
