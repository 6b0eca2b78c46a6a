"""Index operands of gathers and scatters as a list of vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import TrackingBuilder


def batch_dims(indices: HloInstruction, vector_dim: int) -> Ints:
    """Sizes of the dims that count the vectors."""
    return tuple(n for d, n in enumerate(indices.shape.dims) if d != vector_dim)


def as_list(
    build: TrackingBuilder, indices: HloInstruction, vector_dim: int, batching: Sequence[int], sizes: Ints
) -> HloInstruction:
    """The vectors as `[count, length]`; the positions along batching dims follow as further elements.

    Args:
        build: the builder.
        indices: the index operand.
        vector_dim: the dim of the vectors, or the rank if vectors are single numbers.
        batching: dims of the indices that are dims of the operand too.
        sizes: dims of the operand, all of which the elements must be able to count.
    """
    indices = _wide_enough(build, indices, sizes) if batching else indices
    rank = indices.shape.rank
    batch = batch_dims(indices, vector_dim)
    if vector_dim == rank:
        vectors = build.reshape(indices, (*batch, 1))
    else:
        order = [d for d in range(rank) if d != vector_dim]
        vectors = build.transpose(indices, (*order, vector_dim))
    parts = [vectors]
    for dim in batching:
        axis = dim - (dim > vector_dim)
        parts.append(build.iota(indices.shape.dtype, (*batch, 1), axis))
    joined = build.concatenate(parts, len(batch))
    return build.reshape(joined, (math.prod(batch), joined.shape.dims[-1]))


def _wide_enough(build: TrackingBuilder, indices: HloInstruction, sizes: Ints) -> HloInstruction:
    info = DTYPES[indices.shape.dtype]
    largest = max(sizes, default=0)
    if largest < 1 << (info.bits - (info.kind == "signed")):
        return indices
    return build.convert(indices, "s32" if info.bits < 32 and largest < 1 << 31 else "s64")
