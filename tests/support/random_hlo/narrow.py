"""Cases of types of a byte or less: arithmetic, choice, movement, reductions, products, sorts, loops."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array, tuple_of
from tests.support.random_hlo.draft import EIGHT_BIT_FLOATS, Case, Draft, values

FLOATS = tuple(t for t in EIGHT_BIT_FLOATS if t != "f8e8m0fnu")
"""Without the type of scales, which has no zero and no sign, and the one of 4 bits, which has no NaN."""
INTEGERS = ("s4", "u4")
"""Without those of 2 bits, with which XLA:CPU spoils memory."""
DIRECTIONS = ("EQ", "NE", "GE", "GT", "LE", "LT")


def narrow(draft: Draft) -> Case:
    kind = draft.in_turn(tuple(_KINDS))
    dtype = draft.pick((*FLOATS, *INTEGERS))
    draft.name += f" {kind} {dtype}"
    return draft.finish(_KINDS[kind](draft, dtype))


def _value(draft: Draft, dtype: str, dims: tuple[int, ...], special: bool = True) -> HloInstruction:
    return draft.parameter(values(draft.rng, dtype, dims, special), dtype)


def _small(draft: Draft, dtype: str, dims: tuple[int, ...]) -> HloInstruction:
    """From -1 to 1: sums of a few are exact in every type."""
    low = 0 if DTYPES[dtype].kind == "unsigned" else -1
    made = draft.rng.integers(low, 2, dims).astype(np.int32).astype(DTYPES[dtype].numpy)
    return draft.parameter(made, dtype)


def _arithmetic(draft: Draft, dtype: str) -> HloInstruction:
    dims, floating = draft.dims(), DTYPES[dtype].is_floating
    both = ("add", "subtract", "multiply", "maximum", "minimum", "divide")
    opcode = draft.pick(
        both
        if floating
        else (
            *both,
            "remainder",
            "and",
            "or",
            "xor",
            "shift-left",
            "shift-right-arithmetic",
            "shift-right-logical",
        )
    )
    draft.name += f" {opcode}"
    a, b = (_value(draft, dtype, dims, floating) for _ in range(2))
    return draft.builder.add(opcode, a, b)


def _unary(draft: Draft, dtype: str) -> HloInstruction:
    dims, floating = draft.dims(), DTYPES[dtype].is_floating
    signed = ("negate", "abs", "sign") if DTYPES[dtype].kind != "unsigned" else ()
    more = ("floor", "ceil", "round-nearest-even") if floating else ("not", "popcnt", "count-leading-zeros")
    opcode = draft.pick((*signed, *more))
    draft.name += f" {opcode}"
    return draft.builder.add(opcode, _value(draft, dtype, dims, floating))


def _choice(draft: Draft, dtype: str) -> HloInstruction:
    dims, build = draft.dims(), draft.builder
    a, b = (_value(draft, dtype, dims) for _ in range(2))
    predicate = build.compare(a, b, draft.pick(DIRECTIONS))
    one, low = build.full(1, dtype, dims), build.full(0, dtype, dims)
    return build.tuple([predicate, build.select(predicate, a, b), build.add("clamp", low, a, one)])


def _movement(draft: Draft, dtype: str) -> HloInstruction:
    build, dims = draft.builder, draft.dims(2, 3, zero=False)
    a = _value(draft, dtype, dims)
    turned = build.transpose(a, tuple(reversed(range(len(dims)))))
    filler = draft.parameter(draft.rng.integers(0, 2, ()).astype(np.int32), "s32")
    padding = [attrs.PadDim(1, int(draft.rng.integers(0, 3)), int(draft.rng.integers(0, 2))) for _ in dims]
    padded = build.pad(a, build.convert(filler, dtype), padding)
    joined = build.concatenate([a, build.add("reverse", a, dimensions=(0,))], 0)
    start = draft.parameter(np.asarray(draft.rng.integers(-2, 4), np.int32), "s32")
    cut = build.dynamic_slice(joined, [start] * len(dims), [1, *dims[1:]])
    changed = build.dynamic_update_slice(joined, cut, [start] * len(dims))
    counted = build.iota(dtype, (3, 2), 0)
    return build.tuple([turned, padded, changed, counted])


def _indexed(draft: Draft, dtype: str) -> HloInstruction:
    build, rows, width = draft.builder, int(draft.rng.integers(1, 8)), int(draft.rng.integers(1, 6))
    a, count = _value(draft, dtype, (rows, width)), int(draft.rng.integers(1, 6))
    places = draft.rng.permutation(8)[:count].astype(np.int32).reshape(count, 1)
    indices = draft.parameter(places, "s32")
    taken = build.gather(a, indices, attrs.GatherDims((1,), (0,), (0,), 1), (1, width))
    updates = _small(draft, dtype, (count, width))
    called = scalar_computation(draft.module, draft.pick(("add", "maximum")), dtype)
    return build.tuple(
        [
            taken,
            build.add(
                "scatter",
                a,
                indices,
                updates,
                scatter_dims=attrs.ScatterDims((1,), (0,), (0,), 1),
                called=(called,),
            ),
        ]
    )


def _first(opcode: str, dtype: str) -> np.ndarray:
    """What a reduction begins with."""
    info = DTYPES[dtype]
    if opcode == "add":
        return np.zeros((), info.numpy)
    limits = (ml_dtypes.finfo if info.is_floating else ml_dtypes.iinfo)(info.numpy)
    return np.asarray(limits.min if opcode == "maximum" else limits.max).astype(info.numpy)


def _reduction(draft: Draft, dtype: str) -> HloInstruction:
    build, dims = draft.builder, (int(draft.rng.integers(1, 4)), int(draft.rng.integers(1, 7)))
    opcode = draft.pick(("add", "maximum", "minimum"))
    draft.name += f" {opcode}"
    value = _small(draft, dtype, dims) if opcode == "add" else _value(draft, dtype, dims)
    init = build.constant(_first(opcode, dtype))  # XLA:CPU leaves it out where there is one element
    called = scalar_computation(draft.module, opcode, dtype)
    made = build.reduce([value], [init], (draft.pick((0, 1)),), called)
    window = attrs.Window((attrs.WindowDim(1), attrs.WindowDim(2, 1, 1, 0)))
    return build.tuple([made, build.add("reduce-window", value, init, window=window, called=(called,))])


def _product(draft: Draft, dtype: str) -> HloInstruction:
    build = draft.builder
    rows, depth, columns = (int(n) for n in draft.rng.integers(1, 9, 3))
    a, b = _small(draft, dtype, (rows, depth)), _small(draft, dtype, (depth, columns))
    if DTYPES[dtype].is_floating:
        return build.dot(a, b, dtype="f32")
    return build.dot(build.convert(a, "s8"), build.convert(b, "s8"), dtype="s32")  # XLA:CPU has none of s4


def _sort(draft: Draft, dtype: str) -> HloInstruction:
    build, dims = draft.builder, (int(draft.rng.integers(1, 4)), int(draft.rng.integers(1, 40)))
    a = _small(draft, dtype, dims) if draft.rng.random() < 0.5 else _value(draft, dtype, dims, False)
    body = HloBuilder.create(draft.module, "before")
    given = [body.parameter(array(t)) for t in (dtype, dtype, "s32", "s32")]
    called = body.build(body.compare(given[0], given[1], draft.pick(("LT", "GT"))))
    places = build.iota("s32", dims, 1)
    return build.add("sort", a, places, dimensions=(1,), is_stable=True, called=(called,))


def _loop(draft: Draft, dtype: str) -> HloInstruction:
    """A narrow state that is halved and moved."""
    build, dims = draft.builder, draft.dims(1, 2, zero=False)
    a = _value(draft, dtype, dims, False)
    state = tuple_of([array("s32"), a.shape.logical])
    condition = HloBuilder.create(draft.module, "condition")
    at = condition.element(condition.parameter(state), 0)
    condition.build(condition.compare(at, condition.constant(3, "s32"), "LT"))
    body = HloBuilder.create(draft.module, "body")
    given = body.parameter(state)
    at, value = body.element(given, 0), body.element(given, 1)
    moved = body.add("reverse", value, dimensions=(0,))
    halved = body.add("divide", moved, body.full(1, dtype, dims))
    body.build(body.tuple([body.add("add", at, body.constant(1, "s32")), body.add("maximum", halved, value)]))
    made = build.loop(condition.computation, body.computation, build.tuple([build.constant(0, "s32"), a]))
    return build.element(made, 1)


_KINDS: dict[str, Callable[[Draft, str], HloInstruction]] = {
    "arithmetic": _arithmetic,
    "unary": _unary,
    "choice": _choice,
    "movement": _movement,
    "indexed": _indexed,
    "reduction": _reduction,
    "product": _product,
    "sort": _sort,
    "loop": _loop,
}
