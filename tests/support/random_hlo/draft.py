"""A case under construction: a builder, its arguments, random values."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import array

FLOATS = ("bf16", "f16", "f32", "f64")
SIGNED = ("s8", "s16", "s32", "s64")
UNSIGNED = ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
COMPLEX = ("c64", "c128")
ANY = (*FLOATS, *INTEGERS, "pred")
EIGHT_BIT_FLOATS = (
    "f8e3m4",
    "f8e4m3",
    "f8e4m3fn",
    "f8e5m2",
    "f8e4m3b11fnuz",
    "f8e4m3fnuz",
    "f8e5m2fnuz",
    "f8e8m0fnu",
)
TINY = ("s2", "s4", "u2", "u4", "f4e2m1fn")
"""Types of less than a byte."""


@dataclass
class Case:
    """A module, its arguments and how exactly two implementations must agree.

    Attributes:
        name: family and detail.
        module: the program.
        arguments: one array per parameter.
        terms: how many terms a sum has at most: the tolerance grows with it.
        exact: outputs are equal bit for bit, NaN and the sign of zero aside.
    """

    name: str
    module: HloModule
    arguments: list[np.ndarray]
    terms: int = 1
    exact: bool = True


@dataclass
class Draft:
    """A case under construction."""

    rng: np.random.Generator
    name: str
    seed: int
    module: HloModule = field(init=False)
    builder: HloBuilder = field(init=False)
    arguments: list[np.ndarray] = field(default_factory=list)
    terms: int = 1
    exact: bool = True

    def __post_init__(self) -> None:
        self.module = HloModule("random")
        self.builder = HloBuilder.create(self.module, "main")

    def parameter(self, values: np.ndarray, dtype: str) -> HloInstruction:
        self.arguments.append(np.asarray(values, order="C"))
        return self.builder.parameter(array(dtype, np.shape(values)))

    def pick(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def in_turn(self, choices):
        """Another one for each of consecutive seeds, until all had their turn."""
        return choices[self.seed * 7919 % len(choices)]

    def dims(self, low: int = 0, high: int = 3, zero: bool = True) -> tuple[int, ...]:
        sizes = (0, 1, 1, 2, 3, 4, 5, 7) if zero and self.rng.random() < 0.15 else (1, 1, 2, 3, 4, 5, 7)
        return tuple(self.pick(sizes) for _ in range(int(self.rng.integers(low, high + 1))))

    def finish(self, root: HloInstruction) -> Case:
        self.module.set_entry(self.builder.build(root))
        return Case(self.name, self.module, self.arguments, self.terms, self.exact)


def values(rng: np.random.Generator, dtype: str, dims: tuple[int, ...], special: bool = False) -> np.ndarray:
    """Random elements; with `special`, some infinite, NaN, tiny, huge, signed zeros, extreme integers."""
    info = DTYPES[dtype]
    if info.kind == "pred":
        return rng.integers(0, 2, dims).astype(bool)
    if info.is_integral:
        low = -(1 << (info.bits - 1)) if info.kind == "signed" else 0
        high = (1 << (info.bits - 1)) - 1 if info.kind == "signed" else (1 << info.bits) - 1
        made = rng.integers(-9 if low else 0, 10, dims).astype(np.int64)
        out = made.astype(info.numpy)
        if special:
            extremes = np.array([low, high, 0, 1, high - 1], dtype=object).astype(info.numpy)
            out = np.where(rng.random(dims) < 0.3, rng.choice(extremes, dims), out)
        return np.asarray(out, info.numpy)
    if info.kind == "complex":
        part = "f32" if dtype == "c64" else "f64"
        return (values(rng, part, dims, False) + 1j * values(rng, part, dims, False)).astype(info.numpy)
    out = rng.standard_normal(dims).astype(np.float64) * 2
    if special:
        finfo = ml_dtypes.finfo(info.numpy)
        extremes = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -2.5,
            float(finfo.max),
            -float(finfo.max),
            float(finfo.tiny),
            np.nan,
        ]
        if np.isinf(np.float64(np.inf).astype(info.numpy)):
            extremes += [np.inf, -np.inf]
        out = np.where(rng.random(dims) < 0.4, rng.choice(np.array(extremes), dims), out)
    return np.asarray(out).astype(info.numpy)


def small_integers(rng: np.random.Generator, dtype: str, dims: tuple[int, ...]) -> np.ndarray:
    """Values from -3 to 3 (0 to 6 if unsigned): sums and products of a few stay exact in every type."""
    if DTYPES[dtype].kind == "pred":
        return rng.integers(0, 2, dims).astype(bool)
    low = 0 if DTYPES[dtype].kind == "unsigned" else -3
    return rng.integers(low, low + 7, dims).astype(DTYPES[dtype].numpy)
