"""Semantics of products: dot, convolution, factorisations, Fourier transforms.

Products of floats are summed in f64 and rounded once: the value that any faster order of summation
approximates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, Window
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, exact, narrow
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning


def _accumulator(array: Array, dtype: str, target: str) -> Array:
    """Factors in the type of the sums: f64, c128, or 64-bit integers that wrap."""
    if DTYPES[dtype].kind in ("float", "complex"):
        return (
            exact(array, dtype).astype(np.complex128)
            if DTYPES[target].kind == "complex"
            else exact(array, dtype)
        )
    wide = np.uint64 if DTYPES[dtype].kind == "unsigned" else np.int64
    return array.astype(wide)


def _finish(array: Array, dtype: str) -> Array:
    return np.asarray(array != 0) if dtype == "pred" else narrow(array, dtype)


def contract(a: Array, b: Array, dims: DotDims) -> Array:
    """The product in the factors' own type: batch dims, free dims of `a`, free dims of `b`."""
    lhs_free, rhs_free = dims.lhs_free(a.ndim), dims.rhs_free(b.ndim)
    batch = [a.shape[d] for d in dims.lhs_batch]
    rows, columns = [a.shape[d] for d in lhs_free], [b.shape[d] for d in rhs_free]
    depth = math.prod(a.shape[d] for d in dims.lhs_contracting)
    left = a.transpose((*dims.lhs_batch, *lhs_free, *dims.lhs_contracting))
    right = b.transpose((*dims.rhs_batch, *dims.rhs_contracting, *rhs_free))
    left = left.reshape(math.prod(batch), math.prod(rows), depth)
    right = right.reshape(math.prod(batch), depth, math.prod(columns))
    return np.matmul(left, right).reshape((*batch, *rows, *columns))


def _dot(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    types = [o.shape.dtype for o in instruction.operands]
    if len(operands) != 2:
        raise HloError(f"{instruction.name}: sparse dots are not supported")
    target = instruction.shape.dtype
    a, b = (_accumulator(v, t, target) for v, t in zip(operands, types))
    return _finish(contract(a, b, instruction.dot_dims), target)


# -- convolution ------------------------------------------------------------------------------------


def _spread(image: Array, axis: int, dilation: int, low: int, high: int) -> Array:
    """Zeros between neighbours and around, along one axis; negative padding removes elements."""
    size = image.shape[axis]
    wide = (size - 1) * dilation + 1 if size else 0
    length = wide + low + high
    made = np.zeros((*image.shape[:axis], max(length, 0), *image.shape[axis + 1 :]), image.dtype)
    places = low + np.arange(size) * dilation
    kept = np.flatnonzero((places >= 0) & (places < length))
    lead: tuple[Any, ...] = (slice(None),) * axis
    made[(*lead, places[kept])] = image[(*lead, kept)]
    return made


def _convolution(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    dims, window = instruction.conv_dims, instruction.window
    target = instruction.shape.dtype
    features = cast(int, instruction.attributes.get("feature_group_count", 1))
    batches = cast(int, instruction.attributes.get("batch_group_count", 1))
    types = [o.shape.dtype for o in instruction.operands]
    image, kernel = (_accumulator(v, t, target) for v, t in zip(operands, types))
    image = image.transpose((dims.lhs_batch, dims.lhs_feature, *dims.lhs_spatial))
    kernel = kernel.transpose((dims.rhs_output_feature, dims.rhs_input_feature, *dims.rhs_spatial))
    out_spatial = tuple(instruction.shape.dims[d] for d in dims.out_spatial)
    for axis, side in enumerate(window.dims, 2):
        image = _spread(image, axis, side.lhs_dilation, side.pad_low, side.pad_high)
        if side.reversed:
            kernel = np.flip(kernel, axis)
    batch, outputs = image.shape[0] // batches, kernel.shape[0]
    groups = features * batches
    made = np.zeros((batch, outputs, *out_spatial), image.dtype)
    width, share = kernel.shape[1], outputs // groups
    for group in range(groups):
        lines = slice(group * batch, (group + 1) * batch) if batches > 1 else slice(None)
        inputs = slice(group * width, (group + 1) * width) if features > 1 else slice(None)
        part = kernel[group * share : (group + 1) * share]
        made[:, group * share : (group + 1) * share] = _correlate(
            image[lines, inputs], part, window, out_spatial
        )
    order = [0] * made.ndim
    for place, d in enumerate((dims.out_batch, dims.out_feature, *dims.out_spatial)):
        order[d] = place
    return _finish(made.transpose(order), target)


def _correlate(image: Array, kernel: Array, window: Window, out_spatial: tuple[int, ...]) -> Array:
    """`[b, i, spatial] x [o, i, window] → [b, o, positions]`, one window element at a time."""
    sides = window.dims
    made = np.zeros((image.shape[0], kernel.shape[0], *out_spatial), image.dtype)
    for offset in np.ndindex(*kernel.shape[2:]):
        picks: list[slice] = []
        for at, side, count in zip(offset, sides, out_spatial):
            begin = at * side.rhs_dilation
            picks.append(
                slice(begin, begin + (count - 1) * side.stride + 1, side.stride) if count else slice(0, 0)
            )
        part: Array = image[(slice(None), slice(None), *picks)]
        made += np.einsum("bi...,oi->bo...", part, kernel[(slice(None), slice(None), *offset)])
    return made


# -- factorisations and transforms ------------------------------------------------------------------


def _cholesky(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """`L L^H = a` from the lower half, or `U^H U = a` from the upper; NaN unless `a` is positive definite."""
    dtype = instruction.shape.dtype
    a = exact(operands[0], dtype)
    upper = not instruction.attributes.get("lower", False)
    if upper:
        a = np.conj(np.swapaxes(a, -1, -2))
    low = np.tril(a)
    full = low + np.conj(np.swapaxes(np.tril(a, -1), -1, -2))
    made = np.empty_like(full)
    for index in np.ndindex(*full.shape[:-2]):
        try:
            made[index] = np.linalg.cholesky(full[index])
        except np.linalg.LinAlgError:
            made[index] = np.tril(np.full(full.shape[-2:], np.nan))
    return narrow(np.conj(np.swapaxes(made, -1, -2)) if upper else made, dtype)


def _triangular_solve(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """`op(a) x = b` or `x op(a) = b`, by substitution."""
    dtype, attributes = instruction.shape.dtype, instruction.attributes
    a, b = (exact(v, dtype) for v in operands)
    lower, mode = bool(attributes.get("lower", False)), attributes.get("transpose_a", "NO_TRANSPOSE")
    if mode != "NO_TRANSPOSE":
        a, lower = np.swapaxes(a, -1, -2), not lower
        a = np.conj(a) if mode == "ADJOINT" else a
    left = bool(attributes.get("left_side", False))
    if not left:
        a, b, lower = np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2), not lower
    size = a.shape[-1]
    x = np.zeros_like(b)
    for row in range(size) if lower else reversed(range(size)):
        known = slice(0, row) if lower else slice(row + 1, size)
        rest = b[..., row, :] - np.einsum("...k,...kn->...n", a[..., row, known], x[..., known, :])
        x[..., row, :] = rest if attributes.get("unit_diagonal", False) else rest / a[..., row, row, None]
    return narrow(x if left else np.swapaxes(x, -1, -2), dtype)


_TRANSFORMS: dict[str, Callable[..., Array]] = {
    "FFT": np.fft.fftn,
    "IFFT": np.fft.ifftn,
    "RFFT": np.fft.rfftn,
    "IRFFT": np.fft.irfftn,
}


def _fft(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    kind, length = (
        instruction.attributes["fft_type"],
        cast(tuple[int, ...], instruction.attributes["fft_length"]),
    )
    axes = tuple(range(-len(length), 0))
    value = exact(operands[0], instruction.operands[0].shape.dtype)
    if 0 in value.shape or 0 in length:
        return np.zeros(instruction.shape.dims, instruction.shape.numpy_dtype)
    made = _TRANSFORMS[cast(str, kind)](value, s=length, axes=axes)
    return made.astype(instruction.shape.numpy_dtype)


RULES: dict[str, Rule] = {
    "cholesky": _cholesky,
    "convolution": _convolution,
    "dot": _dot,
    "fft": _fft,
    "triangular-solve": _triangular_solve,
}
