"""hlo-fft-expander."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import Array
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder

_QUARTERS = np.array([1, 1j, -1, -1j])


class FftExpander(ComputationPass):
    """Computes Fourier transforms by sums.

    fft(x: [n])  ->  y[k] = sum over j of x[j] times the j*k-th power of the n-th root of one

    Real parts and imaginary parts are sums of their own, and only those that the result has.  Quarter turns
    are exact, and products by 0 are left out: the imaginary part of a real number's sum is 0, also
    beside infinities.

    Requires: no schedule; complex numbers are split into pairs afterwards.
    Ensures: no fft is left, except of longer rows than `most`, for which libraries are faster.
    Cost: linear in the number of dims; the constant of each has the square of its length.
    Source: the definition.

    Attributes:
        most: length up to which transforms are expanded.
    """

    most: int = 64

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"fft": (self._expand,)}, lambda i: True)

    def _expand(self, site: RewriteSite) -> HloInstruction | None:
        (x,), kind = site.operands, str(site.at.attributes["fft_type"])
        lengths = cast(tuple[int, ...], site.at.attributes["fft_length"])
        if 0 in lengths and 0 not in site.shape.dims:  # sums of nothing
            return site.build.full(0, site.shape.dtype, site.shape.dims)
        if 0 in x.shape.dims or 0 in site.shape.dims or max(lengths) > self.most:
            return None
        build, inverse, last = site.build, kind in ("IFFT", "IRFFT"), x.shape.rank - 1
        parts = [x] if kind == "RFFT" else [build.add("real", x), build.add("imag", x)]
        transforms = [(x.shape.rank - len(lengths) + k, n) for k, n in enumerate(lengths)]
        for d, n in reversed(transforms) if kind == "RFFT" else transforms:  # of real numbers first, or last
            is_half = kind == "IRFFT" and d == last
            roots = _roots(n, parts[0].shape.dims[d], site.shape.dims[d], inverse=inverse, is_half=is_half)
            parts = _transformed(build, parts, d, roots, is_real=is_half)
        if inverse:
            scale = build.full(1 / math.prod(lengths), parts[0].shape.dtype, parts[0].shape.dims)
            parts = [build.add("multiply", part, scale) for part in parts]
        return build.add("complex", *parts) if len(parts) == 2 else parts[0]


def _roots(n: int, rows: int, columns: int, *, inverse: bool, is_half: bool) -> Array:
    """Powers of the n-th root of one, `[row, column]`; of half a spectrum, each counts for its conjugate."""
    power = np.outer(np.arange(rows), np.arange(columns)) % n
    quarter, rest = np.divmod(4 * power, n)
    roots = np.where(rest == 0, _QUARTERS[quarter], np.exp(2j * np.pi / n * power))
    if is_half:
        roots[1 : (n + 1) // 2] *= 2
    return roots if inverse else np.conj(roots)


def _transformed(
    build: TrackingBuilder, parts: Sequence[HloInstruction], d: int, roots: Array, *, is_real: bool
) -> list[HloInstruction]:
    """The real and the imaginary part of a transform along a dim; the real part alone if that is all."""
    dims = parts[0].shape.dims
    order = [*(k for k in range(len(dims)) if k != d), d]
    moved = [build.transpose(part, order) for part in parts]
    sums = [_sums(build, moved, (roots.real, -roots.imag))]
    if not is_real:
        sums.append(_sums(build, moved, (roots.imag, roots.real)))
    return [build.transpose(s, [order.index(k) for k in range(len(dims))]) for s in sums]


def _sums(
    build: TrackingBuilder, parts: Sequence[HloInstruction], factors: Sequence[Array]
) -> HloInstruction:
    """The sums of rows: of each part times a column of its factors; nothing where a factor is 0."""
    dims, dtype = parts[0].shape.dims, parts[0].shape.dtype
    last = len(dims) - 1
    wide = (*dims, factors[0].shape[1])
    terms = []
    for part, factor in zip(parts, factors):
        table = build.constant(factor.astype(part.shape.numpy_dtype))
        term = build.add(
            "multiply",
            build.broadcast(part, wide, range(last + 1)),
            build.broadcast(table, wide, (last, last + 1)),
        )
        if not factor.all():
            counts = build.broadcast(build.constant(factor != 0), wide, (last, last + 1))
            term = build.select(counts, term, build.full(0, dtype, wide))
        terms.append(term)
    total = terms[0] if len(terms) == 1 else build.add("add", *terms)
    add = scalar_computation(build.computation.module, "add", dtype)
    return build.reduce([total], [build.constant(0, dtype)], (last,), add)
