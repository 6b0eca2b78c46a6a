"""A program for each rule of the algebraic simplifier, and what it must have become after the rule."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo import HloBuilder
from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.simplify.algebra import (
    arithmetic,
    broadcasts,
    conversions,
    dynamic,
    logic,
    powers,
    products,
    reductions,
    reshapes,
    slices,
    tuples,
)

F, I, U, P = "f32[4]", "s32[4]", "u32[4]", "pred[4]"


def k(b: HloBuilder, value, like):
    """A value everywhere, in the shape of another one."""
    return b.full(value, like.shape.dtype, like.shape.dims)


def sums(b: HloBuilder, dtype: str = "f32", opcode: str = "add"):
    return scalar_computation(b.computation.module, opcode, dtype)


def total(b: HloBuilder, x, *dims: int, init=0, opcode: str = "add"):
    dtype = x.shape.dtype
    return b.reduce([x], [b.constant(np.asarray(init, x.shape.numpy_dtype))], dims, sums(b, dtype, opcode))


def at(b: HloBuilder, *numbers: int):
    return [b.constant(n, "s32") for n in numbers]


def turned(b: HloBuilder, x, *order: int):
    return b.add("transpose", x, dimensions=order)


def shaped(b: HloBuilder, x, *dims: int):
    return b.add("reshape", x, shape=array(x.shape.dtype, dims))


# rule: (shapes of parameters, program, what its text holds after the rule)
EXAMPLES = {
    arithmetic.constant_to_the_right: (F, lambda b, x: b.add("multiply", k(b, 2, x), x), "multiply(p0,"),
    arithmetic.gather_constants: (
        I,
        lambda b, x: b.add("add", b.add("add", x, k(b, 2, x)), k(b, 3, x)),
        "add(p0,",
    ),
    arithmetic.add_zero: (F, lambda b, x: b.add("add", x, k(b, 0, x)), "ROOT p0"),
    arithmetic.add_negative_zero: (F, lambda b, x: b.add("add", x, k(b, -0.0, x)), "ROOT p0"),
    arithmetic.add_negation: (
        (F, F),
        lambda b, x, y: b.add("add", b.add("negate", x), y),
        "subtract(p1, p0)",
    ),
    arithmetic.subtract_zero: (F, lambda b, x: b.add("subtract", x, k(b, 0, x)), "ROOT p0"),
    arithmetic.subtract_itself: (I, lambda b, x: b.add("subtract", x, x), "broadcast("),
    arithmetic.subtract_negation: (
        (F, F),
        lambda b, x, y: b.add("subtract", x, b.add("negate", y)),
        "add(p0, p1)",
    ),
    arithmetic.multiply_one: (F, lambda b, x: b.add("divide", x, k(b, 1, x)), "ROOT p0"),
    arithmetic.multiply_zero: (I, lambda b, x: b.add("multiply", x, k(b, 0, x)), "broadcast("),
    arithmetic.multiply_minus_one: (F, lambda b, x: b.add("divide", x, k(b, -1, x)), "negate(p0)"),
    arithmetic.multiply_negations: (
        (F, F),
        lambda b, x, y: b.add("divide", b.add("negate", x), b.add("negate", y)),
        "divide(p0, p1)",
    ),
    arithmetic.divide_by_power_of_two: (F, lambda b, x: b.add("divide", x, k(b, 4, x)), "constant(0.25)"),
    arithmetic.divide_unsigned_by_power_of_two: (
        U,
        lambda b, x: b.add("add", b.add("divide", x, k(b, 8, x)), b.add("remainder", x, k(b, 8, x))),
        "shift-right-logical(p0,",
    ),
    arithmetic.remainder_of_one: (I, lambda b, x: b.add("remainder", x, k(b, 1, x)), "broadcast("),
    arithmetic.negate_twice: (F, lambda b, x: b.add("negate", b.add("negate", x)), "ROOT p0"),
    arithmetic.negate_difference: (
        (I, I),
        lambda b, x, y: b.add("negate", b.add("subtract", x, y)),
        "subtract(p1, p0)",
    ),
    arithmetic.same_again: (F, lambda b, x: b.add("floor", b.add("floor", x)), "floor(p0)"),
    arithmetic.absolute_of_negation: (F, lambda b, x: b.add("abs", b.add("negate", x)), "abs(p0)"),
    logic.neutral: (F, lambda b, x: b.add("maximum", x, k(b, -np.inf, x)), "ROOT p0"),
    logic.absorbing: (I, lambda b, x: b.add("or", x, k(b, -1, x)), "ROOT broadcast"),
    logic.with_itself: (F, lambda b, x: b.add("maximum", x, x), "ROOT p0"),
    logic.xor_itself: (I, lambda b, x: b.add("xor", x, x), "broadcast("),
    logic.not_not: (I, lambda b, x: b.add("not", b.add("not", x)), "ROOT p0"),
    logic.not_compare: ((F, F), lambda b, x, y: b.add("not", b.compare(x, y, "EQ")), "direction=NE"),
    logic.shift_by_nothing: (I, lambda b, x: b.add("shift-left", x, k(b, 40, x)), "broadcast("),
    logic.shift_twice: (
        I,
        lambda b, x: b.add("shift-left", b.add("shift-left", x, k(b, 3, x)), k(b, 4, x)),
        "constant(7)",
    ),
    logic.clamp_full_range: (
        I,
        lambda b, x: b.add("clamp", k(b, -(2**31), x), x, k(b, 2**31 - 1, x)),
        "ROOT p0",
    ),
    logic.clamp_iota: (
        I,
        lambda b, x: b.add("add", x, b.add("clamp", *at(b, 0), b.iota("s32", (4,), 0), *at(b, 3))),
        "add(p0, iota",
    ),
    logic.clamp_between_equal: (I, lambda b, x: b.add("clamp", *at(b, 2), x, *at(b, 2)), "ROOT broadcast"),
    logic.compare_itself: (I, lambda b, x: b.compare(x, x, "LT"), "constant(false)"),
    logic.compare_constant_to_the_right: (F, lambda b, x: b.compare(k(b, 1, x), x, "LT"), "direction=GT"),
    logic.compare_bounded: (U, lambda b, x: b.compare(x, k(b, 0, x), "LT"), "constant(false)"),
    logic.compare_boolean: (P, lambda b, p: b.compare(p, k(b, False, p), "EQ"), "not(p0)"),
    logic.select_constant: ((F, F), lambda b, x, y: b.select(b.full(False, "pred", (4,)), x, y), "ROOT p1"),
    logic.select_equal: ((P, F), lambda b, p, x: b.select(p, x, x), "ROOT p1"),
    logic.select_not: ((P, F, F), lambda b, p, x, y: b.select(b.add("not", p), x, y), "select(p0, p2, p1)"),
    logic.select_boolean: (P, lambda b, p: b.select(p, k(b, False, p), k(b, True, p)), "not(p0)"),
    logic.select_again: (
        (P, F, F, F),
        lambda b, p, x, y, z: b.select(p, b.select(p, x, y), z),
        "select(p0, p1, p3)",
    ),
    powers.power_of_simple_exponent: (F, lambda b, x: b.add("power", x, k(b, 2, x)), "multiply(p0, p0)"),
    powers.power_of_half: (F, lambda b, x: b.add("power", b.add("abs", x), k(b, 0.5, x)), "sqrt("),
    conversions.convert_nothing: (F, lambda b, x: b.add("convert", x, shape=x.shape), "ROOT p0"),
    conversions.convert_twice: ("bf16[4]", lambda b, x: b.convert(b.convert(x, "f32"), "bf16"), "ROOT p0"),
    conversions.convert_broadcast: (F, lambda b, x: b.convert(b.broadcast(x, (4, 3), (0,)), "f64"), "f64[4]"),
    conversions.convert_iota: (
        F,
        lambda b, x: b.add("add", x, b.convert(b.iota("s32", (4,), 0), "f32")),
        "f32[4]{0} iota",
    ),
    conversions.bitcast_convert_twice: (
        F,
        lambda b, x: b.add(
            "bitcast-convert", b.add("bitcast-convert", x, shape=array("s32", (4,))), shape=x.shape
        ),
        "ROOT p0",
    ),
    conversions.reduce_no_precision: (
        F,
        lambda b, x: b.add("reduce-precision", x, exponent_bits=8, mantissa_bits=23),
        "ROOT p0",
    ),
    conversions.copy_nothing: (F, lambda b, x: b.add("copy", x), "ROOT p0"),
    reshapes.reshape_nothing: (F, lambda b, x: b.add("reshape", x, shape=x.shape), "ROOT p0"),
    reshapes.reshape_twice: ("f32[4,3]", lambda b, x: shaped(b, shaped(b, x, 12), 2, 6), "reshape(p0)"),
    reshapes.reshape_of_moved_ones: (
        "f32[4,1,3]",
        lambda b, x: shaped(b, turned(b, x, 1, 0, 2), 2, 6),
        "reshape(p0)",
    ),
    reshapes.transpose_nothing: ("f32[4,3]", lambda b, x: turned(b, x, 0, 1), "ROOT p0"),
    reshapes.transpose_twice: (
        "f32[4,3,2]",
        lambda b, x: turned(b, turned(b, x, 1, 2, 0), 1, 0, 2),
        "transpose(p0), dimensions={2,1,0}",
    ),
    reshapes.transpose_of_ones: ("f32[4,1]", lambda b, x: turned(b, x, 1, 0), "reshape(p0)"),
    reshapes.transpose_of_iota: (
        "f32[3,4]",
        lambda b, x: b.add("add", x, turned(b, b.iota("f32", (4, 3), 0), 1, 0)),
        "iota_dimension=1",
    ),
    reshapes.known_size: (
        "f32[4,3]",
        lambda b, x: b.add("get-dimension-size", x, dimensions=(1,)),
        "s32[] constant(3)",
    ),
    reshapes.bitcast_nothing: (
        "f32[4,3]",
        lambda b, x: b.add("bitcast", b.add("bitcast", x, shape=array("f32", (12,))), shape=x.shape),
        "ROOT p0",
    ),
    products.dot_of_nothing: (("f32[4,0]", "f32[0,3]"), lambda b, x, y: b.dot(x, y), "broadcast("),
    products.dot_of_ones: (("f32[4,1]", "f32[1,3]"), lambda b, x, y: b.dot(x, y), "multiply("),
    products.transpose_of_dot: (
        ("f32[4,5]", "f32[5,3]"),
        lambda b, x, y: turned(b, b.dot(x, y), 1, 0),
        "dot(p1, p0)",
    ),
    broadcasts.broadcast_nothing: (
        F,
        lambda b, x: b.add("broadcast", x, shape=x.shape, dimensions=(0,)),
        "ROOT p0",
    ),
    broadcasts.broadcast_twice: (
        F,
        lambda b, x: b.broadcast(b.broadcast(x, (3, 4), (1,)), (3, 2, 4), (0, 2)),
        "broadcast(p0), dimensions={2}",
    ),
    broadcasts.broadcast_of_reshape: (
        F,
        lambda b, x: b.broadcast(shaped(b, x, 1, 4), (1, 4, 3), (0, 1)),
        "broadcast(p0), dimensions={1}",
    ),
    broadcasts.broadcast_of_iota: (
        "f32[4,3]",
        lambda b, x: b.add("add", x, b.broadcast(b.iota("f32", (3,), 0), (4, 3), (1,))),
        "iota(), iota_dimension=1",
    ),
    broadcasts.iota_of_one: ("f32[1]", lambda b, x: b.add("add", x, b.iota("f32", (1,), 0)), "constant(0)"),
    broadcasts.reshape_of_broadcast: (
        F,
        lambda b, x: shaped(b, b.broadcast(x, (4, 3), (0,)), 4, 1, 3),
        "broadcast(p0), dimensions={0}",
    ),
    broadcasts.transpose_of_broadcast: (
        "f32[4,3]",
        lambda b, x: turned(b, b.broadcast(x, (4, 2, 3), (0, 2)), 2, 1, 0),
        "transpose(p0)",
    ),
    broadcasts.sink: (
        (F, F),
        lambda b, x, y: b.add("add", b.broadcast(x, (4, 3), (0,)), b.broadcast(y, (4, 3), (0,))),
        "add(p0, p1)",
    ),
    broadcasts.reverse_nothing: (
        F,
        lambda b, x: b.add("reverse", b.broadcast(x, (3, 4), (1,)), dimensions=(0,)),
        "ROOT broadcast",
    ),
    slices.slice_nothing: (F, lambda b, x: b.slice(x, (0,), (4,)), "ROOT p0"),
    slices.slice_twice: (
        "f32[20]",
        lambda b, x: b.slice(b.slice(x, (3,), (20,), (2,)), (1,), (8,), (3,)),
        "slice={[5:18:6]}",
    ),
    slices.slice_of_concatenate: (
        (F, F),
        lambda b, x, y: b.slice(b.concatenate([x, y], 0), (5,), (7,)),
        "slice(p1), slice={[1:3]}",
    ),
    slices.slice_of_pad: (
        F,
        lambda b, x: b.slice(b.pad(x, *[k(b, 0, total(b, x, 0))], [PadDim(2, 3)]), (3,), (5,)),
        "slice(p0), slice={[1:3]}",
    ),
    slices.slice_of_broadcast: (
        F,
        lambda b, x: b.slice(b.broadcast(x, (4, 9), (0,)), (1, 2), (3, 7)),
        "slice(p0), slice={[1:3]}",
    ),
    slices.slice_of_iota: (
        F,
        lambda b, x: b.add("add", x, b.slice(b.iota("f32", (9,), 0), (0,), (4,))),
        "f32[4]{0} iota",
    ),
    slices.pad_nothing: (F, lambda b, x: b.pad(x, b.constant(0.0, "f32"), [PadDim(0, 0)]), "ROOT p0"),
    slices.pad_of_nothing: (
        "f32[0]",
        lambda b, x: b.pad(x, b.constant(3.0, "f32"), [PadDim(2, 2)]),
        "ROOT broadcast",
    ),
    slices.pad_twice: (
        F,
        lambda b, x: b.pad(
            b.pad(x, b.constant(0.0, "f32"), [PadDim(1, 2)]), b.constant(0.0, "f32"), [PadDim(3, 4)]
        ),
        "pad(p0, ",
    ),
    slices.pad_negative: (
        F,
        lambda b, x: b.pad(x, b.constant(0.0, "f32"), [PadDim(-1, 2)]),
        "slice={[1:6]}",
    ),
    slices.concatenate_one: (
        (F, "f32[0]"),
        lambda b, x, y: b.add("concatenate", x, y, dimensions=(0,)),
        "ROOT p0",
    ),
    slices.concatenate_nested: (
        (F, F, F),
        lambda b, x, y, z: b.concatenate([x, b.concatenate([y, z], 0)], 0),
        "concatenate(p0, p1, p2)",
    ),
    slices.concatenate_neighbours: (
        F,
        lambda b, x: b.concatenate([b.slice(x, (0,), (2,)), b.slice(x, (2,), (3,))], 0),
        "slice={[0:3]}",
    ),
    slices.concatenate_splats: (F, lambda b, x: b.concatenate([x, k(b, 7, x)], 0), "padding=0_4"),
    dynamic.slice_at_constant: (F, lambda b, x: b.dynamic_slice(x, at(b, 9), (2,)), "slice={[2:4]}"),
    dynamic.slice_of_broadcast: (
        (F, "s32[]"),
        lambda b, x, i: b.dynamic_slice(b.broadcast(x, (4, 5), (0,)), [i, i], (2, 3)),
        "dynamic-slice(p0, p1)",
    ),
    dynamic.slice_of_update: (
        (F, "f32[2]", "s32[]"),
        lambda b, x, u, i: b.dynamic_slice(b.dynamic_update_slice(x, u, [i]), [i], (2,)),
        "ROOT p1",
    ),
    dynamic.update_everything: (
        (F, F, "s32[]"),
        lambda b, x, u, i: b.dynamic_update_slice(x, u, [i]),
        "ROOT p1",
    ),
    dynamic.update_with_itself: (
        (F, "s32[]"),
        lambda b, x, i: b.dynamic_update_slice(x, b.dynamic_slice(x, [i], (2,)), [i]),
        "ROOT p0",
    ),
    dynamic.update_again: (
        (F, "f32[2]", "f32[2]", "s32[]"),
        lambda b, x, u, v, i: b.dynamic_update_slice(b.dynamic_update_slice(x, u, [i]), v, [i]),
        "dynamic-update-slice(p0, p2, p3)",
    ),
    dynamic.set_whole_size: (
        F,
        lambda b, x: b.add("set-dimension-size", x, b.constant(4, "s32"), shape=x.shape, dimensions=(0,)),
        "ROOT p0",
    ),
    dynamic.update_of_splat: (
        "f32[2]",
        lambda b, u: b.dynamic_update_slice(b.full(5, "f32", (6,)), u, at(b, 3)),
        "padding=3_1",
    ),
    reductions.reduce_nothing: ("f32[4,1]", lambda b, x: total(b, x, 1), "reshape(p0)"),
    reductions.reduce_of_nothing: ("f32[4,0]", lambda b, x: total(b, x, 1, init=3), "broadcast("),
    reductions.reduce_of_transpose: (
        "f32[4,3]",
        lambda b, x: total(b, turned(b, x, 1, 0), 0),
        "reduce(p0, constant.2), dimensions={1}",
    ),
    reductions.reduce_of_reshape: ("f32[4,3]", lambda b, x: total(b, shaped(b, x, 2, 6), 0, 1), "reduce(p0,"),
    reductions.reduce_twice: ("f32[4,3]", lambda b, x: total(b, total(b, x, 0), 0), "dimensions={0,1}"),
    reductions.reduce_of_broadcast: (
        F,
        lambda b, x: total(b, b.broadcast(x, (4, 6), (0,)), 1),
        "constant(6)",
    ),
    tuples.tuple_of_constants: (
        (),
        lambda b: b.element(b.literal((np.ones((), np.float32), np.arange(2, dtype=np.int32))), 1),
        "get-tuple-element(tuple",
    ),
    tuples.element_of_tuple: (
        (F, F),
        lambda b, x, y: b.add("get-tuple-element", b.tuple([x, y]), index=1),
        "ROOT p1",
    ),
    tuples.tuple_of_elements: (
        "(f32[4], s32[4])",
        lambda b, t: b.tuple([b.element(t, 0), b.element(t, 1)]),
        "ROOT p0",
    ),
    powers.power_of_half_of_any: (F, lambda b, x: b.add("power", x, k(b, 0.5, x)), "sqrt(p0)"),
    powers.divide_by_root: ((F, F), lambda b, x, y: b.add("divide", x, b.add("sqrt", y)), "rsqrt(p1)"),
    powers.multiply_exponentials: (
        (F, F),
        lambda b, x, y: b.add("multiply", b.add("exponential", x), b.add("exponential", y)),
        "add(p0, p1)",
    ),
    powers.multiply_roots: (F, lambda b, x: b.add("multiply", *[b.add("sqrt", x)] * 2), "ROOT p0"),
    powers.multiply_by_zero: (F, lambda b, x: b.add("multiply", x, k(b, 0, x)), "broadcast("),
    powers.logarithm_of_exponential: (F, lambda b, x: b.add("log", b.add("exponential", x)), "ROOT p0"),
}
