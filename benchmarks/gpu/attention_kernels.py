"""Causal attention, forward and backward, as Triton kernels.

Arrays are [batch, position, head, head_dim]; `row` and `image` are the strides of position and batch in
elements, and the stride of a head is `HD`.  The forward pass keeps of the scores only the logarithm (base 2)
of each row's sum, [batch, head, position].  The backward pass makes the scores again: one kernel per block of
keys for dK and dV, one per block of queries for dQ, after one that makes delta = rowsum(o · do).  Positions
are a multiple of the blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _place(heads, row, image, HD: tl.constexpr):
    """Where this program's head begins."""
    number = tl.program_id(1)
    return (number // heads).to(tl.int64) * image + (number % heads) * HD


@triton.jit
def _attend(q, top, total, acc, K, V, base, rows, begin, end, row, factor, BN: tl.constexpr, HD: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Takes the keys from `begin` to `end` into a row's maximum, sum and weighted values."""
    dims = tl.arange(0, HD)
    for start in range(begin, end, BN):
        keys = start + tl.arange(0, BN)
        at = base + keys[:, None] * row + dims[None, :]
        scores = tl.dot(q, tl.trans(tl.load(K + at))) * factor
        if MASKED:
            scores = tl.where(rows[:, None] >= keys[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(V + at)
        acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None])
        top = higher
    return top, total, acc


@triton.jit
def attention_forward(Q, K, V, O, L, factor, positions, heads, row, image,
                      BM: tl.constexpr, BN: tl.constexpr, HD: tl.constexpr):  # fmt: skip
    """A block of queries: o, and the base-2 logarithm of the sum of each row; `factor` is scale · log2 e."""
    # The last blocks have the most keys: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    base = _place(heads, row, image, HD)
    rows, dims = block * BM + tl.arange(0, BM), tl.arange(0, HD)
    at = base + rows[:, None] * row + dims[None, :]
    q = tl.load(Q + at)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, HD), tl.float32)
    top, total, acc = _attend(q, top, total, acc, K, V, base, rows, 0, block * BM, row, factor, BN, HD, False)
    top, total, acc = _attend(
        q, top, total, acc, K, V, base, rows, block * BM, (block + 1) * BM, row, factor, BN, HD, True
    )
    tl.store(O + at, (acc / total[:, None]).to(O.dtype.element_ty))
    tl.store(L + tl.program_id(1) * positions + rows, top + tl.log2(total))


@triton.jit
def attention_delta(O, DO, Delta, positions, heads, row, image, BM: tl.constexpr, HD: tl.constexpr):
    """Delta = rowsum(o · do)."""
    base = _place(heads, row, image, HD)
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, HD)
    at = base + rows[:, None] * row + dims[None, :]
    product = tl.load(O + at).to(tl.float32) * tl.load(DO + at).to(tl.float32)
    tl.store(Delta + tl.program_id(1) * positions + rows, tl.sum(product, 1))


@triton.jit
def _gather(k, v, dk, dv, Q, DO, L, Delta, base, sums, keys, begin, end, row, factor, scale,
            BM: tl.constexpr, HD: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Adds the contributions of queries `begin` to `end` to dk and dv."""
    dims = tl.arange(0, HD)
    for start in range(begin, end, BM):
        rows = start + tl.arange(0, BM)
        at = base + rows[:, None] * row + dims[None, :]
        q, do = tl.load(Q + at), tl.load(DO + at)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * factor - tl.load(L + sums + rows)[None, :])
        if MASKED:
            weights = tl.where(rows[None, :] >= keys[:, None], weights, 0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv)
        change = weights * (tl.dot(v, tl.trans(do)) - tl.load(Delta + sums + rows)[None, :]) * scale
        dk = tl.dot(change.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def attention_dk_dv(Q, K, V, DO, L, Delta, DK, DV, factor, scale, positions, heads, row, image,
                    BM: tl.constexpr, BN: tl.constexpr, HD: tl.constexpr):  # fmt: skip
    """A block of keys: dK and dV from all queries at or after it; BN is a multiple of BM."""
    block = tl.program_id(0)
    base = _place(heads, row, image, HD)
    keys, dims = block * BN + tl.arange(0, BN), tl.arange(0, HD)
    sums = tl.program_id(1) * positions
    at = base + keys[:, None] * row + dims[None, :]
    k, v = tl.load(K + at), tl.load(V + at)
    dk, dv = tl.zeros((BN, HD), tl.float32), tl.zeros((BN, HD), tl.float32)
    after = (block + 1) * BN
    dk, dv = _gather(
        k, v, dk, dv, Q, DO, L, Delta, base, sums, keys, block * BN, after, row, factor, scale, BM, HD, True
    )
    dk, dv = _gather(
        k, v, dk, dv, Q, DO, L, Delta, base, sums, keys, after, positions, row, factor, scale, BM, HD, False
    )
    tl.store(DK + at, dk.to(DK.dtype.element_ty))
    tl.store(DV + at, dv.to(DV.dtype.element_ty))


@triton.jit
def _scatter(q, do, sums, delta, dq, K, V, base, rows, begin, end, row, factor, scale,
             BN: tl.constexpr, HD: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Adds to dq what the keys from `begin` to `end` give."""
    dims = tl.arange(0, HD)
    for start in range(begin, end, BN):
        keys = start + tl.arange(0, BN)
        at = base + keys[:, None] * row + dims[None, :]
        k, v = tl.load(K + at), tl.load(V + at)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * factor - sums[:, None])
        if MASKED:
            weights = tl.where(rows[:, None] >= keys[None, :], weights, 0.0)
        change = weights * (tl.dot(do, tl.trans(v)) - delta[:, None]) * scale
        dq = tl.dot(change.to(k.dtype), k, dq)
    return dq


@triton.jit
def attention_dq(Q, K, V, DO, L, Delta, DQ, factor, scale, positions, heads, row, image,
                 BM: tl.constexpr, BN: tl.constexpr, HD: tl.constexpr):  # fmt: skip
    """A block of queries: dQ from all keys at or before it; BM is a multiple of BN."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    base = _place(heads, row, image, HD)
    rows, dims = block * BM + tl.arange(0, BM), tl.arange(0, HD)
    at = base + rows[:, None] * row + dims[None, :]
    q, do = tl.load(Q + at), tl.load(DO + at)
    where = tl.program_id(1) * positions + rows
    sums, delta = tl.load(L + where), tl.load(Delta + where)
    dq = tl.zeros((BM, HD), tl.float32)
    begin, end = block * BM, (block + 1) * BM
    dq = _scatter(q, do, sums, delta, dq, K, V, base, rows, 0, begin, row, factor, scale, BN, HD, False)
    dq = _scatter(q, do, sums, delta, dq, K, V, base, rows, begin, end, row, factor, scale, BN, HD, True)
    tl.store(DQ + at, dq.to(DQ.dtype.element_ty))
