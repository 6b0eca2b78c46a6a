"""An engine without arrays: values are texts, so a wrong order or a wrong buffer shows in the result.

Its arrays end as device arrays do: one that was consumed or deleted raises when it is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mpmd.runtime.channels.protocol import LocalChannel
from mpmd.runtime.program.graph import CallNode, EntryGraph
from mpmd.runtime.program.streams import Program, Run, Send


class FakeArray:
    nbytes = 4

    def __init__(self, value: str) -> None:
        self._value, self._deleted = value, False

    @property
    def value(self) -> str:
        if self._deleted:
            raise RuntimeError(f"touched a deleted array: {self._value}")
        return self._value

    def delete(self) -> None:
        self._deleted = True

    def is_deleted(self) -> bool:
        return self._deleted

    def is_ready(self) -> bool:
        return bool(self.value)

    def block_until_ready(self) -> FakeArray:
        self.is_ready()
        return self


class FakeEngine:
    def placer(self, type_, path, *, fresh):
        return lambda value: FakeArray(value.value) if fresh or type_.mesh != value.home else value

    def copier(self, source, target):
        return lambda array: FakeArray(array.value)

    def paired(self, program: Program):
        return ()

    def channels(self, program: Program, pairs=()):
        count = [len(channel.types) for channel in program.channels]
        return lambda: [LocalChannel({k: lambda a: FakeArray(a.value) for k in range(n)}) for n in count]


class Argument(FakeArray):
    """A user's array that lives on a mesh."""

    def __init__(self, value: str, home: str) -> None:
        super().__init__(value)
        self.home = home


class FakeExecutable:
    """Joins the texts of its arguments; consumes as the program says."""

    def __init__(self, name: str, donated: tuple[int, ...], results: int, pause: Callable[[], float]) -> None:
        self.name, self.donated, self.results, self.pause = name, donated, results, pause
        self.calls = 0

    def __call__(self, *arrays: FakeArray) -> list[FakeArray]:
        self.calls += 1
        if pause := self.pause():
            time.sleep(pause)
        text = meaning(self.name, [array.value for array in arrays])
        consumed = [arrays[k] for k in self.donated]
        if len({id(a) for a in consumed}) < len(consumed) or any(
            a is b for k, a in enumerate(arrays) for b in consumed if k not in self.donated
        ):
            raise RuntimeError("an array is consumed and passed twice")
        for array in consumed:
            array.delete()
        return [FakeArray(f"{text}.{k}") for k in range(self.results)]


def meaning(name: str, arguments: list[str]) -> str:
    return f"{name}({','.join(arguments)})" if len(arguments) < 9 else f"{name}#{hash(tuple(arguments))}"


def fake_executables(program: Program, pause: Callable[[], float] = lambda: 0.0) -> dict:
    made = {}
    for stream in program.streams:
        for op in stream.instructions:
            if isinstance(op, Run):
                made[stream.mesh, op.executable] = FakeExecutable(
                    op.executable, op.donated, len(op.outputs), pause
                )
    return made


def fake_arguments(graph: EntryGraph) -> list[Argument]:
    return [
        Argument(spec.path, graph.types[spec.value].mesh)
        for spec in sorted(graph.inputs, key=lambda s: s.index)
    ]


def expected(graph: EntryGraph) -> list[str]:
    values = {spec.value: spec.path for spec in graph.inputs}
    for op in graph.ops:
        if isinstance(op, CallNode):
            text = meaning(op.name, [values[v] for v in op.inputs])
            values.update({v: f"{text}.{k}" for k, v in enumerate(op.outputs)})
        else:
            values[op.target] = values[op.source]
    return [values[spec.value] for spec in sorted(graph.outputs, key=lambda s: s.index)]


def sends(program: Program) -> int:
    return sum(isinstance(op, Send) for stream in program.streams for op in stream.instructions)
