"""Propagation of layouts: from fixed ones to users, then to operands."""

from __future__ import annotations

from collections import deque

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.passes.layout.physical import is_bitcast, kept_layout, transposed_layout
from mpmd.compile.passes.layout.requirements import Requirements
from mpmd.compile.passes.values import inverse


class Propagation:
    """Layouts of the arrays of one computation.

    Args:
        computation: the computation.
        requirements: the fixed layouts.
    """

    def __init__(self, computation: HloComputation, requirements: Requirements) -> None:
        self._computation = computation
        self._requirements = requirements
        self._chosen: dict[HloInstruction, Layout] = {}
        self._down: deque[HloInstruction] = deque()
        self._up: deque[HloInstruction] = deque()

    def run(self) -> dict[HloInstruction, Layout]:
        """The layout of each array."""
        arrays = [i for i in self._computation.post_order() if i.shape.is_array]
        for instruction in arrays:
            fixed = self._requirements.of_result(instruction)
            if fixed is not None:
                self._choose(instruction, fixed)
        self._settle()
        root = self._computation.root
        if root.shape.is_array and root not in self._chosen:
            wanted = self._requirements.of_root(()).layout
            if wanted is not None:
                self._choose(root, wanted)
        self._settle()
        for instruction in arrays:
            if instruction not in self._chosen:
                self._choose(instruction, Layout.row_major(instruction.shape.rank))
                self._settle()
        return self._chosen

    def _choose(self, instruction: HloInstruction, layout: Layout) -> None:
        self._chosen[instruction] = layout
        # Row-major is the default: it need not propagate, except through transposes.
        if not layout.is_row_major or any(u.opcode == "transpose" for u in instruction.users):
            self._down.append(instruction)
        if not layout.is_row_major or instruction.opcode == "transpose":
            self._up.append(instruction)

    def _settle(self) -> None:
        """Propagate layouts, to users as long as possible, then to operands."""
        while self._down or self._up:
            if self._down:
                value = self._down.popleft()
                every = not self._chosen[value].is_row_major
                for user in value.users:
                    if user in self._chosen or not user.shape.is_array:
                        continue
                    if every or user.opcode == "transpose":
                        self._offer(user, downwards(self._chosen[value], value, user))
            else:
                user = self._up.popleft()
                for number, value in enumerate(user.operands):
                    if value not in self._chosen and value.shape.is_array and not value.shape.is_scalar:
                        self._offer(value, upwards(self._chosen[user], user, number))

    def _offer(self, instruction: HloInstruction, layout: Layout | None) -> None:
        if layout is not None:
            self._choose(instruction, layout)


def downwards(layout: Layout, value: HloInstruction, user: HloInstruction) -> Layout | None:
    """The layout that suits a user of a value with this layout."""
    opcode = user.opcode
    if opcode == "transpose":
        return transposed_layout(layout, user.dimensions)
    if opcode == "reduce":
        return kept_layout(layout, user.dimensions) if user.operands[0] is value else None
    if opcode == "reshape":
        return _reshaped(layout, value, user)
    if opcode == "broadcast":
        added = [d for d in range(user.shape.rank) if d not in user.dimensions]
        return Layout((*(user.dimensions[d] for d in layout.minor_to_major), *reversed(added)))
    same = value.shape.dims and len(layout.minor_to_major) == user.shape.rank
    if opcode in ("dot", "bitcast", "copy") or not same:
        return None
    return layout


def upwards(layout: Layout, user: HloInstruction, number: int) -> Layout | None:
    """The layout of an operand that suits a user with this layout."""
    opcode, value = user.opcode, user.operands[number]
    if opcode == "transpose":
        return transposed_layout(layout, inverse(user.dimensions))
    if opcode == "broadcast":
        place = {d: i for i, d in enumerate(user.dimensions)}
        return Layout(tuple(place[d] for d in layout.minor_to_major if d in place))
    if opcode == "reshape":
        return _reshaped(layout, user, value)
    if opcode in ("dot", "bitcast", "copy", "reduce") or value.shape.rank != user.shape.rank:
        return None
    return layout


def _reshaped(layout: Layout, value: HloInstruction, other: HloInstruction) -> Layout | None:
    """A layout of `other` with which the reshape between the two moves nothing."""
    target = other.shape.with_layout(Layout.row_major(other.shape.rank))
    if is_bitcast(value.shape.with_layout(layout), target):
        return target.layout
    # Dims that keep their size keep their position; those of size 1 are innermost.
    theirs = [d for d, n in enumerate(other.shape.dims) if n != 1]
    mine = [d for d, n in enumerate(value.shape.dims) if n != 1]
    if [value.shape.dims[d] for d in mine] != [other.shape.dims[d] for d in theirs]:
        return None
    place = dict(zip(mine, theirs))
    ones = [d for d in reversed(range(other.shape.rank)) if d not in theirs]
    return Layout((*ones, *(place[d] for d in layout.minor_to_major if d in place)))
