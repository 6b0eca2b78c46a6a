"""Cases of products."""

from __future__ import annotations

import math

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from tests.support.random_hlo.draft import (
    FLOATS,
    Case,
    Draft,
    values,
)


def dot(draft: Draft) -> Case:
    dtype = draft.pick((*FLOATS, *FLOATS, "s8", "s32", "u8", "c64"))
    rng = draft.rng
    batch, contracting = draft.dims(0, 2), draft.dims(0, 2)
    rows, columns = draft.dims(0, 2), draft.dims(0, 2)
    draft.terms, draft.exact = max(1, math.prod(contracting)), False
    lhs_order, rhs_order = (
        rng.permutation(len(batch + rows + contracting)),
        rng.permutation(len(batch + contracting + columns)),
    )

    def side(
        free: tuple[int, ...], order: np.ndarray
    ) -> tuple[HloInstruction, tuple[int, ...], tuple[int, ...]]:
        sizes = batch + contracting + free
        dims = tuple(sizes[i] for i in order)
        value = draft.parameter(values(rng, dtype, dims), dtype)
        place = [int(np.flatnonzero(order == i)[0]) for i in range(len(batch) + len(contracting))]
        return value, tuple(place[: len(batch)]), tuple(place[len(batch) :])

    a, lhs_batch, lhs_contracting = side(rows, lhs_order)
    b, rhs_batch, rhs_contracting = side(columns, rhs_order)
    dims = attrs.DotDims(lhs_contracting, rhs_contracting, lhs_batch, rhs_batch)
    target = {"s8": "s32", "u8": "u32", "bf16": draft.pick(("bf16", "f32"))}.get(dtype)
    draft.name += f" {dtype}"
    return draft.finish(draft.builder.dot(a, b, dims, target))


def convolution(draft: Draft) -> Case:
    rng, rank = draft.rng, int(draft.rng.integers(0, 3))
    dtype = draft.pick(("f32", "f32", "f16", "bf16", "f64", "s32"))
    features = draft.pick((1, 1, 2, 3))
    batches = draft.pick((1, 1, 2)) if features == 1 else 1
    width, outputs = int(rng.integers(1, 4)), int(rng.integers(1, 3)) * features * batches
    batch = int(rng.integers(1, 3)) * batches
    sides, image, kernel = [], [], []
    for _ in range(rank):
        size, window = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        image.append(size)
        kernel.append(window)
        low, high = (int(v) for v in rng.integers(-1, 3, 2))
        lhs, rhs = int(rng.integers(1, 3)), int(rng.integers(1, 3))
        sides.append(
            attrs.WindowDim(window, int(rng.integers(1, 4)), low, high, lhs, rhs, bool(rng.random() < 0.3))
        )
    orders = [[int(i) for i in rng.permutation(rank + 2)] for _ in range(3)]
    lhs, rhs, out = orders
    spatial = [(tuple(o[2:])) for o in orders]
    dims = attrs.ConvDims(lhs[0], lhs[1], spatial[0], rhs[0], rhs[1], spatial[1], out[0], out[1], spatial[2])
    lhs_dims, rhs_dims = [0] * (rank + 2), [0] * (rank + 2)
    for place, size in zip(lhs, (batch, width * features, *image)):
        lhs_dims[place] = size
    for place, size in zip(rhs, (width, outputs, *kernel)):
        rhs_dims[place] = size
    a = draft.parameter(values(rng, dtype, tuple(lhs_dims)), dtype)
    b = draft.parameter(values(rng, dtype, tuple(rhs_dims)), dtype)
    draft.name += f" {dtype} rank {rank} groups {features} {batches}"
    draft.exact, draft.terms = False, width * math.prod(kernel)
    window = attrs.Window(tuple(sides)) if rank else None
    made = draft.builder.add(
        "convolution",
        a,
        b,
        window=window,
        conv_dims=dims,
        feature_group_count=features,
        batch_group_count=batches,
    )
    return draft.finish(made)


def factorisation(draft: Draft) -> Case:
    dtype, batch, size = (
        draft.pick(("f32", "f64")),
        draft.dims(0, 1, zero=False),
        int(draft.rng.integers(1, 6)),
    )
    draft.exact, draft.terms = False, 200
    a = draft.rng.standard_normal((*batch, size, size))
    square = a @ np.swapaxes(a, -1, -2) + size * np.eye(size)
    kind = draft.pick(("cholesky", "triangular-solve"))
    draft.name += f" {kind} {dtype}"
    value = draft.parameter(square.astype(DTYPES[dtype].numpy), dtype)
    if kind == "cholesky":
        made = draft.builder.add("cholesky", value, lower=True)
        return draft.finish(_lower_half(draft, made))
    left = bool(draft.rng.random() < 0.5)
    columns = int(draft.rng.integers(1, 4))
    dims = (*batch, size, columns) if left else (*batch, columns, size)
    b = draft.parameter(values(draft.rng, dtype, dims), dtype)
    made = draft.builder.add(
        "triangular-solve",
        value,
        b,
        left_side=left,
        lower=bool(draft.rng.random() < 0.5),
        unit_diagonal=False,
        transpose_a=draft.pick(("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT")),
    )
    return draft.finish(made)


def _lower_half(draft: Draft, value: HloInstruction) -> HloInstruction:
    """The other half of a factor is anything."""
    dims, rank = value.shape.dims, value.shape.rank
    rows, columns = (draft.builder.iota("s32", dims, rank - k) for k in (2, 1))
    zero = draft.builder.full(0, value.shape.dtype, dims)
    return draft.builder.select(draft.builder.compare(rows, columns, "GE"), value, zero)


def fourier(draft: Draft) -> Case:
    kind, rank = draft.pick(("FFT", "IFFT", "RFFT", "IRFFT")), int(draft.rng.integers(1, 3))
    length = tuple(int(n) for n in draft.rng.integers(2, 7, rank))
    lead = draft.dims(0, 1, zero=False)
    draft.exact, draft.terms = False, 64
    draft.name += f" {kind}"
    if kind == "RFFT":
        value = draft.parameter(values(draft.rng, "f32", (*lead, *length)), "f32")
    else:
        last = length[-1] // 2 + 1 if kind == "IRFFT" else length[-1]
        value = draft.parameter(values(draft.rng, "c64", (*lead, *length[:-1], last)), "c64")
    return draft.finish(draft.builder.add("fft", value, fft_type=kind, fft_length=length))
