"""Cases of elementwise operations and conversions."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.shape import array
from tests.support.random_hlo.draft import (
    COMPLEX,
    EIGHT_BIT_FLOATS,
    FLOATS,
    INTEGERS,
    SIGNED,
    TINY,
    UNSIGNED,
    Case,
    Draft,
    values,
)

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


UNARY = [
    *((opcode, dtype) for opcode in (*EXACT_UNARY, *INEXACT_UNARY) for dtype in FLOATS),
    *((opcode, dtype) for opcode in INTEGER_UNARY for dtype in SIGNED),
    *((opcode, dtype) for opcode in ("not", "popcnt", "count-leading-zeros") for dtype in UNSIGNED),
    ("not", "pred"),
]
BINARY = [
    *((opcode, dtype) for opcode in FLOAT_BINARY for dtype in FLOATS),
    *((opcode, dtype) for opcode in INTEGER_BINARY for dtype in INTEGERS),
    *((opcode, "pred") for opcode in ("and", "or", "xor")),
]


def unary(draft: Draft) -> Case:
    dims = draft.dims()
    opcode, dtype = draft.in_turn(UNARY)
    draft.name += f" {opcode} {dtype}"
    draft.exact = opcode not in INEXACT_UNARY
    special = opcode not in ("sine", "cosine", "tan", "acosh", "asinh", "sinh", "cosh")
    value = draft.parameter(values(draft.rng, dtype, dims, special), dtype)
    return draft.finish(draft.builder.add(opcode, value))


def binary(draft: Draft) -> Case:
    dims = draft.dims()
    opcode, dtype = draft.in_turn(BINARY)
    draft.name += f" {opcode} {dtype}"
    draft.exact = not (dtype in FLOATS and opcode in INEXACT_BINARY)
    special = opcode != "remainder" and (
        opcode != "power" or dtype in FLOATS
    )  # XLA:CPU wraps huge powers early
    a, b = (draft.parameter(values(draft.rng, dtype, dims, special), dtype) for _ in range(2))
    return draft.finish(draft.builder.add(opcode, a, b))


def complex_values(draft: Draft) -> Case:
    dims, dtype = draft.dims(), draft.pick(COMPLEX)
    part = "f32" if dtype == "c64" else "f64"
    draft.exact, draft.terms = False, 16
    choice = draft.in_turn(
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
    every = (*FLOATS, *INTEGERS, "pred", *EIGHT_BIT_FLOATS, *TINY)
    source, target = draft.pick(every), draft.pick(every)
    dims = draft.dims()
    draft.name += f" {source} to {target}"
    value = values(draft.rng, source, dims, source not in TINY)
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
