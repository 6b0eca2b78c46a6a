"""Shapes of reductions, windowed reductions and sorts."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.shape_inference.rule import (
    Query,
    Rule,
    check,
    check_dims,
    check_reducer,
    check_window,
    logical,
    same,
)


def _one_or_tuple(shapes: Sequence[Shape]) -> Shape:
    return shapes[0] if len(shapes) == 1 else tuple_of(shapes)


def _as_reducer(query: Query, shapes: Sequence[Shape]) -> Shape:
    """A tuple where the reducer gives one, be it of one value."""
    return tuple_of(shapes) if query.called[0].root.shape.is_tuple else _one_or_tuple(shapes)


def _values(query: Query) -> tuple[Shape, ...]:
    """The arrays, whose initial values follow; all of the same dims."""
    count = len(query.operands) // 2
    check(
        len(query.operands) == 2 * count,
        f"{query.opcode} takes values and as many initial values, got {len(query.operands)}",
    )
    first = query.array(0)
    for index in range(count):
        value, init = query.array(index), query.array(count + index)
        check(
            value.dims == first.dims,
            f"values of {query.opcode} must have equal dims, got {first} and {value}",
        )
        fits = init.is_scalar and init.dtype == value.dtype
        check(fits, f"initial value {index} of {query.opcode} must be {value.dtype}[], got {init}")
    return query.operands[:count]


def reduce(query: Query) -> Shape:
    """The dims that are not reduced."""
    values = _values(query)
    dims = query.attribute("dimensions")
    check_dims(query, "dimensions", dims, values[0].rank)
    check_reducer(query, query.called[0], values)
    kept = [size for d, size in enumerate(values[0].dims) if d not in dims]
    types = [p.shape.dtype for p in query.called[0].parameters[: len(values)]]
    return _as_reducer(query, [logical(dtype, kept) for dtype in types])


def reduce_window(query: Query) -> Shape:
    values = _values(query)
    window = check_window(query, values[0].rank, values[0])
    check_reducer(query, query.called[0], values)
    dims = [side.positions(size) for side, size in zip(window.dims, values[0].dims)]
    return _as_reducer(query, [logical(value.dtype, dims) for value in values])


def select_and_scatter(query: Query) -> Shape:
    value, source, init = (query.array(i) for i in range(3))
    window = check_window(query, value.rank, value)
    dims = tuple(side.positions(size) for side, size in zip(window.dims, value.dims))
    check(source.dims == dims, f"the source of select-and-scatter must have dims {dims}, got {source}")
    check(init.is_scalar, f"the initial value of select-and-scatter must be a scalar, got {init}")
    return value


def sort(query: Query) -> Shape:
    """The operands' shapes: one array, or a tuple."""
    first = query.array(0)
    dims = query.attribute("dimensions")
    check(len(dims) == 1, f"sort takes one dim, got {dims}")
    check_dims(query, "dimensions", dims, first.rank)
    for index in range(len(query.operands)):
        value = query.array(index)
        check(value.dims == first.dims, f"operands of sort must have equal dims, got {first} and {value}")
    (comparator,) = query.called
    parameters = [p.shape.logical for p in comparator.parameters]
    expected = [value.scalar() for value in query.operands for _ in range(2)]
    check(
        parameters == expected and comparator.root.shape.logical is logical("pred", ()),
        f"the comparator of sort must be {tuple(expected)} -> pred[], got {comparator.signature()}",
    )
    return _one_or_tuple(query.operands)


def topk(query: Query) -> Shape:
    """The k best values of the last dim and their positions (s32)."""
    value, k = query.array(0), query.attribute("k")
    check(value.rank >= 1 and 0 <= k <= value.dims[-1], f"topk cannot take {k} of {value}")
    dims = (*value.dims[:-1], k)
    return tuple_of([logical(value.dtype, dims), logical("s32", dims)])


def _check_norm(query: Query) -> tuple[Shape, Shape]:
    value = query.array(0)
    feature = query.attribute("feature_index")
    check_dims(query, "feature_index", (feature,), value.rank)
    vector = logical(value.dtype, (value.dims[feature],))
    last = 4 if query.opcode == "batch-norm-grad" else len(query.operands)
    for index in range(1, last):
        same(query, query.array(index), vector, f"operand {index} and the features")
    return value, vector


def batch_norm_training(query: Query) -> Shape:
    value, vector = _check_norm(query)
    return tuple_of([value, vector, vector])


def batch_norm_inference(query: Query) -> Shape:
    return _check_norm(query)[0]


def batch_norm_grad(query: Query) -> Shape:
    value, vector = _check_norm(query)
    same(query, query.array(4), value, "values and their gradient")
    return tuple_of([value, vector, vector])


RULES: dict[str, Rule] = {
    "reduce": reduce,
    "reduce-window": reduce_window,
    "select-and-scatter": select_and_scatter,
    "sort": sort,
    "topk": topk,
    "scan": lambda query: query.claim(),
    "batch-norm-training": batch_norm_training,
    "batch-norm-inference": batch_norm_inference,
    "batch-norm-grad": batch_norm_grad,
}
