"""Loops with less to do: smaller states, values that do not change moved out, few iterations unrolled.

Scans carry weights and constants through their state, where no other rule sees them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.hlo.opcodes import ELEMENTWISE, Category
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import integer, remove_unused, splat
from mpmd.compile.passes.simplify.control_flow import inline

_FLIPPED = {"EQ": "EQ", "NE": "NE", "GE": "LE", "GT": "LT", "LE": "GE", "LT": "GT"}


@dataclass(frozen=True)
class Counter:
    """The counter of a loop.

    Attributes:
        index: the number of its element of the state.
        start: its first value.
        step: the increment in the body.
        trips: the number of iterations.
    """

    index: int
    start: int
    step: int
    trips: int


def counter_of(loop: HloInstruction) -> Counter | None:
    """The counter of a loop such as `i = 0; while i < 10: i = i + 1`; None if it is of another form."""
    test = loop.while_condition.root
    if test.opcode != "compare":
        return None
    a, b = test.operands
    direction = test.direction
    if integer(a) is not None:
        a, b, direction = b, a, _FLIPPED[direction]
    limit = integer(b)
    index = _element(a, loop.while_condition.parameters[0])
    if limit is None or index is None or not a.shape.is_scalar:
        return None
    init, following = loop.operands[0], loop.while_body.root
    if init.opcode != "tuple" or following.opcode != "tuple":
        return None
    start = integer(init.operands[index])
    step = _step(following.operands[index], loop.while_body.parameters[0], index)
    if start is None or step is None or step == 0:
        return None
    trips = _trips(start, step, limit, direction)
    if trips is None:
        return None
    info = a.shape.info
    low, high = integer_range(info.name)
    return Counter(index, start, step, trips) if low <= start + trips * step <= high else None


def _element(value: HloInstruction, state: HloInstruction) -> int | None:
    reads = value.opcode == "get-tuple-element" and value.operands[0] is state
    return value.tuple_index if reads else None


def _step(value: HloInstruction, state: HloInstruction, index: int) -> int | None:
    """The increment of an element, if that is its only change."""
    if value.opcode not in ("add", "subtract"):
        return None
    a, b = value.operands
    if value.opcode == "add" and integer(a) is not None:
        a, b = b, a
    amount = integer(b)
    if amount is None or _element(a, state) != index:
        return None
    return -amount if value.opcode == "subtract" else amount


def _trips(start: int, step: int, limit: int, direction: str) -> int | None:
    """How often `start + k * step` satisfies the comparison with the limit before it first does not."""
    if direction == "NE":
        distance = limit - start
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction == "EQ":
        return 1 if start == limit else 0
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    rising = direction in ("LT", "LE")
    if (start >= limit) if rising else (start <= limit):
        return 0
    if (step > 0) != rising:
        return None
    return -(-(limit - start) // step)


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
    old = computation.parameters[0]
    build = HloBuilder(computation)
    state = HloInstruction("parameter", shape, (), {"parameter_number": 0}, name=old.given_name)
    computation.add(state.copy_annotations(old))
    state.sharding = ""
    for reader in list(old.users):
        if reader.opcode == "get-tuple-element" and reader.tuple_index in place:
            value = build.add("get-tuple-element", state, shape=reader.shape, index=place[reader.tuple_index])
            reader.replace_all_uses_with(value)


def _drop_old_state(computation: HloComputation) -> None:
    for instruction in reversed(computation.post_order()):  # its readers may be unused
        remove_unused(instruction)
    computation.remove(computation.parameters[0])


def _replace_loop(loop: HloInstruction, init: HloInstruction, place: dict[int, int]) -> HloInstruction:
    parent = loop.parent
    build = HloBuilder(parent)
    replacement = build.add("while", init, shape=init.shape, called=loop.called)
    replacement.metadata, replacement.backend_config = loop.metadata, loop.backend_config
    replacement.frontend_attributes = loop.frontend_attributes
    for reader in list(loop.users):
        if reader.tuple_index in place:
            value = build.add(
                "get-tuple-element", replacement, shape=reader.shape, index=place[reader.tuple_index]
            )
            parent.replace(reader, value)
        else:
            parent.remove(reader)
    old_init = loop.operands[0]
    parent.remove(loop)
    remove_unused(old_init)
    return replacement


class WhileSimplifier(ComputationPass):
    """Reduces the state of loops, and removes loops that run once or never.

    while((i, x, c, dead)) with a constant c  ->  while((i, x)), c inside the body, known_trip_count

    Constants and broadcasts of constants move into the loop; unused elements are removed; a counted loop gets
    its `known_trip_count`; one that runs never becomes its initial state, one that runs once its body.

    Requires: no schedule; loops whose computations have other callers are left alone: flatten calls first.
    Ensures: each element of a plain state is read.
    Cost: linear per loop.
    Source: XLA's while simplifier and constant sinking.

    Attributes:
        largest_constant: largest constant that moves into a loop, in elements.
    """

    abandons = True
    largest_constant: int = 64

    def rewrite_computation(self, computation: HloComputation) -> bool:
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.computation is not None:
                changed |= self._simplify(instruction)
        return changed

    def _simplify(self, loop: HloInstruction) -> bool:
        if not may_change_state(loop):
            return False
        changed = self._sink_constants(loop)
        kept = _needed(loop)
        if len(kept) < len(loop.shape.elements) and kept:
            loop = narrow(loop, kept)
            changed = True
        return _count(loop) or changed

    def _sink_constants(self, loop: HloInstruction) -> bool:
        changed = False
        for index, value in enumerate(loop.operands[0].operands):
            if not passes_through(loop, index) or not self._is_constant(value):
                continue
            for computation in loop.called:
                used = [r for r in readers(computation, index) if _computing(computation, r)]
                if used:
                    constant = _copied_constant(computation, value)
                    for reader in used:
                        for user in _computing(computation, reader):
                            reader.replace_use(user, constant)
                    changed = True
        return changed

    def _is_constant(self, value: HloInstruction) -> bool:
        if not value.shape.is_array:
            return False
        if value.opcode == "constant":
            return value.shape.size <= self.largest_constant
        return value.opcode == "iota" or (value.opcode == "broadcast" and splat(value) is not None)


def may_change_state(loop: HloInstruction) -> bool:
    """True if the state of a loop is plain, and its computations are its own."""
    return all(sum(c.callers.values()) == 1 for c in loop.called) and has_plain_state(loop)


def _computing(computation: HloComputation, reader: HloInstruction) -> list[HloInstruction]:
    """The users of a value that do not just pass it on to the next iteration."""
    return [user for user in reader.users if user is not computation.root or user.opcode != "tuple"]


def _copied_constant(computation: HloComputation, value: HloInstruction) -> HloInstruction:
    operands = [_copied_constant(computation, o) for o in value.operands]
    return computation.add(value.clone(operands))


def _needed(loop: HloInstruction) -> list[int]:
    """Elements that the program, the condition, an effect or another needed element reads."""
    body = loop.while_body
    reads = _elements_read(body)
    needed = {r.tuple_index for r in loop.users if r.users or r.is_root}
    needed |= {r.tuple_index for r in loop.while_condition.parameters[0].users}
    for instruction in body:
        if instruction.has_side_effect:
            needed |= reads[instruction]
    waiting = list(needed)
    while waiting:
        for index in reads[body.root.operands[waiting.pop()]]:
            if index not in needed:
                needed.add(index)
                waiting.append(index)
    return sorted(needed)


def _elements_read(body: HloComputation) -> dict[HloInstruction, frozenset[int]]:
    """For each instruction, the elements of the state that it depends on."""
    state = body.parameters[0]
    reads: dict[HloInstruction, frozenset[int]] = {}
    for instruction in body.post_order():
        if instruction is state or instruction is body.root:
            reads[instruction] = frozenset()
        elif instruction.opcode == "get-tuple-element" and instruction.operands[0] is state:
            reads[instruction] = frozenset([instruction.tuple_index])
        else:
            reads[instruction] = frozenset[int]().union(*(reads[o] for o in instruction.operands))
    return reads


def _count(loop: HloInstruction) -> bool:
    """Unroll a loop that runs once or never; record the trip count of others."""
    counter = counter_of(loop)
    if counter is None:
        return False
    if counter.trips <= 1 and not any(i.has_side_effect for i in loop.while_condition):
        init = loop.operands[0]
        if counter.trips:
            inline(loop, 1)
        else:
            loop.parent.replace(loop, init)
        remove_unused(init)
        return True
    if loop.known_trip_count == counter.trips:
        return False
    config = json.loads(loop.backend_config) if loop.backend_config else {}
    config["known_trip_count"] = {"n": str(counter.trips)}
    loop.backend_config = json.dumps(config, separators=(",", ":"))
    return True


_NEVER = frozenset(["parameter", "tuple", "opt-barrier", "after-all", "add-dependency", "domain", "fusion"])
_OUTSIDE = frozenset(
    {Category.CONTROL, Category.COLLECTIVE, Category.ASYNC, Category.EXTERNAL, Category.RANDOM}
)
_FREE = frozenset(["constant", "iota", "broadcast", "reshape", "bitcast", "get-tuple-element", "convert"])


class WhileInvariantCodeMotion(ComputationPass):
    """Moves loop-invariant computations before the loop.

    body: y = tanh(w); x = multiply(x, y), w passes through  ->  y before the loop, an element of its state

    Work moves only if the result is no larger than its operands; constants, broadcasts and the like move only
    where moved work needs them.

    Requires: no schedule.
    Ensures: no operation of a loop body that depends on unchanged elements alone is left but those that are
        free or would keep more bytes alive.
    Cost: linear per loop.
    Source: loop-invariant code motion; HLO has no traps, so that a loop that never runs is safe.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.computation is not None:
                if instruction.known_trip_count != 0 and may_change_state(instruction):
                    changed |= _hoist(instruction)
        return changed


def _hoist(loop: HloInstruction) -> bool:
    fixed = _invariant(loop)
    wanted = [i for i in fixed if _is_worth(i) and any(u not in fixed or not _is_worth(u) for u in i.users)]
    if not wanted:
        return False
    copies: dict[HloInstruction, HloInstruction] = {}
    values = [_copied(i, loop, copies) for i in wanted]
    _, added = widen(loop, values)
    for instruction, value in zip(wanted, added):
        instruction.replace_all_uses_with(value)
        remove_unused(instruction)
    return True


def _invariant(loop: HloInstruction) -> dict[HloInstruction, None]:
    """Instructions of the body that are the same in each iteration, in post-order."""
    body = loop.while_body
    state = body.parameters[0]
    fixed: dict[HloInstruction, None] = {}
    for instruction in body.post_order():
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] is state:
            if passes_through(loop, instruction.tuple_index):
                fixed[instruction] = None
        elif _may_move(instruction) and all(o in fixed for o in instruction.operands):
            fixed[instruction] = None
    return fixed


def _may_move(instruction: HloInstruction) -> bool:
    if instruction.opcode in _NEVER or instruction.is_root or instruction.has_side_effect:
        return False
    if instruction.has_control_edges:
        return False
    return instruction.info.category not in _OUTSIDE


def _is_worth(instruction: HloInstruction) -> bool:
    """True for work whose result is no larger than its operands."""
    if instruction.opcode in _FREE or not instruction.shape.is_array:
        return False
    read = max((o.shape.byte_size for o in instruction.operands), default=0)
    return instruction.shape.byte_size <= max(read, 64)


def _copied(
    instruction: HloInstruction, loop: HloInstruction, copies: dict[HloInstruction, HloInstruction]
) -> HloInstruction:
    """The same value, computed before the loop."""
    copy = copies.get(instruction)
    if copy is not None:
        return copy
    if instruction.opcode == "get-tuple-element" and instruction.operands[0] is loop.while_body.parameters[0]:
        return loop.operands[0].operands[instruction.tuple_index]
    operands = [_copied(o, loop, copies) for o in instruction.operands]
    copy = copies[instruction] = loop.parent.add(instruction.clone(operands))
    return copy


_CHEAP = ELEMENTWISE | {Category.INPUT, Category.TUPLE, Category.SHAPE}


class WhileLoopUnroller(ComputationPass):
    """Unrolls short counted loops of elementwise work, so that they become one kernel.

    while(i < 5) { x = f(x, i) }  ->  f(f(f(f(f(x, 0), 1), 2), 3), 4)

    An example are the rounds of JAX's random numbers: each iteration would read and write all of the state.

    Requires: no schedule.
    Ensures: no loop is left that has `most_trips` iterations or fewer and whose body, elementwise work and
        movement of data, has `most_instructions` or fewer when unrolled.
    Cost: linear in the program after unrolling.
    Source: XLA's while-loop unroller.

    Attributes:
        most_trips: maximum of iterations of an unrolled loop.
        most_instructions: maximum of instructions of all iterations together.
    """

    abandons = True
    most_trips: int = 8
    most_instructions: int = 512

    def rewrite_computation(self, computation: HloComputation) -> bool:
        changed = False
        for instruction in computation.instructions:
            if instruction.opcode == "while" and instruction.computation is not None:
                counter = counter_of(instruction)
                if counter is not None and self._is_short(instruction, counter.trips):
                    _unroll(instruction, counter.trips)
                    changed = True
        return changed

    def _is_short(self, loop: HloInstruction, trips: int) -> bool:
        if trips > self.most_trips or trips * len(loop.while_body) > self.most_instructions:
            return False
        instructions = [*loop.while_body, *loop.while_condition]
        if any(i.info.category not in _CHEAP or i.called or i.has_side_effect for i in instructions):
            return False
        return not loop.has_control_edges


def _unroll(loop: HloInstruction, trips: int) -> None:
    state = init = loop.operands[0]
    body = loop.while_body
    for _ in range(trips):
        copies = body.copy_into(loop.parent, {body.parameters[0]: state})
        state = copies[body.root]
    loop.parent.replace(loop, state)
    remove_unused(init)
