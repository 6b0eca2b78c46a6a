"""Programs on which one rule of the algebraic simplifier fires, of all types, with special values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, PadDim
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import identity_of
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.rewriter import Rule
from mpmd.compile.passes.simplify.algebra import elementwise, movement, products
from tests.support.random_hlo.draft import ANY, COMPLEX, EIGHT_BIT_FLOATS, FLOATS, INTEGERS, TINY, Case, Draft
from tests.support.random_hlo.draft import values as drawn

Maker = Callable[[Draft], HloInstruction]

NUMBERS = (*FLOATS, *INTEGERS, *COMPLEX)
SIZES = (1, 2, 3, 7, 8, 9, 16, 17)
ORDERED = (*FLOATS, *INTEGERS, "s4", "u4", "pred")
SPECIAL = 0.4
"""Share of the programs that get special values."""


def dims_of(draft: Draft, low: int = 1, high: int = 3) -> tuple[int, ...]:
    """Sizes, of which a program in eight has a zero."""
    dims = [int(draft.pick(SIZES)) for _ in range(int(draft.rng.integers(low, high + 1)))]
    if dims and draft.rng.random() < 0.12:
        dims[int(draft.rng.integers(len(dims)))] = 0
    return tuple(dims)


def given(draft: Draft, dtype: str, dims: Sequence[int], special: bool | None = None) -> HloInstruction:
    """A parameter, of special values in a share of the programs."""
    is_special = draft.rng.random() < SPECIAL if special is None else special
    return draft.parameter(drawn(draft.rng, dtype, tuple(dims), is_special), dtype)


def everywhere(draft: Draft, value: float, dtype: str, dims: Sequence[int]) -> HloInstruction:
    """One value as a broadcast, an array, or a moved broadcast."""
    build = draft.builder
    form = draft.rng.integers(3)
    if form == 0 and 0 < np.prod(dims, dtype=int) <= 1024:
        return build.constant(np.full(dims, np.asarray(value).astype(DTYPES[dtype].numpy)))
    if form == 1 and len(dims) > 1:
        wide = build.full(value, dtype, dims[::-1])
        return build.transpose(wide, tuple(reversed(range(len(dims)))))
    return build.full(value, dtype, dims)


def _beside(opcodes: Sequence[str], dtypes: Sequence[str], value: float, *, left: bool = False) -> Maker:
    """An operation of an array and of one value everywhere."""

    def make(draft: Draft) -> HloInstruction:
        dtype, dims = draft.pick(dtypes), dims_of(draft, 0)
        x, other = given(draft, dtype, dims), everywhere(draft, value, dtype, dims)
        return draft.builder.add(draft.pick(opcodes), *((other, x) if left else (x, other)))

    return make


def _constant_left(draft: Draft) -> HloInstruction:
    opcode = draft.pick(("add", "multiply", "maximum", "minimum", "and", "or", "xor"))
    dtype = draft.pick((*INTEGERS, "pred") if opcode in ("and", "or", "xor") else NUMBERS[:-2])
    dims = dims_of(draft)
    value = drawn(draft.rng, dtype, (), draft.rng.random() < SPECIAL)
    return draft.builder.add(opcode, everywhere(draft, value, dtype, dims), given(draft, dtype, dims))


def _zero(draft: Draft) -> HloInstruction:
    return _beside(("add",), NUMBERS, draft.pick((0.0, -0.0)))(draft)


def _less_zero(draft: Draft) -> HloInstruction:
    if draft.rng.random() < 0.5:
        return _beside(("subtract",), INTEGERS, 0, left=True)(draft)
    return _beside(("subtract",), NUMBERS, 0)(draft)


def _power_of_two(draft: Draft) -> HloInstruction:
    dtype, dims = draft.pick(FLOATS), dims_of(draft)
    most = 16 if dtype == "f16" else 127
    by = float(2.0 ** int(draft.rng.integers(-most + 1, most))) * draft.pick((1, -1))
    return draft.builder.add("divide", given(draft, dtype, dims), everywhere(draft, by, dtype, dims))


def _power(draft: Draft) -> HloInstruction:
    dtype = draft.pick((*FLOATS, "s32", "u8", "s64"))
    exponents = (0, 1, 2, -1) if dtype in FLOATS else (0, 1, 2)
    return _beside(("power",), (dtype,), draft.pick(exponents))(draft)


def _neutral(draft: Draft) -> HloInstruction:
    opcode = draft.pick(("maximum", "minimum", "and", "or", "xor"))
    dtype = draft.pick(ORDERED if opcode in ("maximum", "minimum") else (*INTEGERS, "pred", "s4", "u4"))
    dims = dims_of(draft)
    return draft.builder.add(
        opcode, given(draft, dtype, dims), everywhere(draft, identity_of(opcode, dtype), dtype, dims)
    )


def _compare(draft: Draft) -> HloInstruction:
    dtype, dims = draft.pick((*FLOATS, *INTEGERS)), dims_of(draft)
    value = drawn(draft.rng, dtype, (), draft.rng.random() < SPECIAL)
    way = draft.pick(("EQ", "NE", "GE", "GT", "LE", "LT"))
    total = "TOTALORDER" if dtype in FLOATS and draft.rng.random() < 0.3 else None
    x = given(draft, dtype, dims)
    return draft.builder.add(
        "compare", everywhere(draft, value, dtype, dims), x, direction=way, comparison_type=total
    )


def _select(draft: Draft) -> HloInstruction:
    dtype, dims = draft.pick((*ANY, *COMPLEX, *TINY[:4])), dims_of(draft)
    a, b = (given(draft, dtype, dims) for _ in range(2))
    truth = draft.pick((True, False))
    scalar = draft.rng.random() < 0.4
    return draft.builder.select(everywhere(draft, truth, "pred", () if scalar else dims), a, b)


_KEEPING = {  # types in which each value of another one is
    "pred": ("s8", "u8", "f32", "bf16", "s32"),
    "s4": ("s8", "s32", "f32", "bf16"),
    "u4": ("u8", "s8", "f16", "c64"),
    "s8": ("s16", "s32", "f32", "bf16", "c64"),
    "u8": ("s16", "u32", "f16", "f32"),
    "s16": ("s32", "f32", "f64"),
    "u16": ("s32", "u64", "f32"),
    "s32": ("s64", "f64", "c128"),
    "u32": ("s64", "u64", "f64"),
    "f8e4m3fn": ("f16", "bf16", "f32"),
    "f8e5m2": ("f16", "f32"),
    "bf16": ("f32", "f64", "c64"),
    "f16": ("f32", "f64"),
    "f32": ("f64", "c64"),
    "c64": ("c128",),
}


def _convert_twice(draft: Draft) -> HloInstruction:
    source = draft.in_turn(tuple(_KEEPING))
    x = given(draft, source, dims_of(draft))
    middle = draft.builder.convert(x, draft.pick(_KEEPING[source]))
    return draft.builder.convert(middle, draft.pick((*ANY, *EIGHT_BIT_FLOATS[:3], "s4", "u4")))


def _copy(draft: Draft) -> HloInstruction:
    return draft.builder.add("copy", given(draft, draft.pick(ANY), dims_of(draft)))


def _reshape_to_itself(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft))
    return draft.builder.add("reshape", x, shape=x.shape.logical)


def _reshape_twice(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 1))
    count = x.shape.size
    flat = draft.builder.add("reshape", x, shape=array(x.shape.dtype, (count, 1)))
    return draft.builder.add("reshape", flat, shape=array(x.shape.dtype, (1, count)))


def _transpose_twice(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 2, 4))
    for _ in range(2):
        order = tuple(int(d) for d in draft.rng.permutation(x.shape.rank))
        x = draft.builder.add("transpose", x, dimensions=order)
    return x


def _transpose_ones(draft: Draft) -> HloInstruction:
    dims = [1, int(draft.pick(SIZES)), 1, int(draft.pick(SIZES))]
    x = given(draft, draft.pick(ANY), dims)
    return draft.builder.add(
        "transpose", x, dimensions=draft.pick(((1, 0, 2, 3), (1, 3, 0, 2), (2, 1, 3, 0)))
    )


def _bitcast(draft: Draft) -> HloInstruction:
    dims = dims_of(draft, 2, 2)
    x = given(draft, draft.pick(ANY), dims)
    flat = draft.builder.add("bitcast", x, shape=array(x.shape.dtype, (x.shape.size,)))
    return draft.builder.add(
        "bitcast", flat, shape=draft.pick((x.shape.logical, array(x.shape.dtype, dims[::-1])))
    )


def _size(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 1))
    return draft.builder.add("get-dimension-size", x, dimensions=(int(draft.rng.integers(x.shape.rank)),))


def _empty_product(draft: Draft) -> HloInstruction:
    dtype = draft.pick((*FLOATS, "s32", "c64"))
    rows, columns = (int(draft.pick(SIZES)) for _ in range(2))
    a, b = given(draft, dtype, (rows, 0)), given(draft, dtype, (0, columns))
    return draft.builder.dot(a, b)


def _product_of_ones(draft: Draft) -> HloInstruction:
    dtype, wide = draft.pick(
        (
            ("f32", "f32"),
            ("bf16", "f32"),
            ("f32", "f64"),
            ("s8", "s32"),
            ("u8", "u8"),
            ("f64", "f64"),
            ("s32", "s32"),
            ("bf16", "bf16"),
        )
    )
    batch, rows, columns = (int(draft.pick(SIZES[:5])) for _ in range(3))
    a, b = given(draft, dtype, (rows, batch, 1)), given(draft, dtype, (1, columns, batch))
    contracted = draft.pick((True, False))
    if not contracted:
        a, b = draft.builder.reshape(a, (rows, batch)), draft.builder.reshape(b, (columns, batch))
        return draft.builder.dot(a, b, DotDims((), (), (1,), (1,)), wide)
    return draft.builder.dot(a, b, DotDims((2,), (0,), (1,), (2,)), wide)


def _transposed_product(draft: Draft) -> HloInstruction:
    dtype = draft.pick(("f32", "f64", "bf16", "s32", "c64"))
    batch, rows, depth, columns = (int(draft.pick(SIZES[:5])) for _ in range(4))
    a = given(draft, dtype, (batch, rows, depth), False)
    b = given(draft, dtype, (batch, depth, columns), False)
    made = draft.builder.dot(a, b, DotDims((2,), (1,), (0,), (0,)))
    return draft.builder.transpose(made, (0, 2, 1))


def _broadcast_to_itself(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 0))
    return draft.builder.add("broadcast", x, shape=x.shape.logical, dimensions=tuple(range(x.shape.rank)))


def _broadcast_twice(draft: Draft) -> HloInstruction:
    build, x = draft.builder, given(draft, draft.pick(ANY), dims_of(draft, 1, 2))
    inner = build.broadcast(x, (3, *x.shape.dims), range(1, x.shape.rank + 1))
    order = [int(d) for d in draft.rng.permutation(inner.shape.rank)]
    dims = [0] * inner.shape.rank
    for place, size in zip(order, inner.shape.dims):
        dims[place] = size
    return build.broadcast(inner, (*dims, 2), order)


_ONE, _TWO = (
    [o for o, known in OPCODES.items() if known.category in ELEMENTWISE and known.least == known.most == n]
    for n in (1, 2)
)
_FLOAT_ONLY = frozenset({"round-nearest-afz", "round-nearest-even", "floor", "ceil", "sign", "abs", "negate"})
_UNARY = sorted(_FLOAT_ONLY | ({"not"} & set(_ONE)))
_BINARY = sorted({"add", "subtract", "multiply", "divide", "maximum", "minimum", "remainder"} & set(_TWO))


def _sink(draft: Draft) -> HloInstruction:
    build, dims = draft.builder, dims_of(draft, 1, 2)
    wide, places = (2, *dims, 3), range(1, 1 + len(dims))
    dtype = draft.pick((*FLOATS, "s32", "u8", "s8"))

    def spread() -> HloInstruction:
        if draft.rng.random() < 0.25:
            return build.full(float(draft.rng.integers(0, 5)), dtype, wide)
        return build.broadcast(given(draft, dtype, dims), wide, places)

    kind = draft.pick(("unary", "binary", "select", "clamp", "compare"))
    x = build.broadcast(given(draft, dtype, dims), wide, places)
    if kind == "unary":
        return build.add(draft.pick([o for o in _UNARY if (dtype in FLOATS) == (o != "not")]), x)
    if kind == "binary":
        return build.add(draft.pick(_BINARY), x, spread())
    if kind == "compare":
        return build.compare(spread(), x, draft.pick(("EQ", "NE", "LT", "GE")))
    if kind == "clamp":
        low, high = (build.constant(np.asarray(n).astype(DTYPES[dtype].numpy)) for n in (1, 3))
        return build.add("clamp", low, x, high)
    truth = given(draft, "pred", () if draft.rng.random() < 0.5 else dims)
    return build.select(truth if truth.shape.rank == 0 else build.broadcast(truth, wide, places), x, spread())


def _slice(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 1))
    strides = [int(draft.pick((1, 1, 3))) if n <= 1 else 1 for n in x.shape.dims]
    return draft.builder.slice(x, [0] * x.shape.rank, x.shape.dims, strides)


def _pad(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 1))
    padding = [PadDim(0, 0, int(draft.pick((0, 2))) if n <= 1 else 0) for n in x.shape.dims]
    return draft.builder.pad(x, given(draft, x.shape.dtype, ()), padding)


_INDEX = ("s32", "s64", "u32", "u8", "s8", "u64", "s16")


def _start(draft: Draft) -> HloInstruction:
    dtype = draft.pick(_INDEX)
    info = np.iinfo(DTYPES[dtype].numpy)
    some = (0, 1, 2, 5, int(info.max)) if info.min == 0 else (0, 1, 2, -1, 7, int(info.min), int(info.max))
    return draft.builder.constant(np.asarray(draft.pick(some), info.dtype))


def _at_constant(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 1, 2))
    sizes = [int(draft.rng.integers(0 if n == 0 else 1, n + 1)) for n in x.shape.dims]
    first = _start(draft)
    return draft.builder.dynamic_slice(x, [first] * x.shape.rank, sizes)


def _update(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), dims_of(draft, 1, 2))
    start = given(draft, "s32", ())
    sizes = x.shape.dims if draft.rng.random() < 0.6 else (0,) * x.shape.rank
    return draft.builder.dynamic_update_slice(x, given(draft, x.shape.dtype, sizes), [start] * x.shape.rank)


def _whole_size(draft: Draft) -> HloInstruction:
    x = given(draft, "f32", dims_of(draft, 1))
    dim = int(draft.rng.integers(x.shape.rank))
    size = draft.builder.constant(np.int32(x.shape.dims[dim]))
    return draft.builder.add("set-dimension-size", x, size, shape=x.shape.logical, dimensions=(dim,))


def _mark(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick((*FLOATS, *INTEGERS)), dims_of(draft, 1))
    mark = draft.pick(("Sharding", "MoveToHost", "MoveToDevice"))
    return draft.builder.add("custom-call", x, shape=x.shape.logical, custom_call_target=mark)


def _reduction(draft: Draft, dims: tuple[int, ...], over: tuple[int, ...]) -> HloInstruction:
    opcode = draft.pick(("add", "multiply", "maximum", "minimum", "and", "or", "xor"))
    dtype = draft.pick((*INTEGERS, "pred") if opcode in ("and", "or", "xor") else (*FLOATS, *INTEGERS))
    x, build = given(draft, dtype, dims), draft.builder
    own = draft.rng.random() < 0.4
    start = drawn(draft.rng, dtype, (), True) if own else identity_of(opcode, dtype)
    init = build.constant(np.asarray(start).astype(DTYPES[dtype].numpy))
    if draft.rng.random() < 0.3:
        init = given(draft, dtype, ())
    return build.reduce([x], [init], over, scalar_computation(draft.module, opcode, dtype))


def _reduce_ones(draft: Draft) -> HloInstruction:
    dims = dims_of(draft, 1, 2)
    return _reduction(draft, (dims[0], 1, *dims[1:], 1), draft.pick(((1,), (1, 1 + len(dims)), ())))


def _reduce_empty(draft: Draft) -> HloInstruction:
    return _reduction(draft, (int(draft.pick(SIZES)), 0, 3), draft.pick(((1,), (1, 2))))


def _element(draft: Draft) -> HloInstruction:
    parts = [given(draft, draft.pick(ANY), dims_of(draft)) for _ in range(3)]
    number = int(draft.rng.integers(3))
    return draft.builder.add(
        "get-tuple-element", draft.builder.tuple(parts), shape=parts[number].shape, index=number
    )


def _elements(draft: Draft) -> HloInstruction:
    build, count = draft.builder, int(draft.rng.integers(1, 4))
    parts = [given(draft, draft.pick(ANY), dims_of(draft)) for _ in range(count)]
    source = build.add("opt-barrier", build.tuple(parts))
    order = range(count) if draft.rng.random() < 0.8 else reversed(range(count))
    return build.tuple([build.element(source, k) for k in order])


def _copied_tuple(draft: Draft) -> HloInstruction:
    parts = [given(draft, draft.pick(ANY), dims_of(draft)) for _ in range(2)]
    return draft.builder.add("copy", draft.builder.tuple(parts))


def _constants(draft: Draft) -> HloInstruction:
    made = [drawn(draft.rng, draft.pick(("f32", "s32")), dims_of(draft), True) for _ in range(2)]
    return draft.builder.literal(tuple(made))


RULES: dict[Rule, Maker] = {
    elementwise.constant_to_the_right: _constant_left,
    elementwise.add_zero: _zero,
    elementwise.subtract_zero: _less_zero,
    elementwise.multiply_one: _beside(("multiply", "divide"), (*FLOATS, *INTEGERS), 1),
    elementwise.divide_by_power_of_two: _power_of_two,
    elementwise.power_of_simple_exponent: _power,
    elementwise.neutral: _neutral,
    elementwise.compare_constant_to_the_right: _compare,
    elementwise.select_constant: _select,
    elementwise.convert_twice: _convert_twice,
    elementwise.copy_nothing: _copy,
    movement.reshape_nothing: _reshape_to_itself,
    movement.reshape_twice: _reshape_twice,
    movement.transpose_twice: _transpose_twice,
    movement.transpose_of_ones: _transpose_ones,
    movement.bitcast_nothing: _bitcast,
    movement.known_size: _size,
    products.dot_of_nothing: _empty_product,
    products.dot_of_ones: _product_of_ones,
    products.transpose_of_dot: _transposed_product,
    movement.broadcast_nothing: _broadcast_to_itself,
    movement.broadcast_twice: _broadcast_twice,
    movement.sink: _sink,
    movement.slice_nothing: _slice,
    movement.pad_nothing: _pad,
    movement.slice_at_constant: _at_constant,
    movement.update_everything: _update,
    movement.set_whole_size: _whole_size,
    movement.drop_mark: _mark,
    products.reduce_nothing: _reduce_ones,
    products.reduce_of_nothing: _reduce_empty,
    movement.element_of_tuple: _element,
    movement.tuple_of_elements: _elements,
    movement.tuple_of_constants: _constants,
    movement.copy_of_tuple: _copied_tuple,
}
"""Every rule with what it fires on, most of the time."""

ZEROS_LOSE_SIGNS = frozenset({elementwise.add_zero, products.dot_of_ones, products.reduce_nothing})
"""Rules that keep values up to the sign of zeros: sums begin with 0."""
ROUNDED = frozenset({elementwise.power_of_simple_exponent})
"""Rules whose result is rounded once where the library's is nearly so."""


def rule_case(rule: Rule, seed: int) -> Case:
    """A program for a rule."""
    draft = Draft(np.random.default_rng([seed, list(RULES).index(rule)]), f"{rule.__name__}#{seed}", seed)
    return draft.finish(RULES[rule](draft))
