"""Cases of reductions, windows and sorts."""

from __future__ import annotations

import math

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.shape import array
from tests.support.random_hlo.draft import (
    FLOATS,
    INTEGERS,
    Case,
    Draft,
    small_integers,
    values,
)

IDENTITIES = {"add": 0, "multiply": 1, "and": -1, "or": 0, "xor": 0}


def identity(opcode: str, dtype: str) -> np.ndarray:
    info = DTYPES[dtype]
    if opcode in ("maximum", "minimum"):
        if info.kind == "float":
            return np.asarray(-np.inf if opcode == "maximum" else np.inf).astype(info.numpy)
        low = -(1 << (info.bits - 1)) if info.kind == "signed" else 0
        high = (1 << (info.bits - (info.kind == "signed"))) - 1
        return np.asarray(low if opcode == "maximum" else high, dtype=object).astype(info.numpy)
    if info.kind == "pred":
        return np.asarray(opcode == "and")
    value = IDENTITIES[opcode]
    return np.asarray(
        value if value >= 0 else (1 << info.bits) - 1 if info.kind == "unsigned" else -1
    ).astype(info.numpy)


def reduce(draft: Draft) -> Case:
    dims = draft.dims(1, 4)
    dtype = draft.pick((*FLOATS, *INTEGERS, "pred"))
    simple = ("and", "or") if dtype == "pred" else ("add", "maximum", "minimum", "multiply")
    opcode = draft.pick(
        simple if DTYPES[dtype].kind == "float" or dtype == "pred" else (*simple, "and", "or", "xor")
    )
    axes = tuple(d for d in range(len(dims)) if draft.rng.random() < 0.6)
    draft.name += f" {opcode} {dtype}"
    draft.terms = max(1, math.prod(dims[a] for a in axes))
    draft.exact = not (DTYPES[dtype].kind == "float" and opcode in ("add", "multiply"))
    value = draft.parameter(values(draft.rng, dtype, dims), dtype)
    init = draft.builder.constant(identity(opcode, dtype))
    computation = scalar_computation(draft.module, opcode, dtype)
    return draft.finish(draft.builder.reduce([value], [init], axes, computation))


def argmax(draft: Draft) -> Case:
    """The place of a maximum or minimum; half of the reducers, like JAX's, know NaN."""
    dims, dtype = draft.dims(1, 3), draft.pick((*FLOATS, "s32"))
    axis = int(draft.rng.integers(len(dims)))
    opcode, knows = draft.pick(("maximum", "minimum")), bool(draft.rng.random() < 0.5)
    draft.name += f" {opcode} {dtype}{' with NaN' if knows else ''}"
    body = HloBuilder.create(draft.module, "argmax")
    best, place, value, index = (body.parameter(array(t)) for t in (dtype, "s32", dtype, "s32"))
    keep = body.compare(best, value, "GT" if opcode == "maximum" else "LT")
    if knows:
        keep = body.add("or", keep, body.compare(best, best, "NE"))
    tie = body.add("and", body.compare(best, value, "EQ"), body.compare(place, index, "LT"))
    first = body.add("or", keep, tie)
    computation = body.build(body.tuple([body.select(first, best, value), body.select(first, place, index)]))
    numbers = small_integers(draft.rng, dtype, dims)
    if knows and DTYPES[dtype].kind == "float":
        numbers = np.where(draft.rng.random(dims) < 0.2, np.nan, numbers).astype(DTYPES[dtype].numpy)
    source = draft.parameter(numbers, dtype)
    places = draft.builder.iota("s32", dims, axis)
    inits = [draft.builder.constant(identity(opcode, dtype)), draft.builder.constant(0, "s32")]
    return draft.finish(draft.builder.reduce([source, places], inits, (axis,), computation))


def _affine(draft: Draft, dtype: str) -> tuple[list[np.ndarray], HloComputation]:
    """Initial values and a reducer of pairs: x -> c x + d after x -> a x + b, where the order counts."""
    body = HloBuilder.create(draft.module, "compose")
    a, b, c, d = (body.parameter(array(dtype)) for _ in range(4))
    second = body.add("add", body.add("multiply", b, c), d)
    inits = [np.asarray(v).astype(DTYPES[dtype].numpy) for v in (1, 0)]
    return inits, body.build(body.tuple([body.add("multiply", a, c), second]))


def several(draft: Draft) -> Case:
    """Two arrays reduced together, whole or in windows, running ones among them."""
    dims, dtype = draft.dims(1, 3), draft.pick(("s32", "u8", "s64"))
    inits, computation = _affine(draft, dtype)
    arrays = [draft.parameter(values(draft.rng, dtype, dims), dtype) for _ in range(2)]
    begin = [draft.builder.constant(i) for i in inits]
    kind = draft.pick(("whole", "window", "running"))
    draft.name += f" {kind} {dtype}"
    if kind == "whole" or 0 in dims:
        axes = tuple(d for d in range(len(dims)) if draft.rng.random() < 0.6)
        return draft.finish(draft.builder.reduce(arrays, begin, axes, computation))
    # along one dim: in which order a window of several is walked through is open
    axis, forward = int(draft.rng.integers(len(dims))), draft.rng.random() < 0.5
    side, n = _window(draft, dims, True).dims[axis], dims[axis]
    if kind == "running":
        side = attrs.WindowDim(n, 1, n - 1 if forward else 0, 0 if forward else n - 1)
    window = attrs.Window(tuple(side if d == axis else attrs.WindowDim(1) for d in range(len(dims))))
    made = draft.builder.add("reduce-window", *arrays, *begin, window=window, called=(computation,))
    return draft.finish(made)


def _window(draft: Draft, dims: tuple[int, ...], dilated: bool) -> attrs.Window:
    sides = []
    for size in dims:
        window = int(draft.rng.integers(1, 4))
        low, high = (int(v) for v in draft.rng.integers(0, window, 2))
        dilation = int(draft.rng.integers(1, 3)) if dilated else 1
        holes = int(draft.rng.integers(1, 3)) if dilated else 1
        if size + low + high < window * holes:
            window, low, high, holes = 1, 0, 0, 1
        sides.append(attrs.WindowDim(window, int(draft.rng.integers(1, 3)), low, high, dilation, holes))
    return attrs.Window(tuple(sides))


def reduce_window(draft: Draft) -> Case:
    dims, dtype = draft.dims(1, 3, zero=False), draft.pick((*FLOATS, "s32", "u8", "s64"))
    opcode = draft.pick(("add", "maximum", "minimum"))
    draft.name += f" {opcode} {dtype}"
    window = _window(draft, dims, True)
    draft.terms = math.prod(window.sizes)
    draft.exact = not (DTYPES[dtype].kind == "float" and opcode == "add")
    value = draft.parameter(values(draft.rng, dtype, dims), dtype)
    init = draft.builder.constant(identity(opcode, dtype))
    computation = scalar_computation(draft.module, opcode, dtype)
    return draft.finish(draft.builder.add("reduce-window", value, init, window=window, called=(computation,)))


def select_and_scatter(draft: Draft) -> Case:
    dims, dtype = draft.dims(1, 3, zero=False), draft.pick(("f32", "f64", "s32"))
    window = _window(draft, dims, False)
    out = tuple(side.positions(size) for side, size in zip(window.dims, dims))
    draft.name += f" {dtype}"
    distinct = draft.rng.permutation(math.prod(dims)).reshape(
        dims
    )  # which of two equal elements wins is open
    value = draft.parameter(distinct.astype(DTYPES[dtype].numpy), dtype)
    source = draft.parameter(small_integers(draft.rng, dtype, out), dtype)
    body = HloBuilder.create(draft.module, "ge")
    select = body.build(body.compare(body.parameter(array(dtype)), body.parameter(array(dtype)), "GE"))
    scatter_by = scalar_computation(draft.module, "add", dtype)
    init = draft.builder.constant(0, dtype)
    made = draft.builder.add(
        "select-and-scatter", value, source, init, window=window, called=(select, scatter_by)
    )
    return draft.finish(made)


def sort(draft: Draft) -> Case:
    dims, dtype = draft.dims(1, 3), draft.pick((*FLOATS, *INTEGERS))
    axis, direction = int(draft.rng.integers(len(dims))), draft.pick(("LT", "GT"))
    body = HloBuilder.create(draft.module, "comparator")
    types = [dtype, "s32"] if draft.rng.random() < 0.6 else [dtype]
    parameters = [body.parameter(array(t)) for t in types for _ in range(2)]
    order = "TOTALORDER" if DTYPES[dtype].kind == "float" else None
    computation = body.build(
        body.add("compare", parameters[0], parameters[1], direction=direction, comparison_type=order)
    )
    draft.name += f" {dtype} x{len(types)}"
    operands = [draft.parameter(values(draft.rng, dtype, dims, True), dtype)]
    if len(types) > 1:
        operands.append(draft.builder.iota("s32", dims, axis))
    made = draft.builder.add("sort", *operands, dimensions=(axis,), is_stable=True, called=(computation,))
    return draft.finish(made)


def topk(draft: Draft) -> Case:
    dims, dtype = draft.dims(1, 2, zero=False), draft.pick(("f32", "bf16", "s32", "u8"))
    draft.name += f" {dtype}"
    value = draft.parameter(values(draft.rng, dtype, dims), dtype)
    k = int(draft.rng.integers(1, dims[-1] + 1))
    return draft.finish(draft.builder.add("topk", value, k=k, largest=True))


def batch_norm(draft: Draft) -> Case:
    kind, dtype = draft.pick(("training", "inference", "grad")), draft.pick(("f32", "f64"))
    dims = draft.dims(2, 4, zero=False)
    axis = int(draft.rng.integers(len(dims)))
    draft.exact, draft.terms = False, 200
    draft.name += f" {kind} {dtype}"
    value = draft.parameter(values(draft.rng, dtype, dims), dtype)
    vectors = [
        draft.parameter(np.abs(values(draft.rng, dtype, (dims[axis],))) + 0.5, dtype) for _ in range(4)
    ]
    operands = {"training": vectors[:2], "inference": vectors, "grad": vectors[:3]}[kind]
    if kind == "grad":
        operands = [*operands, draft.parameter(values(draft.rng, dtype, dims), dtype)]
    unused = [v for v in vectors if v not in operands]
    made = draft.builder.add(f"batch-norm-{kind}", value, *operands, epsilon=0.5, feature_index=axis)
    return draft.finish(draft.builder.tuple([made, *unused]))
