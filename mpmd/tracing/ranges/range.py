"""A range of an array along one dim, and how it is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Range:
    """Indices from `start` to before `stop` along a dim; all of the others."""

    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def along(self, dim: int) -> Range:
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True)
class RangeComputation:
    """How a range of a result is computed.

    Attributes:
        operands: positions of the operands that it reads, each with the range that it reads; None for all.
        compute: the range, from these.
    """

    operands: tuple[tuple[int, Range | None], ...]
    compute: Callable[[Sequence[Any]], Any]


def sliced(value: Any, wanted: Range) -> Any:
    return jax.lax.slice_in_dim(value, wanted.start, wanted.stop, axis=wanted.dim)


def bytes_of(aval: Any) -> int:
    """Bytes of an array; those of a random key are not counted."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
