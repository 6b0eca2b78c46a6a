"""Shapes of calls, loops, tuples, random numbers and custom calls."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.shape import TOKEN, Shape, shape_at, tuple_of
from mpmd.compile.hlo.shape_inference.rule import Query, Rule, check
from mpmd.compile.hlo.text import split_top


def _check_arguments(query: Query, callee: HloComputation, arguments: tuple[Shape, ...]) -> None:
    parameters = [p.shape.logical for p in callee.parameters]
    given = [a.logical for a in arguments]
    check(
        parameters == given,
        f"{query.opcode} calls {callee.name} {callee.signature()} with ({', '.join(map(str, given))})",
    )


def call(query: Query) -> Shape:
    (callee,) = query.called
    _check_arguments(query, callee, query.operands)
    return callee.root.shape.logical


def loop(query: Query) -> Shape:
    """The state, which condition and body take and the body returns."""
    condition, body = query.called
    state = query.operands[0]
    for callee in (condition, body):
        _check_arguments(query, callee, (state,))
    check(
        condition.root.shape.is_scalar and condition.root.shape.dtype == "pred",
        f"the condition of while must give pred[], got {condition.signature()}",
    )
    check(
        body.root.shape.logical is state.logical,
        f"the body of while must give the state {state}, got {body.signature()}",
    )
    return state


def conditional(query: Query) -> Shape:
    """The result of the branches; an integer, or a boolean for two branches (true first), selects one."""
    branches, selector = query.called, query.operands[0]
    check(bool(branches), "conditional needs at least one branch")
    check(
        selector.is_scalar and selector.dtype in ("pred", "s32"),
        f"the first operand of conditional must be pred[] or s32[], got {selector}",
    )
    check(
        selector.dtype != "pred" or len(branches) == 2,
        f"conditional on pred[] takes 2 branches, got {len(branches)}",
    )
    check(
        len(query.operands) == len(branches) + 1,
        f"conditional takes one operand per branch ({len(branches)}), got {len(query.operands) - 1}",
    )
    first = branches[0].root.shape.logical
    for branch, operand in zip(branches, query.operands[1:]):
        _check_arguments(query, branch, (operand,))
        check(
            branch.root.shape.logical is first,
            f"branches of conditional must give equal shapes: {branches[0].signature()} and "
            f"{branch.signature()}",
        )
    return first


def first_operand(query: Query) -> Shape:
    """The first operand's shape."""
    return query.operands[0]


def token(query: Query) -> Shape:
    return TOKEN


def pack(query: Query) -> Shape:
    return tuple_of(query.operands)


def element(query: Query) -> Shape:
    shape = query.operands[0]
    index: int = query.attribute("index")
    check(
        shape.is_tuple and 0 <= index < len(shape.elements),
        f"get-tuple-element {index} does not exist in {shape}",
    )
    return shape.elements[index]


def stated(query: Query) -> Shape:
    return query.claim()


def custom_call(query: Query) -> Shape:
    """The stated shape; layouts are constrained for the shapes of the operands."""
    constraints = query.attribute("operand_layout_constraints")
    if constraints is None:
        return query.claim()
    listed = [shape_at(part, 0)[0] for part in split_top(constraints.strip()[1:-1])]
    check(
        len(listed) == len(query.operands),
        f"operand_layout_constraints must list {len(query.operands)} shapes, got {constraints}",
    )
    for index, (shape, operand) in enumerate(zip(listed, query.operands)):
        check(
            shape.is_compatible(operand),
            f"operand_layout_constraints must list {operand} for operand {index}, got {shape}",
        )
    return query.claim()


def received(query: Query) -> Shape:
    claim = query.claim()
    check(
        claim.is_tuple and len(claim.elements) == 2 and claim.elements[1] is TOKEN,
        f"infeed must give a tuple of values and a token, got {claim}",
    )
    return claim


def random_bits(query: Query) -> Shape:
    """The stated bits, beside the state if both are given."""
    claim, state = query.claim(), query.array(0)
    bits = claim.elements[1] if claim.is_tuple and len(claim.elements) == 2 else claim
    check(bits.is_array, f"rng-bit-generator gives bits, or the state and bits, got {claim}")
    check(
        bits is claim or claim.elements[0] is state,
        f"rng-bit-generator must give the new state as {state}, got {claim}",
    )
    return claim


def async_start(query: Query) -> Shape:
    """A tuple that begins with (operands), result of the computation."""
    (callee,) = query.called
    claim = query.claim()
    _check_arguments(query, callee, query.operands)
    fits = claim.is_tuple and len(claim.elements) >= 2 and claim.elements[1] is callee.root.shape.logical
    check(
        fits,
        f"async-start of {callee.name} must give (operands, {callee.root.shape.logical}, ...), got {claim}",
    )
    return claim


def copied(query: Query) -> Shape:
    """The destination, element 0 of the result of copy-start."""
    return query.operands[0].subshape((0,))


def finished(query: Query) -> Shape:
    """The result, element 1 of the result of async-start."""
    return query.operands[0].subshape((1,))


RULES: dict[str, Rule] = {
    "call": call,
    "fusion": call,
    "while": loop,
    "conditional": conditional,
    "opt-barrier": first_operand,
    "after-all": token,
    "add-dependency": first_operand,
    "domain": first_operand,
    "tuple": pack,
    "get-tuple-element": element,
    "rng": stated,
    "rng-bit-generator": random_bits,
    "rng-get-and-update-state": stated,
    "custom-call": custom_call,
    "infeed": received,
    "outfeed": token,
    "send": stated,
    "send-done": stated,
    "recv": stated,
    "recv-done": stated,
    "copy-start": stated,
    "copy-done": copied,
    "async-start": async_start,
    "async-update": first_operand,
    "async-done": finished,
}
