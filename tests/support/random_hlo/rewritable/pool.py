"""The values that a random program has so far."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from tests.support.random_hlo.draft import Draft, small_integers


class Pool:
    """Values to choose from, and the draft that they stand in."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.build: HloBuilder = draft.builder
        self.rng = draft.rng
        self.values: list[HloInstruction] = []
        self._reducers: dict[tuple[str, str], HloComputation] = {}

    def grow(self, pattern: Callable[[Pool], HloInstruction]) -> None:
        """Add the value of a pattern, kept small."""
        made = pattern(self)
        if made.shape.dtype in ("f32", "s32"):
            low, high = self.build.full(-4, made.shape.dtype, ()), self.build.full(4, made.shape.dtype, ())
            made = self.build.add("clamp", low, made, high)
        if 0 < made.shape.size <= 4096:
            self.values.append(made)

    def pick(self, dtype: str = "", rank: int = -1) -> HloInstruction:
        """A random value; a parameter if there is none of that kind."""
        fits = [
            v
            for v in self.values
            if (v.shape.dtype == dtype if dtype else v.shape.dtype != "pred")
            and (rank < 0 or v.shape.rank == rank)
        ]
        if fits:
            # Late ones rather: deep programs have more to simplify.
            return fits[-1 - min(int(self.rng.exponential(3)), len(fits) - 1)]
        dims = self.draft.dims(1, 3, zero=False) if rank < 0 else self.dims(rank)
        return self.fresh(dtype or "f32", dims)

    def dims(self, rank: int) -> tuple[int, ...]:
        """Random sizes."""
        return self.draft.dims(rank, rank, zero=False)

    def fresh(self, dtype: str, dims: tuple[int, ...]) -> HloInstruction:
        """Another parameter."""
        made = self.draft.parameter(small_integers(self.rng, dtype, dims), dtype)
        if 0 not in dims:
            self.values.insert(0, made)
        return made

    def like(self, value: HloInstruction, dtype: str = "") -> HloInstruction:
        """A value of the same dims: another one of the pool, or a parameter."""
        wanted = dtype or value.shape.dtype
        fits = [
            v
            for v in self.values
            if v.shape.dims == value.shape.dims and v.shape.dtype == wanted and v is not value
        ]
        return fits[int(self.rng.integers(len(fits)))] if fits else self.fresh(wanted, value.shape.dims)

    def full(self, number: float, value: HloInstruction) -> HloInstruction:
        """A number in the shape of a value."""
        return self.build.full(number, value.shape.dtype, value.shape.dims)

    def small(self, value: HloInstruction, bound: int = 2) -> HloInstruction:
        """The value between -bound and bound."""
        low, high = (self.build.full(n, value.shape.dtype, ()) for n in (-bound, bound))
        return self.build.add("clamp", low, value, high)

    def choose(self, *options):
        """One of them."""
        return options[int(self.rng.integers(len(options)))]

    def axis(self, value: HloInstruction) -> int:
        """A dim of a value, which must have one."""
        return int(self.rng.integers(value.shape.rank))

    def order(self, rank: int) -> tuple[int, ...]:
        """A permutation."""
        return tuple(int(i) for i in self.rng.permutation(rank))

    def reducer(self, opcode: str, dtype: str) -> HloComputation:
        """`(a, b) -> opcode(a, b)`."""
        from mpmd.compile.hlo.builder import scalar_computation

        key = opcode, dtype
        if key not in self._reducers:
            self._reducers[key] = scalar_computation(self.draft.module, opcode, dtype)
        return self._reducers[key]

    def scalar(self, number: float, dtype: str) -> HloInstruction:
        """A constant."""
        return (
            self.build.constant(np.asarray(number).astype(np.float32), None)
            if dtype == "f32"
            else (self.build.constant(int(number), dtype))
        )
