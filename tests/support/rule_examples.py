"""A program for each rule of the algebraic simplifier, and what it must have become after the rule."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo import HloBuilder
from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.simplify.algebra import elementwise, movement, products

F = "f32[4]"


def marked(b: HloBuilder, x, target: str = "Sharding", shape=None, partitions: int = 1):
    """A custom call of one operand."""
    b.computation.module.num_partitions = partitions
    return b.add("custom-call", x, shape=shape or x.shape, custom_call_target=target)


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
    elementwise.constant_to_the_right: (F, lambda b, x: b.add("multiply", k(b, 2, x), x), "multiply(p0,"),
    elementwise.add_zero: (F, lambda b, x: b.add("add", x, k(b, 0, x)), "ROOT p0"),
    elementwise.subtract_zero: (F, lambda b, x: b.add("subtract", x, k(b, 0, x)), "ROOT p0"),
    elementwise.multiply_one: (F, lambda b, x: b.add("divide", x, k(b, 1, x)), "ROOT p0"),
    elementwise.divide_by_power_of_two: (F, lambda b, x: b.add("divide", x, k(b, 4, x)), "constant(0.25)"),
    elementwise.neutral: (F, lambda b, x: b.add("maximum", x, k(b, -np.inf, x)), "ROOT p0"),
    elementwise.compare_constant_to_the_right: (
        F,
        lambda b, x: b.compare(k(b, 1, x), x, "LT"),
        "direction=GT",
    ),
    elementwise.select_constant: (
        (F, F),
        lambda b, x, y: b.select(b.full(False, "pred", (4,)), x, y),
        "ROOT p1",
    ),
    elementwise.power_of_simple_exponent: (F, lambda b, x: b.add("power", x, k(b, 2, x)), "multiply(p0, p0)"),
    elementwise.convert_twice: ("bf16[4]", lambda b, x: b.convert(b.convert(x, "f32"), "bf16"), "ROOT p0"),
    elementwise.copy_nothing: (F, lambda b, x: b.add("copy", x), "ROOT p0"),
    movement.reshape_nothing: (F, lambda b, x: b.add("reshape", x, shape=x.shape), "ROOT p0"),
    movement.reshape_twice: ("f32[4,3]", lambda b, x: shaped(b, shaped(b, x, 12), 2, 6), "reshape(p0)"),
    movement.transpose_twice: (
        "f32[4,3,2]",
        lambda b, x: turned(b, turned(b, x, 1, 2, 0), 1, 0, 2),
        "transpose(p0), dimensions={2,1,0}",
    ),
    movement.transpose_of_ones: ("f32[4,1]", lambda b, x: turned(b, x, 1, 0), "reshape(p0)"),
    movement.known_size: (
        "f32[4,3]",
        lambda b, x: b.add("get-dimension-size", x, dimensions=(1,)),
        "s32[] constant(3)",
    ),
    movement.bitcast_nothing: (
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
    movement.broadcast_nothing: (
        F,
        lambda b, x: b.add("broadcast", x, shape=x.shape, dimensions=(0,)),
        "ROOT p0",
    ),
    movement.broadcast_twice: (
        F,
        lambda b, x: b.broadcast(b.broadcast(x, (3, 4), (1,)), (3, 2, 4), (0, 2)),
        "broadcast(p0), dimensions={2}",
    ),
    movement.sink: (
        (F, F),
        lambda b, x, y: b.add("add", b.broadcast(x, (4, 3), (0,)), b.broadcast(y, (4, 3), (0,))),
        "add(p0, p1)",
    ),
    movement.slice_nothing: (F, lambda b, x: b.slice(x, (0,), (4,)), "ROOT p0"),
    movement.pad_nothing: (F, lambda b, x: b.pad(x, b.constant(0.0, "f32"), [PadDim(0, 0)]), "ROOT p0"),
    movement.slice_at_constant: (F, lambda b, x: b.dynamic_slice(x, at(b, 9), (2,)), "slice={[2:4]}"),
    movement.update_everything: (
        (F, F, "s32[]"),
        lambda b, x, u, i: b.dynamic_update_slice(x, u, [i]),
        "ROOT p1",
    ),
    movement.set_whole_size: (
        F,
        lambda b, x: b.add("set-dimension-size", x, b.constant(4, "s32"), shape=x.shape, dimensions=(0,)),
        "ROOT p0",
    ),
    movement.drop_mark: (F, marked, "ROOT p0"),
    products.reduce_nothing: ("f32[4,1]", lambda b, x: total(b, x, 1), "reshape(p0)"),
    products.reduce_of_nothing: ("f32[4,0]", lambda b, x: total(b, x, 1, init=3), "broadcast("),
    movement.tuple_of_constants: (
        (),
        lambda b: b.element(b.literal((np.ones((), np.float32), np.arange(2, dtype=np.int32))), 1),
        "get-tuple-element(tuple",
    ),
    movement.copy_of_tuple: ((F, F), lambda b, x, y: b.add("copy", b.tuple([x, y])), "ROOT tuple"),
    movement.element_of_tuple: (
        (F, F),
        lambda b, x, y: b.add("get-tuple-element", b.tuple([x, y]), index=1),
        "ROOT p1",
    ),
    movement.tuple_of_elements: (
        "(f32[4], s32[4])",
        lambda b, t: b.tuple([b.element(t, 0), b.element(t, 1)]),
        "ROOT p0",
    ),
}
