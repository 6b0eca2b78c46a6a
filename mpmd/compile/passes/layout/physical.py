"""Layouts in memory: layouts after data movement, reshapes that move nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.shape import Shape, array
from mpmd.compile.passes.rewriter import inverse


def physical(shape: Shape) -> Shape:
    """The row-major array with this one's dims from the outermost in memory inwards."""
    return array(shape.dtype, shape.physical_dims)


def order_of(shape: Shape) -> Ints:
    return tuple(reversed(shape.minor_to_major))


def transposed_layout(layout: Layout, permutation: Sequence[int]) -> Layout:
    """The layout of a transpose that moves nothing, from its operand's."""
    to = inverse(tuple(permutation))
    return Layout(tuple(to[d] for d in layout.minor_to_major))


def kept_layout(layout: Layout, dropped: Sequence[int]) -> Layout:
    """The layout without some dims."""
    rank = len(layout.minor_to_major)
    place = {d: i for i, d in enumerate(d for d in range(rank) if d not in dropped)}
    return Layout(tuple(place[d] for d in layout.minor_to_major if d in place))


def is_bitcast(source: Shape, target: Shape) -> bool:
    """True if a reshape from one shape to the other moves nothing in memory."""
    if source.dtype != target.dtype or source.size != target.size:
        return False
    if 0 in source.dims:
        return True
    groups = common_groups(source.dims, target.dims)
    return _group_order(source, [g[0] for g in groups]) == _group_order(target, [g[1] for g in groups]) != ()


def common_groups(a: Ints, b: Ints) -> list[tuple[Ints, Ints]]:
    """The finest runs of dims of `a` and `b` that hold the same elements; dims of size 1 are in none."""
    left = [d for d, n in enumerate(a) if n != 1]
    right = [d for d, n in enumerate(b) if n != 1]
    groups: list[tuple[Ints, Ints]] = []
    i = j = 0
    while i < len(left):
        mine, theirs = [left[i]], [right[j]]
        i, j = i + 1, j + 1
        while math.prod(a[d] for d in mine) != math.prod(b[d] for d in theirs):
            if math.prod(a[d] for d in mine) < math.prod(b[d] for d in theirs):
                mine.append(left[i])
                i += 1
            else:
                theirs.append(right[j])
                j += 1
        groups.append((tuple(mine), tuple(theirs)))
    return groups


def _group_order(shape: Shape, groups: Sequence[Ints]) -> Ints:
    """Groups from the outermost in memory inwards, after a -1; () if the dims of one are not in order."""
    number = {d: g for g, dims in enumerate(groups) for d in dims}
    order = [d for d in order_of(shape) if d in number]
    ascending, position = [-1], 0
    while position < len(order):
        group = number[order[position]]
        dims = groups[group]
        if tuple(order[position : position + len(dims)]) != dims:
            return ()
        ascending.append(group)
        position += len(dims)
    return tuple(ascending)
