"""Random HLO modules with arguments: single operations of all opcodes and types, graphs of exact operations.

A case's outputs are deterministic functions of its inputs up to rounding: inexact operations feed outputs
alone, so
that a last-bit difference never decides a comparison, an index or a branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import array, tuple_of

FLOATS = ("bf16", "f16", "f32", "f64")
SIGNED = ("s8", "s16", "s32", "s64")
UNSIGNED = ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
COMPLEX = ("c64", "c128")
EIGHT_BIT_FLOATS = ("f8e4m3fn", "f8e5m2", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz")


@dataclass
class Case:
    """A module, its arguments and how exactly two implementations must agree.

    Attributes:
        name: family and detail.
        module: the program.
        arguments: one array per parameter.
        terms: how many terms a sum has at most: the tolerance grows with it.
        exact: outputs are equal bit for bit, NaN and the sign of zero aside.
    """

    name: str
    module: HloModule
    arguments: list[np.ndarray]
    terms: int = 1
    exact: bool = True


@dataclass
class Draft:
    """A case under construction."""

    rng: np.random.Generator
    name: str
    module: HloModule = field(init=False)
    builder: HloBuilder = field(init=False)
    arguments: list[np.ndarray] = field(default_factory=list)
    terms: int = 1
    exact: bool = True

    def __post_init__(self) -> None:
        self.module = HloModule("random")
        self.builder = HloBuilder.create(self.module, "main")

    def parameter(self, values: np.ndarray, dtype: str) -> HloInstruction:
        self.arguments.append(np.asarray(values, order="C"))
        return self.builder.parameter(array(dtype, np.shape(values)))

    def pick(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def dims(self, low: int = 0, high: int = 3, zero: bool = True) -> tuple[int, ...]:
        sizes = (0, 1, 1, 2, 3, 4, 5, 7) if zero and self.rng.random() < 0.15 else (1, 1, 2, 3, 4, 5, 7)
        return tuple(self.pick(sizes) for _ in range(int(self.rng.integers(low, high + 1))))

    def finish(self, root: HloInstruction) -> Case:
        self.module.set_entry(self.builder.build(root))
        return Case(self.name, self.module, self.arguments, self.terms, self.exact)


# -- values -----------------------------------------------------------------------------------------


def values(rng: np.random.Generator, dtype: str, dims: tuple[int, ...], special: bool = False) -> np.ndarray:
    """Random elements; with `special`, some infinite, NaN, tiny, huge, signed zeros, extreme integers."""
    info = DTYPES[dtype]
    if info.kind == "pred":
        return rng.integers(0, 2, dims).astype(bool)
    if info.is_integral:
        low = -(1 << (info.bits - 1)) if info.kind == "signed" else 0
        high = (1 << (info.bits - 1)) - 1 if info.kind == "signed" else (1 << info.bits) - 1
        made = rng.integers(-9 if low else 0, 10, dims).astype(np.int64)
        out = made.astype(info.numpy)
        if special:
            extremes = np.array([low, high, 0, 1, high - 1], dtype=object).astype(info.numpy)
            out = np.where(rng.random(dims) < 0.3, rng.choice(extremes, dims), out)
        return np.asarray(out, info.numpy)
    if info.kind == "complex":
        part = "f32" if dtype == "c64" else "f64"
        return (values(rng, part, dims, False) + 1j * values(rng, part, dims, False)).astype(info.numpy)
    out = rng.standard_normal(dims).astype(np.float64) * 2
    if special:
        finfo = ml_dtypes.finfo(info.numpy)
        extremes = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -2.5,
            float(finfo.max),
            -float(finfo.max),
            float(finfo.tiny),
            np.nan,
        ]
        if np.isinf(np.float64(np.inf).astype(info.numpy)):
            extremes += [np.inf, -np.inf]
        out = np.where(rng.random(dims) < 0.4, rng.choice(np.array(extremes), dims), out)
    return np.asarray(out).astype(info.numpy)


def small_integers(rng: np.random.Generator, dtype: str, dims: tuple[int, ...]) -> np.ndarray:
    """Values from -3 to 3 (0 to 6 if unsigned): sums and products of a few stay exact in every type."""
    if DTYPES[dtype].kind == "pred":
        return rng.integers(0, 2, dims).astype(bool)
    low = 0 if DTYPES[dtype].kind == "unsigned" else -3
    return rng.integers(low, low + 7, dims).astype(DTYPES[dtype].numpy)


# -- elementwise ------------------------------------------------------------------------------------

EXACT_UNARY = (
    "abs",
    "negate",
    "floor",
    "ceil",
    "round-nearest-afz",
    "round-nearest-even",
    "sign",
    "is-finite",
    "copy",
)
INEXACT_UNARY = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atanh",
    "cbrt",
    "cosine",
    "cosh",
    "erf",
    "exponential",
    "exponential-minus-one",
    "log",
    "log-plus-one",
    "logistic",
    "rsqrt",
    "sine",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
]
INTEGER_UNARY = ("abs", "negate", "not", "sign", "popcnt", "count-leading-zeros", "copy")
FLOAT_BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "remainder", "power", "atan2")
INTEGER_BINARY = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "remainder",
    "power",
    "and",
    "or",
    "xor",
    "shift-left",
    "shift-right-arithmetic",
    "shift-right-logical",
]
INEXACT_BINARY = ("divide", "power", "atan2", "remainder")
DIRECTIONS = ("EQ", "NE", "GE", "GT", "LE", "LT")


def unary(draft: Draft) -> Case:
    dims = draft.dims()
    if draft.rng.random() < 0.6:
        dtype, opcode = draft.pick(FLOATS), draft.pick((*EXACT_UNARY, *INEXACT_UNARY, *INEXACT_UNARY))
    else:
        dtype, opcode = draft.pick((*INTEGERS, "pred")), draft.pick(INTEGER_UNARY)
        if dtype == "pred":
            opcode = draft.pick(("not", "copy"))
        elif DTYPES[dtype].kind == "unsigned" and opcode in ("abs", "sign"):
            opcode = "popcnt"
    draft.name += f" {opcode} {dtype}"
    draft.exact = opcode not in INEXACT_UNARY
    special = opcode not in ("sine", "cosine", "tan", "acosh", "asinh", "sinh", "cosh")
    value = draft.parameter(values(draft.rng, dtype, dims, special), dtype)
    return draft.finish(draft.builder.add(opcode, value))


def binary(draft: Draft) -> Case:
    dims = draft.dims()
    floating = draft.rng.random() < 0.5
    dtype = draft.pick(FLOATS if floating else (*INTEGERS, "pred"))
    opcode = draft.pick(FLOAT_BINARY if floating else INTEGER_BINARY)
    if dtype == "pred":
        opcode = draft.pick(("and", "or", "xor"))
    draft.name += f" {opcode} {dtype}"
    draft.exact = not (floating and opcode in INEXACT_BINARY)
    special = opcode != "remainder" and (opcode != "power" or dtype not in UNSIGNED)
    a, b = (draft.parameter(values(draft.rng, dtype, dims, special), dtype) for _ in range(2))
    return draft.finish(draft.builder.add(opcode, a, b))


def complex_values(draft: Draft) -> Case:
    dims, dtype = draft.dims(), draft.pick(COMPLEX)
    part = "f32" if dtype == "c64" else "f64"
    draft.exact, draft.terms = False, 16
    choice = draft.pick(
        ("add", "multiply", "divide", "abs", "real", "imag", "complex", "exponential", "negate", "EQ")
    )
    draft.name += f" {choice} {dtype}"
    if choice == "complex":
        a, b = (draft.parameter(values(draft.rng, part, dims), part) for _ in range(2))
        return draft.finish(draft.builder.add("complex", a, b))
    a = draft.parameter(values(draft.rng, dtype, dims), dtype)
    if choice == "EQ":
        return draft.finish(draft.builder.compare(a, a, draft.pick(("EQ", "NE"))))
    if choice in ("add", "multiply", "divide"):
        return draft.finish(
            draft.builder.add(choice, a, draft.parameter(values(draft.rng, dtype, dims), dtype))
        )
    return draft.finish(draft.builder.add(choice, a))


def compare_select(draft: Draft) -> Case:
    dims, dtype = draft.dims(), draft.pick((*FLOATS, *INTEGERS, "pred"))
    draft.name += f" {dtype}"
    a, b = (draft.parameter(values(draft.rng, dtype, dims, True), dtype) for _ in range(2))
    direction = draft.pick(DIRECTIONS)
    if DTYPES[dtype].kind == "float" and draft.rng.random() < 0.3:
        predicate = draft.builder.add("compare", a, b, direction=direction, comparison_type="TOTALORDER")
    else:
        predicate = draft.builder.compare(a, b, direction)
    chosen = draft.builder.select(predicate, a, b)
    return draft.finish(draft.builder.tuple([predicate, chosen]))


def clamp(draft: Draft) -> Case:
    dims, dtype = draft.dims(), draft.pick((*FLOATS, *INTEGERS))
    draft.name += f" {dtype}"
    low, high = sorted(int(v) for v in draft.rng.integers(0, 6, 2))
    scalar = draft.rng.random() < 0.5
    bounds = [draft.builder.full(v, dtype, () if scalar else dims) for v in (low, high)]
    value = draft.parameter(values(draft.rng, dtype, dims, True), dtype)
    return draft.finish(draft.builder.add("clamp", bounds[0], value, bounds[1]))


def convert(draft: Draft) -> Case:
    every = (*FLOATS, *INTEGERS, "pred", *EIGHT_BIT_FLOATS, "s4", "u4")
    source, target = draft.pick(every), draft.pick(every)
    dims = draft.dims()
    draft.name += f" {source} to {target}"
    value = values(draft.rng, source, dims, source not in ("s4", "u4"))
    if DTYPES[source].kind == "float" and DTYPES[target].is_integral:
        value = np.where(np.isnan(value.astype(np.float64)), 0, value.astype(np.float64)).astype(value.dtype)
    if source == "f64" and DTYPES[target].kind == "float" and DTYPES[target].bits < 32:
        draft.exact = False
    return draft.finish(draft.builder.convert(draft.parameter(value, source), target))


def bitcast_convert(draft: Draft) -> Case:
    bits = draft.pick((8, 16, 32, 64))
    same = [t for t in (*FLOATS, *INTEGERS) if DTYPES[t].bits == bits]
    source, target = draft.pick(same), draft.pick(same)
    dims = draft.dims()
    other = draft.pick((8, 16, 32, 64))
    if other != bits and draft.rng.random() < 0.4:
        target = draft.pick([t for t in INTEGERS if DTYPES[t].bits == other])
        source = draft.pick([t for t in INTEGERS if DTYPES[t].bits == bits])
        dims = dims if bits > other else (*dims, other // bits)
    draft.name += f" {source} to {target}"
    ratio = DTYPES[source].bits / DTYPES[target].bits
    shape = dims if ratio == 1 else (*dims, int(ratio)) if ratio > 1 else dims[:-1]
    raw = draft.rng.integers(0, 256, (*dims, DTYPES[source].bits // 8), dtype=np.uint8)
    value = draft.parameter(raw.view(DTYPES[source].numpy).reshape(dims), source)
    return draft.finish(draft.builder.add("bitcast-convert", value, shape=array(target, shape)))


def reduce_precision(draft: Draft) -> Case:
    dtype, dims = draft.pick(("f32", "f64", "f16", "bf16")), draft.dims()
    most = {"f32": (8, 23), "f64": (11, 52), "f16": (5, 10), "bf16": (8, 7)}[dtype]
    exponent, mantissa = int(draft.rng.integers(2, most[0] + 1)), int(draft.rng.integers(1, most[1] + 1))
    draft.name += f" {dtype} {exponent} {mantissa}"
    value = draft.parameter(values(draft.rng, dtype, dims, True), dtype)
    made = draft.builder.add("reduce-precision", value, exponent_bits=exponent, mantissa_bits=mantissa)
    return draft.finish(made)


# -- data movement ----------------------------------------------------------------------------------

ANY = (*FLOATS, *INTEGERS, "pred")


def movement(draft: Draft) -> Case:
    dtype, dims = draft.pick(ANY), draft.dims(1, 4)
    kind = draft.pick(tuple(MOVES))
    draft.name += f" {kind} {dtype}"
    value = draft.parameter(values(draft.rng, dtype, dims), dtype)
    return draft.finish(MOVES[kind](draft, value))


def _move_reshape(draft: Draft, value: HloInstruction) -> HloInstruction:
    dims = list(value.shape.dims)
    if len(dims) > 1 and draft.rng.random() < 0.6:
        at = int(draft.rng.integers(len(dims) - 1))
        dims[at : at + 2] = [dims[at] * dims[at + 1]]
    else:
        dims.insert(int(draft.rng.integers(len(dims) + 1)), 1)
    return draft.builder.add("reshape", value, shape=array(value.shape.dtype, dims))


def _move_transpose(draft: Draft, value: HloInstruction) -> HloInstruction:
    order = tuple(int(i) for i in draft.rng.permutation(value.shape.rank))
    return draft.builder.add("transpose", value, dimensions=order)


def _move_broadcast(draft: Draft, value: HloInstruction) -> HloInstruction:
    rank = value.shape.rank + int(draft.rng.integers(0, 3))
    places = sorted(int(i) for i in draft.rng.permutation(rank)[: value.shape.rank])
    dims = list(draft.dims(rank, rank))
    for place, size in zip(places, value.shape.dims):
        dims[place] = size
    return draft.builder.broadcast(value, dims, places)


def _move_concatenate(draft: Draft, value: HloInstruction) -> HloInstruction:
    dim = int(draft.rng.integers(value.shape.rank))
    parts = [value]
    for _ in range(int(draft.rng.integers(1, 3))):
        dims = list(value.shape.dims)
        dims[dim] = int(draft.rng.integers(0, 4))
        parts.append(draft.parameter(values(draft.rng, value.shape.dtype, tuple(dims)), value.shape.dtype))
    return draft.builder.concatenate(parts, dim)


def _move_pad(draft: Draft, value: HloInstruction) -> HloInstruction:
    padding = []
    for size in value.shape.dims:
        interior = int(draft.rng.integers(0, 3))
        whole = size + max(size - 1, 0) * interior
        low = int(draft.rng.integers(-min(2, whole), 4))
        high = int(draft.rng.integers(-min(2, max(whole + low, 0)), 4)) if whole + low >= 0 else 3
        padding.append(attrs.PadDim(low, high, interior))
    filler = draft.parameter(values(draft.rng, value.shape.dtype, ()), value.shape.dtype)
    return draft.builder.pad(value, filler, padding)


def _move_slice(draft: Draft, value: HloInstruction) -> HloInstruction:
    starts, limits, strides = [], [], []
    for size in value.shape.dims:
        start = int(draft.rng.integers(0, size + 1))
        starts.append(start)
        limits.append(int(draft.rng.integers(start, size + 1)))
        strides.append(int(draft.rng.integers(1, 4)))
    return draft.builder.slice(value, starts, limits, strides)


def _move_reverse(draft: Draft, value: HloInstruction) -> HloInstruction:
    dims = tuple(d for d in range(value.shape.rank) if draft.rng.random() < 0.5)
    return draft.builder.add("reverse", value, dimensions=dims)


def _starts(draft: Draft, count: int) -> list[HloInstruction]:
    dtype = draft.pick(("s32", "s64", "u32", "s8"))
    low = 0 if dtype.startswith("u") else -2
    return [
        draft.parameter(draft.rng.integers(low, 6, ()).astype(DTYPES[dtype].numpy), dtype)
        for _ in range(count)
    ]


def _move_dynamic_slice(draft: Draft, value: HloInstruction) -> HloInstruction:
    sizes = [int(draft.rng.integers(0, size + 1)) for size in value.shape.dims]
    return draft.builder.dynamic_slice(value, _starts(draft, value.shape.rank), sizes)


def _move_dynamic_update_slice(draft: Draft, value: HloInstruction) -> HloInstruction:
    sizes = tuple(int(draft.rng.integers(0, size + 1)) for size in value.shape.dims)
    update = draft.parameter(values(draft.rng, value.shape.dtype, sizes), value.shape.dtype)
    return draft.builder.dynamic_update_slice(value, update, _starts(draft, value.shape.rank))


def _move_iota(draft: Draft, value: HloInstruction) -> HloInstruction:
    dtype = draft.pick((*FLOATS, *INTEGERS))
    made = draft.builder.iota(dtype, value.shape.dims, int(draft.rng.integers(value.shape.rank)))
    return draft.builder.tuple([made, value])


MOVES: dict[str, Callable[[Draft, HloInstruction], HloInstruction]] = {
    "reshape": _move_reshape,
    "transpose": _move_transpose,
    "broadcast": _move_broadcast,
    "concatenate": _move_concatenate,
    "pad": _move_pad,
    "slice": _move_slice,
    "reverse": _move_reverse,
    "dynamic-slice": _move_dynamic_slice,
    "dynamic-update-slice": _move_dynamic_update_slice,
    "iota": _move_iota,
}

# -- products ---------------------------------------------------------------------------------------


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


# -- indices ----------------------------------------------------------------------------------------


def _indexing(draft: Draft) -> tuple[tuple[int, ...], list[int], list[int], list[int], tuple[int, ...]]:
    """Dims of an operand; which are indexed, batched, inserted; sizes of the slices."""
    rank = int(draft.rng.integers(1, 4))
    dims = tuple(int(n) for n in draft.rng.integers(1, 6, rank))
    order = [int(i) for i in draft.rng.permutation(rank)]
    batched = order[:1] if rank > 1 and draft.rng.random() < 0.3 else []
    indexed = [d for d in order if d not in batched and draft.rng.random() < 0.7]
    indexed = indexed or [d for d in order if d not in batched][:1]
    inserted = sorted(d for d in range(rank) if d not in batched and draft.rng.random() < 0.5)
    sizes = tuple(
        1 if d in inserted or d in batched else int(draft.rng.integers(1, dims[d] + 1)) for d in range(rank)
    )
    return dims, indexed, batched, inserted, sizes


def _indices(
    draft: Draft, dims: tuple[int, ...], indexed: list[int], batched: list[int]
) -> tuple[HloInstruction, int, tuple[int, ...], tuple[int, ...]]:
    """Indices, index_vector_dim, their batching dims, sizes of their batch dims."""
    batch = list(draft.dims(1 if batched else 0, 2, zero=False))
    places = ()
    if batched:
        at = int(draft.rng.integers(len(batch)))
        batch[at] = dims[batched[0]]
    vector = int(draft.rng.integers(len(batch) + 1))
    shape = (*batch[:vector], len(indexed), *batch[vector:])
    if batched:
        places = (at + (at >= vector),)
    if len(indexed) == 1 and draft.rng.random() < 0.3:
        shape, vector = tuple(batch), len(batch)
        places = (at,) if batched else ()
    dtype = draft.pick(("s32", "s64", "u32", "u8"))
    low = 0 if dtype.startswith("u") else -2
    value = draft.parameter(draft.rng.integers(low, 7, shape).astype(DTYPES[dtype].numpy), dtype)
    return value, vector, places, tuple(batch)


def gather(draft: Draft) -> Case:
    dtype = draft.pick(ANY)
    dims, indexed, batched, inserted, sizes = _indexing(draft)
    draft.name += f" {dtype}"
    operand = draft.parameter(values(draft.rng, dtype, dims), dtype)
    indices, vector, places, batch = _indices(draft, dims, indexed, batched)
    kept = len(dims) - len(inserted) - len(batched)
    offsets = tuple(sorted(int(i) for i in draft.rng.permutation(len(batch) + kept)[:kept]))
    numbers = attrs.GatherDims(offsets, tuple(inserted), tuple(indexed), vector, tuple(batched), places)
    return draft.finish(draft.builder.gather(operand, indices, numbers, sizes))


def scatter(draft: Draft) -> Case:
    dtype = draft.pick((*FLOATS, *INTEGERS))
    dims, indexed, batched, inserted, sizes = _indexing(draft)
    opcode = draft.pick(("add", "maximum", "minimum", "multiply", "set"))
    draft.name += f" {opcode} {dtype}"
    operand = draft.parameter(small_integers(draft.rng, dtype, dims), dtype)
    indices, vector, places, batch = _indices(draft, dims, indexed, batched)
    kept = [d for d in range(len(dims)) if d not in inserted and d not in batched]
    windows = tuple(sorted(int(i) for i in draft.rng.permutation(len(batch) + len(kept))[: len(kept)]))
    shape = [0] * (len(batch) + len(kept))
    for place, d in zip(windows, kept):
        shape[place] = sizes[d]
    for place, size in zip([p for p in range(len(shape)) if p not in windows], batch):
        shape[place] = size
    updates = draft.parameter(small_integers(draft.rng, dtype, tuple(shape)), dtype)
    if opcode == "set":
        body = HloBuilder.create(draft.module, "set")
        body.parameter(array(dtype))
        computation = body.build(body.parameter(array(dtype)))
    else:
        computation = scalar_computation(draft.module, opcode, dtype)
    numbers = attrs.ScatterDims(windows, tuple(inserted), tuple(indexed), vector, tuple(batched), places)
    draft.exact = opcode != "multiply"
    draft.terms = 16
    return draft.finish(draft.builder.scatter(operand, indices, updates, numbers, computation))


# -- reductions -------------------------------------------------------------------------------------

IDENTITIES = {"add": 0, "multiply": 1, "and": -1, "or": 0, "xor": 0}


def _identity(opcode: str, dtype: str) -> np.ndarray:
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
    init = draft.builder.constant(_identity(opcode, dtype))
    computation = scalar_computation(draft.module, opcode, dtype)
    return draft.finish(draft.builder.reduce([value], [init], axes, computation))


def argmax(draft: Draft) -> Case:
    dims, dtype = draft.dims(1, 3), draft.pick((*FLOATS, "s32"))
    axis = int(draft.rng.integers(len(dims)))
    draft.name += f" {dtype}"
    body = HloBuilder.create(draft.module, "argmax")
    best, place, value, index = (body.parameter(array(t)) for t in (dtype, "s32", dtype, "s32"))
    greater = body.compare(best, value, "GT")
    tie = body.add("and", body.compare(best, value, "EQ"), body.compare(place, index, "LT"))
    keep = body.add("or", greater, tie)
    computation = body.build(body.tuple([body.select(keep, best, value), body.select(keep, place, index)]))
    source = draft.parameter(small_integers(draft.rng, dtype, dims), dtype)
    places = draft.builder.iota("s32", dims, axis)
    inits = [draft.builder.constant(_identity("maximum", dtype)), draft.builder.constant(0, "s32")]
    return draft.finish(draft.builder.reduce([source, places], inits, (axis,), computation))


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
    init = draft.builder.constant(_identity(opcode, dtype))
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


# -- control flow -----------------------------------------------------------------------------------


def loop(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 2), draft.pick(("f32", "s32", "f64"))
    state = tuple_of([array("s32"), array(dtype, dims)])
    trips = int(draft.rng.integers(0, 5))
    condition = HloBuilder.create(draft.module, "condition")
    counter = condition.element(condition.parameter(state), 0)
    condition.build(condition.compare(counter, condition.constant(trips, "s32"), "LT"))
    body = HloBuilder.create(draft.module, "body")
    given = body.parameter(state)
    step, value = body.element(given, 0), body.element(given, 1)
    after = body.add("add", value, body.broadcast(body.convert(step, dtype), dims))
    body.build(body.tuple([body.add("add", step, body.constant(1, "s32")), after]))
    draft.name += f" {dtype} {trips} trips"
    init = draft.builder.tuple(
        [draft.builder.constant(0, "s32"), draft.parameter(small_integers(draft.rng, dtype, dims), dtype)]
    )
    return draft.finish(draft.builder.loop(condition.computation, body.computation, init))


def conditional(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 2), draft.pick(("f32", "s32"))
    count = draft.pick((1, 2, 3))
    branches = []
    for number in range(count):
        branch = HloBuilder.create(draft.module, f"branch{number}")
        value = branch.parameter(array(dtype, dims))
        branches.append(branch.build(branch.add("multiply", value, branch.full(number + 2, dtype, dims))))
    if count == 2 and draft.rng.random() < 0.5:
        selector = draft.parameter(np.asarray(bool(draft.rng.random() < 0.5)), "pred")
    else:
        selector = draft.parameter(draft.rng.integers(-1, count + 2, ()).astype(np.int32), "s32")
    operands = [draft.parameter(small_integers(draft.rng, dtype, dims), dtype) for _ in range(count)]
    draft.name += f" {count} branches"
    return draft.finish(draft.builder.add("conditional", selector, *operands, called=branches))


def call_and_map(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 3), draft.pick(("f32", "s32", "f64"))
    body = HloBuilder.create(draft.module, "body")
    a, b = body.parameter(array(dtype)), body.parameter(array(dtype))
    body.build(body.select(body.compare(a, b, "LT"), body.add("subtract", b, a), body.constant(7, dtype)))
    callee = HloBuilder.create(draft.module, "callee")
    x, y = callee.parameter(array(dtype, dims)), callee.parameter(array(dtype, dims))
    callee.build(callee.add("map", x, y, dimensions=tuple(range(len(dims))), called=(body.computation,)))
    arguments = [draft.parameter(small_integers(draft.rng, dtype, dims), dtype) for _ in range(2)]
    draft.name += f" {dtype}"
    return draft.finish(draft.builder.call(callee.computation, arguments))


def bits(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 3), draft.pick(("u8", "u16", "u32", "u64"))
    algorithm, words = draft.pick((("rng_three_fry", 2), ("rng_philox", 3), ("rng_default", 2)))
    draft.name += f" {algorithm} {dtype}"
    state = draft.parameter(draft.rng.integers(0, 1 << 63, words, dtype=np.uint64), "u64")
    shape = tuple_of([array("u64", (words,)), array(dtype, dims)])
    return draft.finish(draft.builder.add("rng-bit-generator", state, shape=shape, algorithm=algorithm))


# -- graphs -----------------------------------------------------------------------------------------


def graph(draft: Draft) -> Case:
    """Ten to thirty exact operations on small integers, then some inexact ones that end in outputs."""
    dtype = draft.pick(("f32", "f32", "f64", "s32"))
    dims = draft.dims(1, 3, zero=False)
    pool = [draft.parameter(small_integers(draft.rng, dtype, dims), dtype) for _ in range(3)]
    sums = scalar_computation(draft.module, "add", dtype)
    for _ in range(int(draft.rng.integers(10, 30))):
        pool.append(_grow(draft, pool, dims, sums))
    outputs = [pool[-1], draft.pick(pool)]
    if dtype != "s32":
        draft.exact, draft.terms = False, 64
        outputs += [
            draft.builder.add(draft.pick(("tanh", "sine", "logistic", "erf", "cbrt")), draft.pick(pool))
            for _ in range(3)
        ]
    return draft.finish(draft.builder.tuple(outputs))


def _grow(draft: Draft, pool: list[HloInstruction], dims: tuple[int, ...], sums) -> HloInstruction:
    build, dtype = draft.builder, pool[0].shape.dtype
    a, b = draft.pick(pool), draft.pick(pool)
    kind = draft.pick(
        (
            "add",
            "subtract",
            "maximum",
            "minimum",
            "negate",
            "select",
            "reduce",
            "turn",
            "slice",
            "clamp",
            "abs",
        )
    )
    if kind in ("add", "subtract"):
        bound = build.full(4, dtype, dims)
        return build.add("clamp", build.add("negate", bound), build.add(kind, a, b), bound)
    if kind in ("maximum", "minimum"):
        return build.add(kind, a, b)
    if kind in ("negate", "abs"):
        return build.add(kind, a)
    if kind == "select":
        return build.select(build.compare(a, b, draft.pick(DIRECTIONS)), a, b)
    if kind == "clamp":
        return build.add("clamp", build.full(-2, dtype, ()), a, build.full(2, dtype, ()))
    axis = int(draft.rng.integers(len(dims)))
    if kind == "reduce":
        total = build.reduce([a], [build.constant(0, dtype)], (axis,), sums)
        kept = [d for d in range(len(dims)) if d != axis]
        spread = build.broadcast(total, dims, kept)
        return build.add("clamp", build.full(-3, dtype, ()), spread, build.full(3, dtype, ()))
    if kind == "turn":
        return build.add("reverse", a, dimensions=(axis,))
    cut = list(dims)
    cut[axis] -= 1
    head = build.slice(a, [0] * len(dims), cut)
    padding = [attrs.PadDim(0, 1 if d == axis else 0) for d in range(len(dims))]
    return build.pad(head, build.constant(1, dtype), padding)


FAMILIES: dict[str, Callable[[Draft], Case]] = {
    "unary": unary,
    "binary": binary,
    "complex": complex_values,
    "compare": compare_select,
    "clamp": clamp,
    "convert": convert,
    "bitcast-convert": bitcast_convert,
    "reduce-precision": reduce_precision,
    "movement": movement,
    "dot": dot,
    "convolution": convolution,
    "factorisation": factorisation,
    "fft": fourier,
    "gather": gather,
    "scatter": scatter,
    "reduce": reduce,
    "argmax": argmax,
    "reduce-window": reduce_window,
    "select-and-scatter": select_and_scatter,
    "sort": sort,
    "topk": topk,
    "batch-norm": batch_norm,
    "while": loop,
    "conditional": conditional,
    "call": call_and_map,
    "rng-bit-generator": bits,
    "graph": graph,
}


def random_case(family: str, seed: int) -> Case:
    """The case of a family for a seed: always the same."""
    draft = Draft(np.random.default_rng([seed, list(FAMILIES).index(family)]), f"{family}#{seed}")
    return FAMILIES[family](draft)


# -- comparison -------------------------------------------------------------------------------------

EPSILON = {
    "bf16": 2.0**-8,
    "f16": 2.0**-11,
    "f32": 2.0**-24,
    "f64": 2.0**-53,
    "c64": 2.0**-24,
    "c128": 2.0**-53,
}


def differences(got: list[np.ndarray], want: list[np.ndarray], case: Case) -> str:
    """What differs between two lists of outputs beyond rounding; "" if nothing.

    Values below the smallest normal number count as zero: XLA:CPU flushes them.
    """
    if len(got) != len(want):
        return f"{len(got)} outputs, expected {len(want)}"
    for number, (a, b) in enumerate(zip(got, want)):
        problem = _difference(np.asarray(a), np.asarray(b), case)
        if problem:
            return f"output {number}: {problem}"
    return ""


def _difference(a: np.ndarray, b: np.ndarray, case: Case) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
    names = {d.numpy: name for name, d in DTYPES.items()}
    dtype = names[a.dtype]
    if DTYPES[dtype].kind not in ("float", "complex"):
        return "" if np.array_equal(a, b) else f"{a.ravel()[:8]}, expected {b.ravel()[:8]}"
    wide = np.complex128 if DTYPES[dtype].kind == "complex" else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
    base = {"c64": np.float32, "c128": np.float64}.get(dtype, DTYPES[dtype].numpy)
    tiny = float(ml_dtypes.finfo(base).tiny)
    with np.errstate(all="ignore"):
        close = np.abs(x - y) <= 2 * tiny
        if not case.exact:
            scale = np.maximum(
                np.abs(y), np.max(np.abs(y[np.isfinite(y)]), initial=1) if case.terms > 1 else 0
            )
            close |= np.abs(x - y) <= (8 + 2 * case.terms) * EPSILON.get(dtype, 2.0**-3) * scale
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | close
    if np.all(same):
        return ""
    where = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"at {where}: {a[where]}, expected {b[where]} ({int(np.sum(~same))} of {a.size} differ)"
