"""Writes modules for `effects`: functions with fragments on meshes, or with names and calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.support.random_ops import VECTOR, RandomValue, Writer, listed, names_of, types_of

MESHES = ("m1", "m2", "m3")
EFFECT = "{has_side_effect = true}"


class FragmentWriter:
    """Writes an entry function, piece by piece, and its callees.

    Attributes:
        pool: values on meshes that later pieces may read.
        results: what the function returns besides some of these.
    """

    def __init__(self, seed: int, on_meshes: bool = True) -> None:
        self.rng = random.Random(seed)
        self.w = Writer(self.rng, effects=True)
        self.on_meshes = on_meshes
        meshes: Sequence[str | None] = MESHES if on_meshes else (None,) * 3
        self.args = [self.w.new(VECTOR, mesh) for mesh in meshes]
        self.pool = list(self.args)
        self.results: list[RandomValue] = []
        self.callees: list[str] = []
        self.topology = ", ".join(f'<"{m}" : <["x"=2]>>' for m in (*MESHES, "m1/cpu"))

    def value(self, mesh: str | None = None, tensor: str = VECTOR) -> RandomValue:
        """A value of the pool, on a mesh."""
        mesh = mesh or (self.rng.choice(MESHES) if self.on_meshes else None)
        return self.rng.choice([v for v in self.pool if v.mesh == mesh and v.tensor == tensor and not v.kind])

    def fragment(
        self,
        inputs: Sequence[RandomValue],
        body: Callable[[list[str]], Sequence[str]],
        results: Sequence[str] = (VECTOR,),
        origin: str = "",
        attributes: str = "",
        mesh: str | None = None,
    ) -> list[RandomValue]:
        """A fragment; `body` gets its arguments and gives its lines, the last one what it returns."""
        mesh = mesh or inputs[0].mesh
        args = [self.w.new(v.tensor) for v in inputs]
        *lines, returned = body([a.name for a in args])
        made = [self.w.new(tensor, mesh) for tensor in results]
        inside = "\n    ".join([*lines, f"mpmd.return {returned} : {', '.join(results)}"])
        names = ", ".join(f"{a.name}: {a.tensor}" for a in args)
        marks = attributes or ('{mpmd.inferred_by = ["w"]} ' if not origin else "")
        self.w.lines.append(
            f'{names_of(made)} = mpmd.fragment<mesh="{mesh}", origin=[{origin}]> ({names_of(inputs)}) {marks}'
            f"({names}) {{\n    {inside}\n  }} : ({listed(inputs)}) -> {types_of(made)}"
        )
        self.pool += made
        return made

    def ops(self, *names: str) -> Callable[[list[str]], list[str]]:
        """A body: ops on the last value and the first one; an effect before each other one."""

        def body(args: list[str]) -> list[str]:
            at, lines = args[0], []
            for name in names:
                made = self.w.new(VECTOR).name
                both = name in ("add", "multiply", "subtract")
                operands = f"{at}, {args[-1]}" if both else at
                lines.append(f"{made} = stablehlo.{name} {operands} : {VECTOR}")
                at = made
                if self.rng.random() < 0.3:
                    made = self.w.new(VECTOR).name
                    call = (
                        f"stablehlo.custom_call @effect{self.w.count}({at}) {EFFECT} : ({VECTOR}) -> {VECTOR}"
                    )
                    lines.append(f"{made} = {call}")
                    at = made
            return [*lines, at]

        return body

    def transfer(self, value: RandomValue, mesh: str, kind: str | None = None) -> RandomValue:
        """A value on another mesh."""
        made = self.w.new(value.tensor, mesh, kind)
        self.w.lines.append(f"{made.name} = mpmd.transfer {value.name} : ({value.type}) -> {made.type}")
        self.pool.append(made)
        return made

    def noise(self) -> None:
        """A fragment that has nothing to do with the motif, or a transfer."""
        value = self.value()
        if self.rng.random() < 0.3:
            self.transfer(value, self.rng.choice(MESHES))
        else:
            ops = self.rng.choices(("add", "negate", "multiply", "abs"), k=self.rng.randint(1, 3))
            self.fragment([value], self.ops(*ops), origin=self.rng.choice(["", '"n"']))

    def text(self) -> str:
        """The module."""
        pool = [v for v in self.pool if v not in self.args]
        results = [*self.results, *self.rng.sample(pool, min(len(pool), 2))]
        results = results or self.args[:1]
        signature = ", ".join(f"{a.name}: {a.type}" for a in self.args)
        body = "\n  ".join([*self.w.lines, f"return {names_of(results)} : {listed(results)}"])
        head = f"func.func public @main({signature}) -> {types_of(results)}"
        main = f"{head} attributes {{topology = #mpmd.topology<{self.topology}>}} {{\n  {body}\n}}"
        return "\n".join([main, *self.callees])


class NameWriter(FragmentWriter):
    """Writes a function of plain values, with names, calls and callees."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, on_meshes=False)

    def line(self, text: str, tensor: str = VECTOR) -> RandomValue:
        """An op with one result."""
        made = self.w.new(tensor)
        self.w.lines.append(f"{made.name} = {text}")
        if tensor == VECTOR:
            self.pool.append(made)
        return made

    def call(
        self, callee: str, inputs: Sequence[RandomValue], marks: str, op: str = "mpmd.call"
    ) -> RandomValue:
        """A call of a function with one result."""
        types = ", ".join(v.tensor for v in inputs)
        return self.line(f"{op} @{callee}({names_of(inputs)}) {marks}: ({types}) -> {VECTOR}")

    def named(
        self, name: str, inputs: Sequence[RandomValue], body: Callable[[list[str]], list[str]], count: int = 1
    ) -> list[RandomValue]:
        """A named computation; `body` gives its lines, the last one what it returns."""
        args = [self.w.new(v.tensor) for v in inputs]
        *lines, returned = body([a.name for a in args])
        made = [self.w.new(VECTOR) for _ in range(count)]
        types = ", ".join([VECTOR] * count)
        inside = "\n    ".join([*lines, f"mpmd.return {returned} : {types}"])
        self.w.lines.append(
            f"{names_of(made)} = mpmd.named_computation<{name}> ({names_of(inputs)}) "
            f"({', '.join(f'{a.name}: {a.tensor}' for a in args)}) {{\n    {inside}\n  }} "
            f": ({listed(inputs)}) -> {types_of(made)}"
        )
        self.pool += made
        return made

    def callee(
        self, name: str, count: int, body: Callable[[list[str]], list[str]], topology: bool = True
    ) -> None:
        """A private function with one result."""
        args = [self.w.new(VECTOR) for _ in range(count)]
        *lines, returned = body([a.name for a in args])
        inside = "\n  ".join([*lines, f"return {returned} : {VECTOR}"])
        signature = ", ".join(f"{a.name}: {VECTOR}" for a in args)
        own = f" attributes {{topology = #mpmd.topology<{self.topology}>}}" if topology else ""
        self.callees.append(f"func.func private @{name}({signature}) -> {VECTOR}{own} {{\n  {inside}\n}}")

    def noise(self) -> None:
        """A named computation, or an effect beside all names."""
        if self.rng.random() < 0.5:
            self.named('"n"', [self.value()], self.ops("negate", "add"))
        else:
            x = self.value()
            call = f"stablehlo.custom_call @effect{self.w.count}b({x.name}) {EFFECT}"
            self.line(f"{call} : ({VECTOR}) -> {VECTOR}")
