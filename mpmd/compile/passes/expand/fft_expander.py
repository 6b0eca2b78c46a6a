"""hlo-fft-expander."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder

_COMPLEX = {"f32": "c64", "f64": "c128", "c64": "c64", "c128": "c128"}


class FftExpander(ComputationPass):
    """Computes Fourier transforms by matrix products.

    fft(x: [n])  ->  dot(x, F), F[j, k] = the j*k-th power of the n-th root of one

    Real transforms are complex ones of which half is kept, or completed by symmetry.

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no fft is left, except of longer rows than `most`, for which libraries are faster.
    Cost: linear in the number of dims; the constant of each has the square of its length.
    Source: the definition.

    Attributes:
        most: length up to which transforms are expanded.
    """

    most: int = 64

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"fft": (self._expand,)}, lambda i: True)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        (x,), kind = site.operands, str(site.at.attributes["fft_type"])
        lengths = cast(tuple[int, ...], site.at.attributes["fft_length"])
        if 0 in lengths and 0 not in site.shape.dims:  # sums of nothing
            return site.build.full(0, site.shape.dtype, site.shape.dims)
        if 0 in x.shape.dims or 0 in site.shape.dims or max(lengths) > self.most:
            return None
        build, dtype = site.build, _COMPLEX[x.shape.dtype]
        first = x.shape.rank - len(lengths)
        work = _Transforms(build, dtype, inverse=kind in ("IFFT", "IRFFT"))
        value = build.convert(x, dtype)
        last = x.shape.rank - 1
        for d in range(first, last):
            value = work.transform(value, d)
        if kind == "IRFFT":
            value = work.mirrored(value, lengths[-1])
        value = work.transform(value, last)
        parts = [build.add("real", value), build.add("imag", value)]
        if work.inverse:
            scale = build.full(1 / math.prod(lengths), parts[0].shape.dtype, value.shape.dims)
            parts = [build.add("multiply", part, scale) for part in parts]
        if kind == "IRFFT":
            return parts[0]
        value = build.add("complex", *parts) if work.inverse else value
        kept = site.shape.dims[-1]
        if kept != value.shape.dims[-1]:
            value = build.slice(value, (0,) * value.shape.rank, site.shape.dims)
        return value


class _Transforms:
    """Transforms along dims of arrays.

    Attributes:
        build: where operations go.
        dtype: type of the complex numbers.
        inverse: the inverse transform, without its factor.
    """

    def __init__(self, build: TrackingBuilder, dtype: str, *, inverse: bool) -> None:
        self.build = build
        self.dtype = dtype
        self.inverse = inverse

    def transform(self, value: HloInstruction, d: int) -> HloInstruction:
        """The transform along a dim."""
        dims, build = value.shape.dims, self.build
        order = [*(k for k in range(len(dims)) if k != d), d]
        moved = build.transpose(value, order)
        rows = build.reshape(moved, (math.prod(dims) // dims[d], dims[d]))
        made = build.reshape(self._product(rows), moved.shape.dims)
        return build.transpose(made, [order.index(k) for k in range(len(dims))])

    def mirrored(self, value: HloInstruction, length: int) -> HloInstruction:
        """A full spectrum of real numbers, from half of it: the rest is its conjugate, reversed."""
        build, last = self.build, value.shape.rank - 1
        count = (length + 1) // 2 - 1
        if not count:
            return value
        starts, limits = [0] * last + [1], [*value.shape.dims[:last], 1 + count]
        part = build.add("reverse", build.slice(value, starts, limits), dimensions=(last,))
        real, imaginary = build.add("real", part), build.add("imag", part)
        rest = build.add("complex", real, build.add("negate", imaginary))
        return build.concatenate([value, rest], last)

    def _product(self, rows: HloInstruction) -> HloInstruction:
        """The transform of each row of a matrix: its product with powers of the n-th root of one."""
        n = rows.shape.dims[1]
        if n == 1:
            return rows
        turns = np.outer(np.arange(n), np.arange(n)) % n * ((2 if self.inverse else -2) * np.pi / n)
        matrix = np.cos(turns) + 1j * np.sin(turns)
        return self.build.dot(rows, self.build.constant(matrix.astype(DTYPES[self.dtype].numpy)))
