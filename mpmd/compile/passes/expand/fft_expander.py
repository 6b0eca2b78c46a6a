"""hlo-fft-expander."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, PadDim
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder

_COMPLEX = {"f32": "c64", "f64": "c128", "c64": "c64", "c128": "c128"}


class FftExpander(ComputationPass):
    """Computes Fourier transforms by matrix products.

    fft(x: [n]), n = a * b
      -> y = dot(F_a, x as [a, b]); z = y * (powers of the n-th root of one); dot(z, F_b), transposed

    Each length is split into factors of at most `longest`, whose transforms are products with constant
    matrices.  A prime that is longer becomes a convolution with a chirp, done by transforms of a power of
    two.  Real transforms are complex ones of which half is kept, or completed by symmetry.

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no fft is left, except of longer rows than `most`, for which libraries are faster.
    Cost: linear in the number of factors; constants take as much memory as the longest transform's input.
    Source: Cooley and Tukey, "An algorithm for the machine calculation of complex Fourier series", 1965;
        Bluestein, "A linear filtering approach to the computation of the discrete Fourier transform", 1970.

    Attributes:
        longest: length up to which a transform is one product.
        most: length up to which transforms are expanded.
    """

    longest: int = 64
    most: int = 64

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        return Rewriter(computation).run({"fft": (self._expand,)}, lambda i: True)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        (x,), kind = site.operands, str(site.at.attributes["fft_type"])
        lengths = cast(tuple[int, ...], site.at.attributes["fft_length"])
        if 0 in x.shape.dims or 0 in site.shape.dims or max(lengths) > self.most:
            return None
        build, dtype = site.build, _COMPLEX[x.shape.dtype]
        first = x.shape.rank - len(lengths)
        work = _Transforms(build, dtype, self.longest, inverse=kind in ("IFFT", "IRFFT"))
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
        longest: length up to which a transform is one product.
        inverse: the inverse transform, without its factor.
    """

    def __init__(self, build: TrackingBuilder, dtype: str, longest: int, *, inverse: bool) -> None:
        self.build = build
        self.dtype = dtype
        self.longest = longest
        self.inverse = inverse

    def transform(self, value: HloInstruction, d: int) -> HloInstruction:
        """The transform along a dim."""
        dims, build = value.shape.dims, self.build
        order = [*(k for k in range(len(dims)) if k != d), d]
        moved = build.transpose(value, order)
        rows = build.reshape(moved, (math.prod(dims) // dims[d], dims[d]))
        made = build.reshape(self._rows(rows, self.inverse), moved.shape.dims)
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

    def _rows(self, rows: HloInstruction, inverse: bool) -> HloInstruction:
        """The transform of each row of a matrix."""
        n = rows.shape.dims[1]
        if n <= self.longest:
            return self._product(rows, n, inverse)
        a = next((k for k in range(self.longest, 1, -1) if n % k == 0), 0)
        return self._split(rows, a, n // a, inverse) if a else self._chirp(rows, n, inverse)

    def _product(self, rows: HloInstruction, n: int, inverse: bool) -> HloInstruction:
        if n == 1:
            return rows
        matrix = self._constant(_roots(np.outer(np.arange(n), np.arange(n)), n, inverse))
        return self.build.dot(rows, matrix)

    def _split(self, rows: HloInstruction, a: int, b: int, inverse: bool) -> HloInstruction:
        """Element i*b + j of a row goes to k + l*a: a transform over i, a turn by j*k, a transform over j."""
        build, count = self.build, rows.shape.dims[0]
        cube = build.reshape(rows, (count, a, b))
        matrix = self._constant(_roots(np.outer(np.arange(a), np.arange(a)), a, inverse))
        turned = build.dot(cube, matrix, DotDims((1,), (0,)))  # [count, j, k]
        angles = self._constant(_roots(np.outer(np.arange(b), np.arange(a)), a * b, inverse))
        turned = build.add("multiply", turned, build.broadcast(angles, (count, b, a), (1, 2)))
        lines = build.reshape(build.transpose(turned, (0, 2, 1)), (count * a, b))
        made = build.reshape(self._rows(lines, inverse), (count, a, b))  # [count, k, l]
        return build.reshape(build.transpose(made, (0, 2, 1)), (count, a * b))

    def _chirp(self, rows: HloInstruction, n: int, inverse: bool) -> HloInstruction:
        """A prime length, as a convolution: j*k = (j*j + k*k - (k-j)*(k-j)) / 2."""
        build, count = self.build, rows.shape.dims[0]
        size = 1 << (2 * n - 2).bit_length()
        squares = np.arange(n, dtype=np.int64) ** 2 % (2 * n)
        chirp = _roots(squares, 2 * n, inverse)
        filter_ = np.zeros(size, np.complex128)
        filter_[:n] = np.conj(chirp)
        filter_[size - n + 1 :] = np.conj(chirp[1:])[::-1]
        spectrum = self._constant(np.fft.fft(filter_) / size)
        turn = build.broadcast(self._constant(chirp), (count, n), (1,))
        padding = [PadDim(0, 0), PadDim(0, size - n)]
        padded = build.pad(build.add("multiply", rows, turn), self._constant(np.zeros(())), padding)
        product = build.add(
            "multiply", self._rows(padded, False), build.broadcast(spectrum, (count, size), (1,))
        )
        back = build.slice(self._rows(product, True), (0, 0), (count, n))
        return build.add("multiply", back, turn)

    def _constant(self, value: np.ndarray) -> HloInstruction:
        return self.build.constant(np.asarray(value).astype(DTYPES[self.dtype].numpy))


def _roots(powers: np.ndarray, n: int, inverse: bool) -> np.ndarray:
    """Powers of the n-th root of one."""
    turns = (powers % n) * ((2 if inverse else -2) * np.pi / n)
    made: np.ndarray = np.cos(turns) + 1j * np.sin(turns)
    return made
