"""Lowering of elementwise operations, of data movement, and of control flow.

Regions of loops and branches read values from outside.  Computations of HLO cannot, so these values become
elements of the loop's state, or of the tuple that a branch takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import PadDim
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule, plain

_SAME = [
    "abs",
    "add",
    "and",
    "atan2",
    "cbrt",
    "ceil",
    "clamp",
    "complex",
    "cosine",
    "divide",
    "exponential",
    "floor",
    "imag",
    "is_finite",
    "log",
    "logistic",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "power",
    "real",
    "remainder",
    "rsqrt",
    "select",
    "sign",
    "sine",
    "sqrt",
    "subtract",
    "tan",
    "tanh",
    "xor",
    "count_leading_zeros",
    "exponential_minus_one",
    "log_plus_one",
    "round_nearest_afz",
    "round_nearest_even",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
]


def same(site: LoweringSite) -> HloInstruction:
    opcode = site.name.partition(".")[2].replace("_", "-")
    return site.build.add(opcode, *site.operands)


def compare(site: LoweringSite) -> HloInstruction:
    """HLO marks only the total order of floats; other comparisons follow from the element type."""
    total = site.attribute("compare_type") == "TOTALORDER"
    return site.build.add(
        "compare",
        *site.operands,
        direction=site.required("comparison_direction"),
        comparison_type="TOTALORDER" if total else None,
    )


def mapped(site: LoweringSite) -> HloInstruction:
    return site.build.add(
        "map", *site.operands, dimensions=site.required("dimensions"), called=(site.region(),)
    )


ELEMENTWISE: dict[str, Rule] = {
    **{f"stablehlo.{name}": same for name in _SAME},
    "stablehlo.bitcast_convert": plain("bitcast-convert", shaped=True),
    "stablehlo.compare": compare,
    "stablehlo.convert": plain("convert", shaped=True),
    "stablehlo.map": mapped,
    "stablehlo.reduce_precision": plain(
        "reduce-precision", exponent_bits="exponent_bits", mantissa_bits="mantissa_bits"
    ),
}


def constant(site: LoweringSite) -> HloInstruction:
    value = site.required("value")
    if value.size > 1 and not any(value.strides):
        scalar = site.build.constant(value.reshape(-1)[0])
        return site.build.broadcast(scalar, value.shape)
    return site.build.constant(value)


def broadcast_in_dim(site: LoweringSite) -> HloInstruction:
    """HLO's broadcast does not stretch dims of size 1: those are dropped first."""
    (value,), dims = site.operands, site.required("broadcast_dimensions")
    kept = [i for i, d in enumerate(dims) if value.shape.dims[i] == site.shape.dims[d]]
    if len(kept) < value.shape.rank:
        value = site.build.reshape(value, [value.shape.dims[i] for i in kept])
    return site.build.broadcast(value, site.shape.dims, [dims[i] for i in kept])


def concatenate(site: LoweringSite) -> HloInstruction:
    """One after the other."""
    return site.build.add("concatenate", *site.operands, dimensions=(site.required("dimension"),))


def pad(site: LoweringSite) -> HloInstruction:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    sides = zip(*(site.required(name) for name in names))
    return site.build.pad(site.operands[0], site.operands[1], [PadDim(*side) for side in sides])


def slice_(site: LoweringSite) -> HloInstruction:
    bounds = (site.required(name) for name in ("start_indices", "limit_indices", "strides"))
    return site.build.slice(site.operands[0], *bounds)


def dynamic_slice(site: LoweringSite) -> HloInstruction:
    return site.build.dynamic_slice(site.operands[0], site.operands[1:], site.required("slice_sizes"))


def dynamic_update_slice(site: LoweringSite) -> HloInstruction:
    value, update, *starts = site.operands
    return site.build.dynamic_update_slice(value, update, starts)


def dimension_size(site: LoweringSite) -> HloInstruction:
    return site.build.constant(site.operands[0].shape.dims[site.required("dimension")], "s32")


def gather(site: LoweringSite) -> HloInstruction:
    return site.build.add(
        "gather",
        *site.operands,
        gather_dims=site.required("dimension_numbers"),
        slice_sizes=site.required("slice_sizes"),
        indices_are_sorted=site.attribute("indices_are_sorted", False),
    )


def scatter(site: LoweringSite) -> Sequence[HloInstruction]:
    scattered = site.build.add(
        "scatter",
        *site.operands,
        scatter_dims=site.required("scatter_dimension_numbers"),
        indices_are_sorted=site.attribute("indices_are_sorted", False),
        unique_indices=site.attribute("unique_indices", False),
        called=(site.region(),),
    )
    return site.parts(scattered)


MOVEMENT: dict[str, Rule] = {
    "sdy.constant": constant,
    "stablehlo.broadcast_in_dim": broadcast_in_dim,
    "stablehlo.concatenate": concatenate,
    "stablehlo.constant": constant,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.get_dimension_size": dimension_size,
    "stablehlo.iota": plain("iota", shaped=True, iota_dimension="iota_dimension"),
    "stablehlo.pad": pad,
    "stablehlo.reshape": plain("reshape", shaped=True),
    "stablehlo.reverse": plain("reverse", dimensions="dimensions"),
    "stablehlo.slice": slice_,
    "stablehlo.transpose": plain("transpose", dimensions="permutation"),
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
}


def call(site: LoweringSite) -> Sequence[HloInstruction]:
    computation = site.lowering.function(site.required("callee"))
    return site.parts(site.build.call(computation, site.operands))


def composite(site: LoweringSite) -> Sequence[HloInstruction]:
    computation = site.lowering.function(site.required("decomposition"))
    return site.parts(site.build.call(computation, site.operands))


def loop(site: LoweringSite) -> Sequence[HloInstruction]:
    """A while whose state is a tuple of its operands and of what its regions read from outside."""
    condition, body = site.block(0), site.block(1)
    outside = tuple(dict.fromkeys((*condition.captured(), *body.captured())))
    init = [*site.operands, *(site.values[v] for v in outside)]
    state = site.build.tuple(init)
    loop = site.build.add(
        "while",
        state,
        called=(
            site.lowering.state_region(condition, outside, state.shape, "condition", False),
            site.lowering.state_region(body, outside, state.shape, "body", True),
        ),
    )
    return [site.build.element(loop, i) for i in range(len(site.operands))]


def branches(site: LoweringSite) -> Sequence[HloInstruction]:
    """A conditional: one computation per branch, each taking a tuple of what it reads from outside."""
    computations, arguments = [], []
    for block in site.operation.regions:
        outside = block.captured()
        argument = site.build.tuple([site.values[v] for v in outside])
        arguments.append(argument)
        computations.append(site.lowering.state_region(block, outside, argument.shape, "branch", True))
    conditional = site.build.add("conditional", site.operands[0], *arguments, called=computations)
    return [site.build.element(conditional, i) for i in range(len(site.operation.results))]


def barrier(site: LoweringSite) -> Sequence[HloInstruction]:
    """Values that later passes must compute together."""
    if len(site.operands) == 1:
        return [site.build.add("opt-barrier", site.operands[0])]
    return site.parts(site.build.add("opt-barrier", site.build.tuple(site.operands)))


def identity(site: LoweringSite) -> Sequence[HloInstruction]:
    return site.operands


def pack(site: LoweringSite) -> HloInstruction:
    return site.build.tuple(site.operands)


def element(site: LoweringSite) -> HloInstruction:
    return site.build.element(site.operands[0], site.required("index"))


CONTROL: dict[str, Rule] = {
    "func.call": call,
    "sdy.reshard": identity,
    "sdy.sharding_constraint": identity,
    "stablehlo.after_all": plain("after-all"),
    "stablehlo.case": branches,
    "stablehlo.composite": composite,
    "stablehlo.create_token": plain("after-all"),
    "stablehlo.get_tuple_element": element,
    "stablehlo.if": branches,
    "stablehlo.optimization_barrier": barrier,
    "stablehlo.tuple": pack,
    "stablehlo.while": loop,
}
