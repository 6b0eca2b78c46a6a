"""Slices: of constants, concatenates, pads, sums of pads, slices and updated buffers."""

from __future__ import annotations

import bisect
import dataclasses

from mpmd import ir
from mpmd.passes.cleanup.stablehlo_arithmetic import Facts, array, make, numbers, reshaped
from mpmd.passes.structure import splat


@dataclasses.dataclass(frozen=True)
class _Range:
    """The range of a slice: per dim its start, its end (exclusive) and its step."""

    starts: list[int]
    limits: list[int]
    strides: list[int]

    @staticmethod
    def of(op: ir.Op) -> _Range:
        return _Range(*(numbers(op.attributes[n]) for n in ("start_indices", "limit_indices", "strides")))

    def moved(self, by: list[int]) -> _Range:
        """The range of the same elements in a tensor that begins `by` later."""
        starts = [a - b for a, b in zip(self.starts, by)]
        return _Range(starts, [a - b for a, b in zip(self.limits, by)], self.strides)

    def last(self, dim: int) -> int:
        count = -(-(self.limits[dim] - self.starts[dim]) // self.strides[dim])
        return self.starts[dim] + (count - 1) * self.strides[dim]


def static_slice(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`dynamic_slice` at constant indices -> `slice`; of all of a value -> the value.

    Indices are clamped, as the op's semantics require.
    """
    if op.operands[0].type == op.results[0].type:
        return op.operands[0]
    starts = facts.integers(list(op.operands)[1:])
    if starts is None:
        return None
    value, sizes = op.operands[0], numbers(op.attributes["slice_sizes"])
    starts = clamped(starts, value.type.shape, sizes)
    taken = _Range(starts, [a + b for a, b in zip(starts, sizes)], [1] * len(sizes))
    return _slice(value, taken, op)


def clamped(starts: list[int], shape: list[int], sizes: list[int]) -> list[int]:
    """Where a piece of some sizes begins, which must end within a shape."""
    return [min(max(start, 0), whole - size) for start, whole, size in zip(starts, shape, sizes)]


def _slice(value: ir.Value, taken: _Range, op: ir.Op) -> ir.Value:
    """A slice with the type of an op's result; `value` itself if that is all of it."""
    kind = op.results[0].type
    if value.type == kind:
        return value
    attributes = {
        "start_indices": array(taken.starts),
        "limit_indices": array(taken.limits),
        "strides": array(taken.strides),
    }
    return make("stablehlo.slice", [value], kind, op, attributes)


def simpler_slice(op: ir.Op, facts: Facts) -> ir.Value | None:
    """A slice of a value with pieces -> a slice of the piece; all of a value -> the value."""
    value = op.operands[0]
    if value.type == op.results[0].type:
        return value
    if 0 in op.results[0].type.shape:
        return None
    taken = _Range.of(op)
    while True:
        source = ir.producer(value)
        inner = None if source is None else _look_through(source, taken, facts)
        if inner is None:
            break
        value, taken = inner
    if value != op.operands[0]:
        return _slice(value, taken, op)
    return _slice_of_splat(op, facts)


def _look_through(source: ir.Op, taken: _Range, facts: Facts) -> tuple[ir.Value, _Range] | None:
    """The source value of a range of an op's result, and the range there."""
    name = source.operation.name
    if name == "stablehlo.slice":
        inner = _Range.of(source)
        starts = [a + b * s for a, b, s in zip(inner.starts, taken.starts, inner.strides)]
        strides = [a * b for a, b in zip(inner.strides, taken.strides)]
        limits = [a + taken.last(d) * s + 1 for d, (a, s) in enumerate(zip(inner.starts, inner.strides))]
        return source.operands[0], _Range(starts, limits, strides)
    if name == "stablehlo.concatenate":
        return _piece(source, taken, facts)
    if name == "stablehlo.dynamic_update_slice":
        return _updated(source, taken, facts)
    if name == "stablehlo.pad":
        return _unpadded(source, taken)
    if name == "stablehlo.add":
        left, right = source.operands
        if _is_zero_padding(right, taken, facts):
            return left, taken
        if _is_zero_padding(left, taken, facts):
            return right, taken
    return None


def _unpadded(source: ir.Op, taken: _Range) -> tuple[ir.Value, _Range] | None:
    """The operand of a pad that contains a whole range; only without interior padding."""
    if any(numbers(source.attributes["interior_padding"])):
        return None
    low, sizes = numbers(source.attributes["edge_padding_low"]), source.operands[0].type.shape
    moved = taken.moved(low)
    dims = range(len(low))
    if any(moved.starts[d] < 0 or moved.last(d) >= sizes[d] for d in dims):
        return None
    return source.operands[0], _Range(moved.starts, [moved.last(d) + 1 for d in dims], moved.strides)


def _is_zero_padding(value: ir.Value, taken: _Range, facts: Facts) -> bool:
    """Whether a range of a value is nothing but zeros that pads put around other elements.

    The gradient of `concatenate` consists of slices of such a sum: one pad for each slice.
    """
    source = ir.producer(value)
    if source is None:
        return False
    if source.operation.name == "stablehlo.add":
        return all(_is_zero_padding(operand, taken, facts) for operand in source.operands)
    if source.operation.name != "stablehlo.pad" or facts.number(source.operands[1]) != 0:
        return False
    low, sizes = numbers(source.attributes["edge_padding_low"]), source.operands[0].type.shape
    inside = [1 + i for i in numbers(source.attributes["interior_padding"])]
    ends = [a + (size - 1) * step for a, size, step in zip(low, sizes, inside)]
    return any(taken.last(d) < low[d] or taken.starts[d] > ends[d] for d in range(len(low)))


def _piece(source: ir.Op, taken: _Range, facts: Facts) -> tuple[ir.Value, _Range] | None:
    """The operand of a concatenate that holds a whole range."""
    dim, offsets = int(source.dimension.value), facts.offsets(source)
    index = bisect.bisect_right(offsets, taken.starts[dim]) - 1
    if index >= len(source.operands) or taken.last(dim) >= offsets[index + 1]:
        return None
    by = [0] * len(taken.starts)
    by[dim] = offsets[index]
    moved = taken.moved(by)
    moved.limits[dim] = moved.last(dim) + 1
    return source.operands[index], moved


def _updated(source: ir.Op, taken: _Range, facts: Facts) -> tuple[ir.Value, _Range] | None:
    """The update, or the buffer before it, of an update at constant indices that a range is all of."""
    starts = facts.integers(list(source.operands)[2:])
    if starts is None:
        return None
    buffer, update = source.operands[0], source.operands[1]
    sizes = list(update.type.shape)
    starts = clamped(starts, buffer.type.shape, sizes)
    ends = [a + b for a, b in zip(starts, sizes)]
    dims = range(len(starts))
    if any(taken.last(d) < starts[d] or taken.starts[d] >= ends[d] for d in dims):
        return buffer, taken
    if all(taken.starts[d] >= starts[d] and taken.last(d) < ends[d] for d in dims):
        moved = taken.moved(starts)
        limits = [moved.last(d) + 1 for d in dims]
        return update, _Range(moved.starts, limits, moved.strides)
    return None


def _slice_of_splat(op: ir.Op, facts: Facts) -> ir.Value | None:
    """A slice of one number, repeated -> that number, repeated less often."""
    source = ir.producer(op.operands[0])
    number = facts.splat(op.operands[0])
    if source is None or number is None:
        return None
    kind = op.results[0].type
    if source.operation.name == "stablehlo.broadcast_in_dim":
        return make(
            "stablehlo.broadcast_in_dim", [source.operands[0]], kind, op, {"broadcast_dimensions": array([])}
        )
    return splat(number, kind, op)


def update_all(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`dynamic_update_slice` of a whole buffer -> the update."""
    buffer, update = op.operands[0], op.operands[1]
    return update if buffer.type == update.type else None


def concatenate_updates(op: ir.Op, facts: Facts) -> ir.Value | None:
    """The last of a chain of updates, at constant indices, that cover a buffer along one dim -> concatenate.

    update (update (update b x0 at 0) x1 at 1) x2 at 2  -->  concatenate x0, x1, x2
    """
    if any(_continues(use.owner, use.operand_number) for use in op.results[0].uses):
        return None
    whole = list(op.results[0].type.shape)
    pieces: dict[int, ir.Value] = {}
    covered, dim = 0, None
    link: ir.Op | None = op
    while link is not None and covered < (whole[dim] if dim is not None else 1):
        if not _continues(link, 0):
            return None
        starts = facts.integers(list(link.operands)[2:])
        update = link.operands[1]
        sizes = list(update.type.shape)
        partial = [d for d in range(len(whole)) if sizes[d] != whole[d]]
        if starts is None or len(partial) != 1 or dim not in (None, partial[0]):
            return None
        dim = partial[0]
        start = clamped(starts, whole, sizes)[dim]
        fits = _fits(start, sizes[dim], pieces, dim)
        if fits is None:
            return None
        if fits:
            pieces[start] = update
            covered += sizes[dim]
        link = ir.producer(link.operands[0])
    if dim is None or covered != whole[dim]:
        return None
    ordered = [pieces[start] for start in sorted(pieces)]
    attributes = {"dimension": ir.Attribute.parse(f"{dim} : i64", ir.context())}
    return make("stablehlo.concatenate", ordered, op.results[0].type, op, attributes)


def _continues(op: ir.Op, operand: int) -> bool:
    """Whether an op updates what it gets as an operand."""
    return operand == 0 and op.operation.name == "stablehlo.dynamic_update_slice"


def _fits(start: int, size: int, pieces: dict[int, ir.Value], dim: int) -> bool | None:
    """How much of an earlier piece later ones leave: all; nothing (False); a part (None)."""
    if start in pieces and pieces[start].type.shape[dim] == size:
        return False
    for other, value in pieces.items():
        if other < start + size and start < other + value.type.shape[dim]:
            return None
    return True


def flatten_concatenate(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`concatenate x` -> `x`; `concatenate (concatenate a b) c` along one dim -> `concatenate a b c`."""
    if len(op.operands) == 1:
        return op.operands[0]
    operands: list[ir.Value] = []
    for value in op.operands:
        source = ir.producer(value)
        is_nested = (
            source is not None
            and source.operation.name == "stablehlo.concatenate"
            and source.dimension == op.dimension
            and len(ir.users(value)) == 1
        )
        operands += list(source.operands) if source is not None and is_nested else [value]
    if len(operands) == len(op.operands):
        return None
    attributes = {"dimension": op.attributes["dimension"]}
    return make("stablehlo.concatenate", operands, op.results[0].type, op, attributes)


def reshape_of_splat(op: ir.Op, facts: Facts) -> ir.Value | None:
    """A reshape of one number, repeated -> that number, repeated in another shape."""
    source = ir.producer(op.operands[0])
    if (
        source is None
        or source.operation.name != "stablehlo.broadcast_in_dim"
        or source.operands[0].type.rank
    ):
        return None
    kind = op.results[0].type
    if not kind.rank:
        return reshaped(source.operands[0], kind, op)
    return make(
        "stablehlo.broadcast_in_dim", [source.operands[0]], kind, op, {"broadcast_dimensions": array([])}
    )
