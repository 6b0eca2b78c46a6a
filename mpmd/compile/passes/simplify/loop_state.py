"""The state of a loop as a list of elements: reads, removal, additions."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.passes.rewriter import remove_unused


def has_plain_state(loop: HloInstruction) -> bool:
    """True if a while's state is a tuple that is built before it, and taken apart inside and after it."""
    if loop.operands[0].opcode != "tuple" or loop.while_body.root.opcode != "tuple":
        return False
    if loop.is_root or loop.has_control_edges:
        return False
    readers = [*loop.users, *(u for c in loop.called for u in c.parameters[0].users)]
    if any(r.opcode != "get-tuple-element" for r in readers):
        return False
    return not any(c.parameters[0].is_root for c in loop.called)


def readers(computation: HloComputation, index: int) -> list[HloInstruction]:
    """The instructions that take an element of the state out of it."""
    state = computation.parameters[0]
    return [u for u in state.users if u.tuple_index == index]


def passes_through(loop: HloInstruction, index: int) -> bool:
    """True if the body returns an element of the state unchanged."""
    value = loop.while_body.root.operands[index]
    return (
        value.opcode == "get-tuple-element"
        and value.operands[0] is loop.while_body.parameters[0]
        and value.tuple_index == index
    )


def narrow(loop: HloInstruction, kept: Sequence[int]) -> HloInstruction:
    """Remove all elements but some from the state; the others have no readers but themselves.

    Returns:
        The while with the smaller state.
    """
    place = {index: i for i, index in enumerate(kept)}
    shape = tuple_of([loop.shape.elements[index] for index in kept])
    for computation in loop.called:
        _replace_state(computation, shape, place)
    body = loop.while_body
    old_root = body.root
    build = HloBuilder(body)
    body.set_root(build.tuple([old_root.operands[index] for index in kept]))
    remove_unused(old_root)
    for computation in loop.called:
        _drop_old_state(computation)
    init = HloBuilder(loop.parent).tuple([loop.operands[0].operands[index] for index in kept])
    return _replace_loop(loop, init, place)


def widen(
    loop: HloInstruction, values: Sequence[HloInstruction]
) -> tuple[HloInstruction, list[HloInstruction]]:
    """Add unchanged elements to the state.

    Returns:
        The while with the larger state, and the new elements in its body.
    """
    count = len(loop.shape.elements)
    place = {index: index for index in range(count)}
    shape = tuple_of([*loop.shape.elements, *(v.shape for v in values)])
    for computation in loop.called:
        _replace_state(computation, shape, place)
        _drop_old_state(computation)
    body = loop.while_body
    build = HloBuilder(body)
    state = body.parameters[0]
    added = [
        build.add("get-tuple-element", state, shape=v.shape, index=count + i) for i, v in enumerate(values)
    ]
    old_root = body.root
    body.set_root(build.tuple([*old_root.operands, *added]))
    remove_unused(old_root)
    init = HloBuilder(loop.parent).tuple([*loop.operands[0].operands, *values])
    return _replace_loop(loop, init, place), added


def _replace_state(computation: HloComputation, shape: Shape, place: dict[int, int]) -> None:
    """Read the remaining elements from a new parameter."""
    old = computation.parameters[0]
    build = HloBuilder(computation)
    made = HloInstruction("parameter", shape, (), {"parameter_number": 0}, name=old.given_name)
    computation.add(made.copy_annotations(old))
    made.sharding = ""
    for reader in list(old.users):
        if reader.opcode == "get-tuple-element" and reader.tuple_index in place:
            value = build.add("get-tuple-element", made, shape=reader.shape, index=place[reader.tuple_index])
            reader.replace_all_uses_with(value)


def _drop_old_state(computation: HloComputation) -> None:
    for instruction in reversed(computation.post_order()):  # its readers may be unused
        remove_unused(instruction)
    computation.remove(computation.parameters[0])


def _replace_loop(loop: HloInstruction, init: HloInstruction, place: dict[int, int]) -> HloInstruction:
    parent = loop.parent
    build = HloBuilder(parent)
    made = build.add("while", init, shape=init.shape, called=loop.called)
    made.metadata, made.backend_config = loop.metadata, loop.backend_config
    made.frontend_attributes = loop.frontend_attributes
    for reader in list(loop.users):
        if reader.tuple_index in place:
            value = build.add("get-tuple-element", made, shape=reader.shape, index=place[reader.tuple_index])
            parent.replace(reader, value)
        else:
            parent.remove(reader)
    old_init = loop.operands[0]
    parent.remove(loop)
    remove_unused(old_init)
    return made
