"""Lowering of calls, loops and branches.

Regions of loops and branches read values from outside; HLO's computations cannot, so these values become
elements of the loop's state, or of the tuple that a branch takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering.site import LoweringSite, Rule, plain


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
    made = site.build.add(
        "while",
        state,
        called=(
            site.lowering.state_region(condition, outside, state.shape, "condition", False),
            site.lowering.state_region(body, outside, state.shape, "body", True),
        ),
    )
    return [site.build.element(made, i) for i in range(len(site.operands))]


def branches(site: LoweringSite) -> Sequence[HloInstruction]:
    """A conditional: one computation per branch, each taking a tuple of what it reads from outside."""
    computations, arguments = [], []
    for block in site.operation.regions:
        outside = block.captured()
        argument = site.build.tuple([site.values[v] for v in outside])
        arguments.append(argument)
        computations.append(site.lowering.state_region(block, outside, argument.shape, "branch", True))
    made = site.build.add("conditional", site.operands[0], *arguments, called=computations)
    return [site.build.element(made, i) for i in range(len(site.operation.results))]


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


RULES: dict[str, Rule] = {
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
