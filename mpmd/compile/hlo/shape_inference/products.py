"""Shapes of products: dot, convolution, factorisations, Fourier transforms.

Shapes of reductions, windowed reductions and sorts.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import ConvDims, DotDims, Ints
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


def _result_type(query: Query, a: Shape, b: Shape) -> str:
    """A product may have wider or narrower elements than its operands, if stated; else theirs."""
    if query.stated is not None and query.stated.is_array:
        return query.stated.dtype
    check(a.dtype == b.dtype, f"{query.opcode} of {a.dtype} and {b.dtype} must state its element type")
    return a.dtype


def _check_pairs(query: Query, name: str, left: Ints, right: Ints) -> None:
    a, b = query.array(0), query.array(1)
    check_dims(query, f"lhs {name} dims", left, a.rank)
    check_dims(query, f"rhs {name} dims", right, b.rank)
    check(len(left) == len(right), f"{query.opcode} has {len(left)} lhs and {len(right)} rhs {name} dims")
    for i, j in zip(left, right):
        check(
            a.dims[i] == b.dims[j],
            f"{name} dim {i} of {a} and dim {j} of {b} must have equal sizes, got {a.dims[i]} and "
            f"{b.dims[j]}",
        )


def dot(query: Query) -> Shape:
    """Batch dims, free dims of the left side, free dims of the right side."""
    a, b = query.array(0), query.array(1)
    dims: DotDims = query.attribute("dot_dims")
    check(
        (a.info.kind == "complex") == (b.info.kind == "complex"),
        f"dot takes two real or two complex operands, got {a} and {b}",
    )
    _check_pairs(query, "batch", dims.lhs_batch, dims.rhs_batch)
    _check_pairs(query, "contracting", dims.lhs_contracting, dims.rhs_contracting)
    for side, batch, contracting in (
        ("lhs", dims.lhs_batch, dims.lhs_contracting),
        ("rhs", dims.rhs_batch, dims.rhs_contracting),
    ):
        both = sorted(set(batch) & set(contracting))
        check(not both, f"{side} dims {both} of {query.opcode} are both batch and contracting")
    out = [a.dims[d] for d in dims.lhs_batch]
    out += [a.dims[d] for d in dims.lhs_free(a.rank)]
    out += [b.dims[d] for d in dims.rhs_free(b.rank)]
    return logical(_result_type(query, a, b), out)


def ragged_dot(query: Query) -> Shape:
    """As dot for the usual form: `[m, k] x [g, k, n]` with group sizes `[g]` gives `[m, n]`."""
    return query.claim()


def convolution(query: Query) -> Shape:
    """Batch, features and the positions of the window, in the order of the labels."""
    image, kernel = query.array(0), query.array(1)
    dims: ConvDims = query.attribute("conv_dims")
    spatial = len(dims.lhs_spatial)
    check(
        image.rank == kernel.rank == spatial + 2,
        f"convolution with {spatial} spatial dims takes arrays of rank {spatial + 2}, "
        f"got {image} and {kernel}",
    )
    window = check_window(query, spatial, f"{spatial} spatial dims")
    features, batches = query.attribute("feature_group_count", 1), query.attribute("batch_group_count", 1)
    check(
        features > 0 and batches > 0,
        f"feature_group_count and batch_group_count must be positive, got {features} and {batches}",
    )
    for side, size in zip(window.dims, [kernel.dims[d] for d in dims.rhs_spatial]):
        check(
            side.size == size,
            f"the window's sizes {window.sizes} must be the kernel's spatial dims of {kernel}",
        )
    given, taken = image.dims[dims.lhs_feature], kernel.dims[dims.rhs_input_feature]
    check(
        given == taken * features,
        f"convolution of {image} needs {given} = {taken} x {features} input features (kernel {kernel}, "
        f"groups {features})",
    )
    outputs = kernel.dims[dims.rhs_output_feature]
    check(
        outputs % features == 0 and outputs % batches == 0,
        f"{outputs} output features do not split into the groups",
    )
    batch = image.dims[dims.lhs_batch]
    check(batch % batches == 0, f"batch {batch} does not split into {batches} groups")
    out = [0] * image.rank
    out[dims.out_batch], out[dims.out_feature] = batch // batches, outputs
    for side, source, result in zip(window.dims, dims.lhs_spatial, dims.out_spatial):
        out[result] = side.positions(image.dims[source])
    return logical(_result_type(query, image, kernel), out)


def _square(query: Query, shape: Shape) -> None:
    check(
        shape.rank >= 2 and shape.dims[-1] == shape.dims[-2],
        f"{query.opcode} takes square matrices in the last two dims, got {shape}",
    )


def cholesky(query: Query) -> Shape:
    _square(query, query.array(0))
    return query.array(0)


def triangular_solve(query: Query) -> Shape:
    a, b = query.array(0), query.array(1)
    _square(query, a)
    side = b.dims[-2] if query.attribute("left_side", False) else b.dims[-1]
    check(a.dims[:-2] == b.dims[:-2] and a.dims[-1] == side, f"triangular-solve: {a} does not fit {b}")
    return b


_PART_OF = {"c64": "f32", "c128": "f64", "f32": "c64", "f64": "c128"}


def fft(query: Query) -> Shape:
    """RFFT halves the last dim, IRFFT restores it."""
    source, kind, length = query.array(0), query.attribute("fft_type"), query.attribute("fft_length")
    check(
        0 < len(length) <= min(3, source.rank), f"fft_length must name 1 to 3 dims of {source}, got {length}"
    )
    lead, last = source.dims[: source.rank - len(length)], length[-1]
    expected = (*length[:-1], last // 2 + 1 if last else 0) if kind == "IRFFT" else length
    nothing = kind in ("FFT", "IFFT") and (0 in length or 0 in source.dims)
    check(
        nothing or source.dims[source.rank - len(length) :] == expected,
        f"{kind} of lengths {length} takes last dims {expected}, got {source}",
    )
    if kind in ("FFT", "IFFT"):
        check(source.info.kind == "complex", f"{kind} takes complex values, got {source}")
        return source
    if kind == "RFFT":
        check(source.info.kind == "float", f"RFFT takes real values, got {source}")
        return logical(_PART_OF[source.dtype], (*lead, *length[:-1], last // 2 + 1 if last else 0))
    check(source.info.kind == "complex", f"IRFFT takes complex values, got {source}")
    return logical(_PART_OF[source.dtype], (*lead, *length))


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
    "dot": dot,
    "scaled-dot": lambda query: query.claim(),
    "ragged-dot": ragged_dot,
    "convolution": convolution,
    "cholesky": cholesky,
    "triangular-solve": triangular_solve,
    "fft": fft,
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
