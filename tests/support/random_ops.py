"""Random StableHLO ops as text, for the modules of `random_mpmd`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

VECTOR, SCALAR = "tensor<4xi32>", "tensor<i32>"
_UNARY = ("negate", "abs", "sign")
_BINARY = ("add", "subtract", "multiply", "maximum", "minimum")


@dataclasses.dataclass(frozen=True)
class RandomValue:
    """An SSA value: its name, its tensor type, and where it is (None: on no mesh)."""

    name: str
    tensor: str
    mesh: str | None = None
    kind: str | None = None

    @property
    def type(self) -> str:
        """Its MLIR type."""
        if self.mesh is None:
            return self.tensor
        memory = f', memory_kind="{self.kind}"' if self.kind else ""
        return f'!mpmd.mesh_tensor<"{self.mesh}", {self.tensor}{memory}>'


def listed(values: Sequence[RandomValue]) -> str:
    """The types, separated by commas."""
    return ", ".join(v.type for v in values)


def types_of(values: Sequence[RandomValue]) -> str:
    """The types, as behind an arrow."""
    return listed(values) if len(values) == 1 else f"({listed(values)})"


def names_of(values: Sequence[RandomValue]) -> str:
    """The names, separated by commas."""
    return ", ".join(v.name for v in values)


@dataclasses.dataclass
class Writer:
    """Writes ops, each value under a name of its own."""

    rng: random.Random
    lines: list[str] = dataclasses.field(default_factory=list)
    count: int = 0
    names: tuple[str, ...] = ()
    effects: bool = False

    def new(self, tensor: str, mesh: str | None = None, kind: str | None = None) -> RandomValue:
        """A value that a line to come defines."""
        self.count += 1
        return RandomValue(f"%v{self.count}", tensor, mesh, kind)

    def computed(self, values: Sequence[RandomValue], count: int) -> list[RandomValue]:
        """Writes `count` random StableHLO ops on plain values; all values then at hand, old ones first."""
        pool = list(values)
        for _ in range(count):
            pool.append(self._op(pool))
        return pool

    def _op(self, pool: list[RandomValue]) -> RandomValue:
        if not pool or self.rng.random() < 0.15:
            made = self.new(self.rng.choice([VECTOR, SCALAR]))
            self.lines.append(
                f"{made.name} = stablehlo.constant dense<{self.rng.randrange(-3, 9)}> : {made.tensor}"
            )
            return made
        a = self.rng.choice(pool)
        made = self.new(a.tensor)
        others = [v for v in pool if v.tensor == a.tensor]
        if self.effects and self.rng.random() < 0.2:
            self._effect(a, made)
            return made
        roll = self.rng.random()
        if self.names and roll < 0.2:
            self._nested_name(a, made)
        elif roll < 0.25:
            self.lines.append(f"{made.name} = stablehlo.{self.rng.choice(_UNARY)} {a.name} : {a.tensor}")
        elif roll < 0.85:
            b = self.rng.choice(others)
            op = self.rng.choice(_BINARY)
            self.lines.append(f"{made.name} = stablehlo.{op} {a.name}, {b.name} : {a.tensor}")
        elif roll < 0.88 and a.tensor == VECTOR:
            write = self.rng.choice([self._product, self._scaled_product])
            write(a, self.rng.choice(others), made)
        elif roll < 0.92:
            self.lines.append(f"{made.name} = stablehlo.optimization_barrier {a.name} : {a.tensor}")
        else:
            self._branch(pool, a, self.rng.choice(others), made)
        return made

    def _effect(self, a: RandomValue, made: RandomValue) -> None:
        """A call back that gives a value, or only takes one."""
        name, effect = f"@effect{self.count}", "{has_side_effect = true}"
        if self.rng.random() < 0.7:
            self.lines.append(
                f"{made.name} = stablehlo.custom_call {name}({a.name}) {effect} : ({a.tensor}) -> {a.tensor}"
            )
        else:
            self.lines += [
                f"stablehlo.custom_call {name}({a.name}) {effect} : ({a.tensor}) -> ()",
                f"{made.name} = stablehlo.negate {a.name} : {a.tensor}",
            ]

    def _nested_name(self, a: RandomValue, made: RandomValue) -> None:
        """A name inside of a named computation."""
        name = self.rng.choice(self.names)
        if self.rng.random() < 0.5:
            self.lines.append(f'{made.name} = mpmd.named_tensor {a.name} name="{name}" : {a.tensor}')
            return
        arg, inner = self.new(a.tensor), self.new(a.tensor)
        self.lines += [
            f'{made.name} = mpmd.named_computation<"{name}"> ({a.name}) ({arg.name}: {a.tensor}) {{',
            f"  {inner.name} = stablehlo.negate {arg.name} : {a.tensor}",
            f"  mpmd.return {inner.name} : {a.tensor}",
            f"}} : ({a.tensor}) -> {a.tensor}",
        ]

    def _product(self, a: RandomValue, b: RandomValue, made: RandomValue) -> None:
        """The first column of an outer product, by way of its transpose."""
        square, row = "tensor<4x4xi32>", "tensor<1x4xi32>"
        outer, turned, first = self.new(square), self.new(square), self.new(row)
        self.lines += [
            f"{outer.name} = stablehlo.dot_general {a.name}, {b.name}, contracting_dims = [] x [] "
            f": ({VECTOR}, {VECTOR}) -> {square}",
            f"{turned.name} = stablehlo.transpose {outer.name}, dims = [1, 0] : ({square}) -> {square}",
            f"{first.name} = stablehlo.slice {turned.name} [0:1, 0:4] : ({square}) -> {row}",
            f"{made.name} = stablehlo.reshape {first.name} : ({row}) -> {VECTOR}",
        ]

    def _scaled_product(self, a: RandomValue, b: RandomValue, made: RandomValue) -> None:
        """An outer product, its rows or columns scaled, times a vector."""
        square, dim = "tensor<4x4xi32>", self.rng.randrange(2)
        outer, spread, scaled = self.new(square), self.new(square), self.new(square)
        self.lines += [
            f"{outer.name} = stablehlo.dot_general {a.name}, {b.name}, contracting_dims = [] x [] "
            f": ({VECTOR}, {VECTOR}) -> {square}",
            f"{spread.name} = stablehlo.broadcast_in_dim {b.name}, dims = [{dim}] : ({VECTOR}) -> {square}",
            f"{scaled.name} = stablehlo.multiply {outer.name}, {spread.name} : {square}",
            f"{made.name} = stablehlo.dot_general {scaled.name}, {a.name}, contracting_dims = [1] x [0] "
            f": ({square}, {VECTOR}) -> {VECTOR}",
        ]

    def _branch(self, pool: list[RandomValue], a: RandomValue, b: RandomValue, made: RandomValue) -> None:
        """An op with regions, which capture values."""
        scalars = [v for v in pool if v.tensor == SCALAR]
        zero, flag, inner = self.new(SCALAR), self.new("tensor<i1>"), self.new(a.tensor)
        self.lines.append(f"{zero.name} = stablehlo.constant dense<1> : {SCALAR}")
        test = self.rng.choice([*scalars, zero])
        self.lines += [
            f"{flag.name} = stablehlo.compare LT, {test.name}, {zero.name} "
            f": ({SCALAR}, {SCALAR}) -> tensor<i1>",
            f'{made.name} = "stablehlo.if"({flag.name}) ({{',
            f"  {inner.name} = stablehlo.add {a.name}, {b.name} : {a.tensor}",
            f"  stablehlo.return {inner.name} : {a.tensor}",
            f"}}, {{ stablehlo.return {b.name} : {a.tensor} }}) : (tensor<i1>) -> {a.tensor}",
        ]

    def some(self, pool: Sequence[RandomValue], low: int, high: int) -> list[RandomValue]:
        """Some values of a pool; one may come several times."""
        return [self.rng.choice(pool) for _ in range(self.rng.randint(low, high))] if pool else []

    def region(
        self, inputs: Sequence[RandomValue], ops: int, results: int
    ) -> tuple[str, str, list[RandomValue]]:
        """Block arguments, body, and what it returns, for an op on `inputs`."""
        outer, self.lines = self.lines, []
        args = [self.new(v.tensor) for v in inputs]
        pool = self.computed(args, ops if args else max(ops, 1))
        made = pool[len(args) :]
        returned = [
            self.rng.choice(made if made and self.rng.random() < 0.85 else pool) for _ in range(results)
        ]
        self.lines.append(f"mpmd.return {names_of(returned)} : {listed(returned)}")
        body, self.lines = "\n  ".join(self.lines), outer
        return ", ".join(f"{a.name}: {a.tensor}" for a in args), body, returned
