"""Programs in which all dimensions have one size, so that no shape tells a transposed read from a right one.

Products, transposes, reductions and masks share operands: a parameter is both a factor and part of an
epilogue, a constant is broadcast once for several masks.  Values are small integers: every result is exact.
"""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.instruction import HloInstruction
from tests.support.random_hlo.draft import Case, Draft

SIZES = (2, 3, 4, 8, 16)
LIMIT = 2.0**20
"""Values stay below this, so that sums and products of them are exact in f32."""


class _Square:
    """Values of one size, with a bound on each."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.build, self.rng = draft, draft.builder, draft.rng
        self.size = draft.pick(SIZES)
        self.bounds: dict[HloInstruction, float] = {}
        self.zero = self.build.constant(0.0, "f32")
        self.lowest = self.build.constant(-LIMIT, "f32")
        self.fillers: dict[int, HloInstruction] = {}
        self.masks: dict[int, list[HloInstruction]] = {}

    def dims(self, rank: int) -> tuple[int, ...]:
        return (self.size,) * rank

    def parameter(self, rank: int) -> None:
        values = self.rng.integers(-3, 4, self.dims(rank)).astype(np.float32)
        self.bounds[self.draft.parameter(values, "f32")] = 3.0

    def mask(self, rank: int) -> HloInstruction:
        found = self.masks.setdefault(rank, [])
        if not found or self.rng.random() < 0.4:
            values = self.rng.random(self.dims(rank)) < 0.5
            found.append(self.draft.parameter(values, "pred"))
        return self.draft.pick(found)

    def filler(self, rank: int) -> HloInstruction:
        """Zeros: one broadcast for all masks of a rank, or one of its own."""
        if rank not in self.fillers or self.rng.random() < 0.3:
            self.fillers[rank] = self.build.broadcast(self.zero, self.dims(rank), ())
        return self.fillers[rank]

    def value(self, rank: int | None = None) -> HloInstruction:
        """An earlier value; late ones are likelier."""
        found = [v for v in self.bounds if rank is None or v.shape.rank == rank]
        if not found:
            self.parameter(rank or 2)
            return self.value(rank)
        return found[max(int(self.rng.integers(len(found))), int(self.rng.integers(len(found))))]

    def keep(self, value: HloInstruction, bound: float) -> None:
        if bound > LIMIT**0.5:
            low, high = (
                self.build.broadcast(self.build.constant(c, "f32"), value.shape.dims, ()) for c in (-3.0, 3.0)
            )
            value, bound = self.build.add("clamp", low, value, high), 3.0
        self.bounds[value] = bound

    def step(self) -> None:
        """Another value, of any earlier ones."""
        x = self.value()
        kinds = ["negate", "add", "subtract", "multiply", "maximum", "mask"]
        if x.shape.rank > 1:
            kinds += ["transpose"] * 3 + ["dot"] * 3 + ["reduce"]
        if x.shape.rank < 3:
            kinds += ["broadcast"]
        self.apply(self.draft.pick(kinds), x)

    def chain(self) -> None:
        """A product with what one kernel may compute after it."""
        self.apply("dot", self.value(2))
        for _ in range(int(self.rng.integers(3, 8))):
            kinds = ("negate", "add", "multiply", "mask", "mask", "transpose", "transpose")
            self.apply(self.draft.pick(kinds), list(self.bounds)[-1])

    def apply(self, kind: str, x: HloInstruction) -> None:
        """Another value: one operation on a value and others."""
        rank, bound = x.shape.rank, self.bounds[x]
        if kind == "negate":
            self.keep(self.build.add("negate", x), bound)
        elif kind == "mask":
            chosen = [x, self.filler(rank)]
            self.rng.shuffle(chosen)
            self.keep(self.build.select(self.mask(rank), *chosen), bound)
        elif kind == "transpose":
            self.keep(self.build.transpose(x, tuple(int(d) for d in self.rng.permutation(rank))), bound)
        elif kind == "dot":
            self.dot(x)
        elif kind == "reduce":
            self.reduce(x)
        elif kind == "broadcast":
            dims = tuple(sorted(int(d) for d in self.rng.permutation(rank + 1)[:rank]))
            self.keep(self.build.broadcast(x, self.dims(rank + 1), dims), bound)
        else:
            y = self.value(rank)
            other = self.bounds[y]
            result = {"multiply": bound * other, "maximum": max(bound, other)}.get(kind, bound + other)
            self.keep(self.build.add(kind, x, y), result)

    def dot(self, x: HloInstruction) -> None:
        rank = x.shape.rank
        y = self.value(rank)
        orders = [[int(d) for d in self.rng.permutation(rank)] for _ in range(2)]
        batch = rank - 2
        dims = attrs.DotDims(
            (orders[0][-1],), (orders[1][-1],), tuple(orders[0][:batch]), tuple(orders[1][:batch])
        )
        self.keep(self.build.dot(x, y, dims), self.size * self.bounds[x] * self.bounds[y])

    def reduce(self, x: HloInstruction) -> None:
        gone = (int(self.rng.integers(x.shape.rank)),)
        add = self.rng.random() < 0.5
        computation = scalar_computation(self.draft.module, "add" if add else "maximum", "f32")
        made = self.build.reduce([x], [self.zero if add else self.lowest], gone, computation)
        self.keep(made, self.bounds[x] * (self.size if add else 1))


def squares(draft: Draft) -> Case:
    """A program of matrices, vectors and cubes of one size."""
    square = _Square(draft)
    for rank in draft.pick(((2, 2), (2, 2, 2), (2, 2, 1), (3, 3), (3, 2))):
        square.parameter(rank)
    if draft.rng.random() < 0.5:
        square.chain()
    else:
        for _ in range(int(draft.rng.integers(4, 16))):
            square.step()
    unused = [v for v in square.bounds if not v.users]
    return draft.finish(draft.builder.tuple(unused) if len(unused) > 1 else unused[0])
