"""Differences of two arrays in units of the last place, and whether rounding explains them.

A sum in another order, or a product that is not rounded before it is added, changes a result by some units of
the last place of its *terms*, which may be much larger than itself.  So a difference within some units of the
array's magnitude is rounding; for a larger one, the error of both results against f64 decides: rounding gives
both errors of one size, a mistake only one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpmd.brief import brief
from mpmd.compile.backends.jax_function import numpy_dtype

NARROW_FLOATS = r"bf16|f16|f32|f8E\w+|f4E\w+"
"""Element types in MLIR's notation."""

_WIDE_LIMIT, _NARROW_LIMIT = 64.0, 8.0
"""Units of the last place: in f32 and f64, where a product over 4,096 terms stays below 16; in narrower
types, whose sums are taken in f32."""

_ALIKE = 16.0
"""How much larger than the other an error may be that is still rounding."""

_CHANGED = 1e-3
"""The share of integers that may change where rounded values are made discrete, as in quantisation."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What rounding does to the values of a program.

    Attributes:
        unit: that of the last place of its narrowest floats, relative.
    """

    unit: float

    @staticmethod
    def of(text: str) -> Rounding:
        return Rounding(max(map(_unit_of, _floats_in(text)), default=_unit_of("f64")))

    @property
    def limit(self) -> float:
        """How many units a difference may have that is rounding for sure."""
        return _WIDE_LIMIT if self.unit <= _unit_of("f32") else _NARROW_LIMIT

    def explains(self, difference: Difference) -> bool:
        """Whether a difference is rounding for sure."""
        return difference.ulps <= self.limit

    def difference(self, got: np.ndarray, expected: np.ndarray) -> Difference:
        """The largest difference of two arrays of one shape and dtype."""
        if not got.size:
            return Difference()
        distance = _distance(got, expected) / self.unit
        worst = int(np.argmax(distance))
        index = tuple(map(int, np.unravel_index(worst, got.shape)))
        own, other = (array.reshape(-1)[worst].item() for array in (got, expected))
        count = int((distance > self.limit).sum())
        return Difference(float(distance.flat[worst]), index, own, other, count, got.size)

    def largest(self, got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Difference:
        return max(map(self.difference, got, expected), key=lambda d: d.ulps, default=Difference())

    def is_beyond(self, got: np.ndarray, other: np.ndarray, exact: np.ndarray) -> bool:
        """Whether a result is further from the exact one than rounding explains.

        Args:
            got: the result.
            other: another result, whose error says what rounding does here.
            exact: the result in f64.
        """
        if not got.size:
            return False
        if not _is_inexact(got.dtype):
            own, others = (float((a != exact).mean()) for a in (got, other))
            return own > _ALIKE * others + _CHANGED
        own, others = (float(_distance(a, exact).max()) for a in (got, other))
        return own > _ALIKE * others + self.limit * self.unit


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of an array from the one that was expected.

    Attributes:
        ulps: in units of the last place of the program's narrowest floats, relative to the element and to the
            array's mean magnitude; infinite for other integers, and where only one is NaN or infinite.
        index: of the element that differs most.
        got, expected: that element.
        count: how many elements differ by more than rounding for sure.
        size: how many elements there are.
    """

    ulps: float = 0.0
    index: tuple[int, ...] = ()
    got: Any = None
    expected: Any = None
    count: int = 0
    size: int = 0

    __repr__ = brief

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        amount = "" if math.isinf(self.ulps) else f", {self.ulps:,.0f} ulps"
        return (
            f"got {self.got}, expected {self.expected} at {where or 'the scalar'}{amount}; "
            f"{self.count:,} of {self.size:,} elements differ"
        )


def _floats_in(text: str) -> set[str]:
    return set(re.findall(rf"(?<=[x<])(?:{NARROW_FLOATS})(?=>)", text))


@functools.cache
def _unit_of(element_type: str) -> float:
    return float(jnp.finfo(numpy_dtype(element_type)).eps)


def _distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|got - expected| of each element, relative to it and to the mean magnitude of all."""
    if not _is_inexact(expected.dtype):
        return np.where(got != expected, np.inf, 0.0)
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = got.astype(wide), expected.astype(wide)
    with np.errstate(all="ignore"):
        size = np.abs(b)
        finite = size[np.isfinite(size)]
        most = float(finite.max(initial=0.0))
        mean = most * math.sqrt(float(np.mean((finite / most) ** 2))) if most else 0.0
        relative = np.abs(a - b) / np.maximum(size + mean, np.finfo(np.float64).tiny)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(relative), relative, np.inf))


def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))
