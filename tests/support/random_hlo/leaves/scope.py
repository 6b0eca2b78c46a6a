"""The leaves of one computation: choosing, reading, changing and rearranging them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, array
from tests.support.random_hlo.draft import SIGNED, UNSIGNED

COUNT = array("s32")
"""What positions and choices are computed from."""
FLAG = array("pred")
EXACT_SUMS = (*SIGNED, *UNSIGNED, "f32", "f64")
"""Types whose sums are the same wherever they are computed: narrower floats may be summed as wider ones."""
FUNCTIONS = ("tanh", "logistic")


class LeafScope:
    """Leaves by number; a leaf keeps its shape, and its value changes.

    Args:
        rng: what chooses.
        build: of the computation.
        values: leaf → what it is at present; a branch may be given some only.
        counts: further scalars that positions may follow from, as the counters of loops.
        rounded: whether functions of floats may be taken.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        build: HloBuilder,
        values: dict[int, HloInstruction],
        counts: Sequence[HloInstruction] = (),
        rounded: bool = False,
    ) -> None:
        self.rng, self.build, self.values = rng, build, values
        self.counts, self.rounded = list(counts), rounded

    # -- choosing
    def choose(self, options: Sequence):
        return options[int(self.rng.integers(len(options)))]

    def happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def leaf(self, *shapes: Shape) -> int | None:
        """A leaf of one of these shapes; None without any."""
        fits = [k for k, v in self.values.items() if v.shape.logical in shapes]
        return self.choose(fits) if fits else None

    def count(self) -> HloInstruction:
        """A small number, from 0 to 7, that follows from a leaf or a counter."""
        scalars = [v for v in self.values.values() if v.shape.logical is COUNT] + self.counts
        if not scalars:
            return self.build.constant(self.choose((0, 1, 2, 9)), "s32")
        return self.build.add("and", self.choose(scalars), self.build.constant(7, "s32"))

    def constant(self, shape: Shape) -> HloInstruction:
        """One value everywhere."""
        return self.build.full(int(self.rng.integers(2)), shape.dtype, shape.dims)

    # -- changes
    def step(self) -> None:
        """Changes one leaf."""
        self.choose((self.write, self.write, self.read, self.compute))()

    def _array(self) -> int | None:
        return self.choose([*fits]) if (fits := [k for k, v in self.values.items() if v.shape.rank]) else None

    def write(self) -> None:
        """A part of an array, at a computed position."""
        number = self._array()
        if number is None:
            return
        old = self.values[number]
        sizes = [1 if self.happens(0.6) else int(self.rng.integers(1, d + 1)) for d in old.shape.dims]
        scalar = self.leaf(array(old.shape.dtype))
        if scalar is not None and self.happens(0.7):
            part = self.build.broadcast(self.values[scalar], sizes)
        else:
            source = self.leaf(old.shape.logical)
            part = self.build.dynamic_slice(self.values[source], [self.count() for _ in sizes], sizes)
        self.values[number] = self.build.dynamic_update_slice(old, part, [self.count() for _ in sizes])
        if self.happens(0.15):  # the old array is read after the change
            other = self.leaf(old.shape.logical)
            self.values[other] = self._mixed(old, self.values[other])

    def read(self) -> None:
        """A scalar becomes an element of an array, at a computed position."""
        number = self._array()
        target = None if number is None else self.leaf(array(self.values[number].shape.dtype))
        if target is None:
            return
        source = self.values[number]
        rank = source.shape.rank
        element = self.build.dynamic_slice(source, [self.count() for _ in range(rank)], [1] * rank)
        self.values[target] = self.build.reshape(element, ())

    def compute(self) -> None:
        """A leaf becomes what an elementwise operation gives."""
        number = self.choose(list(self.values))
        value = self.values[number]
        other = self.leaf(value.shape.logical)
        self.values[number] = self._mixed(value, self.values[other])

    def _mixed(self, a: HloInstruction, b: HloInstruction) -> HloInstruction:
        dtype = a.shape.dtype
        if DTYPES[dtype].kind == "pred":
            return self.build.add(self.choose(("and", "or", "xor")), a, b)
        if self.rounded and dtype in ("f32", "f64") and self.happens(0.3):
            return self.build.add(self.choose(FUNCTIONS), a)
        chosen = self.choose(("sum", "difference", "extremum", "choice"))
        if chosen == "choice" and (flag := self.leaf(FLAG)) is not None:
            return self.build.select(self.build.broadcast(self.values[flag], a.shape.dims), a, b)
        if chosen in ("sum", "difference") and dtype in EXACT_SUMS:
            return self.build.add("add" if chosen == "sum" else "subtract", a, b)
        return self.build.add(self.choose(("maximum", "minimum")), a, b)

    # -- results
    def arranged(self, wanted: Sequence[int], shapes: Sequence[Shape]) -> list[HloInstruction]:
        """What leaves become at the end of a branch or of a loop's body: themselves, or each other.

        Args:
            wanted: which leaves.
            shapes: of all leaves.
        """
        way = self.choose(("same", "same", "rotate", "exchange", "mix"))
        values = dict(self.values)
        if way in ("rotate", "exchange"):
            for shape in dict.fromkeys(v.shape.logical for v in self.values.values()):
                alike = [k for k, v in self.values.items() if v.shape.logical is shape]
                if way == "exchange":
                    alike = [int(k) for k in self.rng.permutation(alike)[:2]]
                for k, source in zip(alike, [*alike[1:], *alike[:1]]):
                    values[k] = self.values[source]
        return [self._result(values.get(k), shapes[k], way == "mix") for k in wanted]

    def _result(self, value: HloInstruction | None, shape: Shape, mixed: bool) -> HloInstruction:
        if value is not None and not (mixed and self.happens(0.4)):
            return value
        other = self.leaf(shape)
        if other is None or self.happens(0.1):
            return self.constant(shape)
        return (
            self.values[other] if self.happens(0.8) else self._mixed(self.values[other], self.values[other])
        )
