"""Groups of a computation's instructions: who is with whom, what a group reads, and what it must hand out."""

from __future__ import annotations

from collections.abc import Iterable

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planning.dots import is_product, plan_dot
from mpmd.compile.kernels.planning.groups import GroupPlan
from mpmd.compile.kernels.planning.kernels import PlannedKernel, plan_members
from mpmd.compile.kernels.planning.trace import MOVEMENT, RULES, NoPlan
from mpmd.compile.kernels.planning.updates import UPDATES

FUSIBLE = frozenset(RULES) | UPDATES


class Group:
    """Instructions that one kernel computes.

    Attributes:
        members: those that are computed here and nowhere else, in program order.
    """

    def __init__(self, member: HloInstruction) -> None:
        self.members = [member]
        self._refused: set[tuple[Group, int, int]] = set()

    def refuse(self, other: Group) -> None:
        """Note that two groups are not one kernel as they are now."""
        self._refused.add((other, len(self.members), len(other.members)))

    def was_refused(self, other: Group) -> bool:
        """Whether two groups are known not to be one kernel as they are now."""
        mine, its = len(self.members), len(other.members)
        return (other, mine, its) in self._refused or (self, its, mine) in other._refused

    @property
    def product(self) -> HloInstruction | None:
        """The matrix product in the group, if there is one."""
        return next((m for m in self.members if m.opcode == "dot" and is_product(m)), None)

    @property
    def updates(self) -> bool:
        """Whether the group changes an array in place."""
        return any(m.opcode in UPDATES for m in self.members)

    @property
    def reduces(self) -> bool:
        """Whether the group has a reduction."""
        return any(m.opcode in ("reduce", "reduce-window", "dot") for m in self.members)


class Grouping:
    """The groups of one computation.

    Movement stands in no group, unless its result must be an array: then it is a group of its own.

    Attributes:
        computation: what is grouped.
        order: its instructions, operands before users.
        position: number of each instruction in that order.
        group_of: the group of each instruction that stands in one.
        repeated: members that other groups compute again instead of reading them.
    """

    def __init__(self, computation: HloComputation) -> None:
        self.computation = computation
        self.order = computation.post_order()
        self.position = {i: k for k, i in enumerate(self.order)}
        self.group_of: dict[HloInstruction, Group] = {}
        self.repeated: set[HloInstruction] = set()
        needed = self._arrays()
        for instruction in self.order:
            if instruction.opcode not in FUSIBLE or not instruction.shape.is_array:
                continue
            if instruction.opcode not in MOVEMENT or instruction in needed:
                self.group_of[instruction] = Group(instruction)

    def _arrays(self) -> set[HloInstruction]:
        """Movement whose result must stand in memory."""
        needed: set[HloInstruction] = set()
        for instruction in self.order:
            if instruction.opcode not in FUSIBLE:
                needed.update(instruction.operands)
            elif instruction.opcode in UPDATES:
                target, *read = instruction.operands
                needed.add(target)
                needed.update(o for o in read if _is_part_of(o, target))
            elif instruction.opcode == "dot" and is_product(instruction):
                needed.update(_unstrided(instruction))
        needed.add(self.computation.root)
        # a bitcast is the array that it is made of
        for instruction in reversed(self.order):
            if instruction in needed and instruction.opcode == "bitcast":
                needed.discard(instruction)
                needed.add(instruction.operands[0])
        return {i for i in needed if i.opcode in MOVEMENT}

    def groups(self) -> list[Group]:
        """All groups, in program order of their first member."""
        return list(dict.fromkeys(self.group_of[i] for i in self.order if i in self.group_of))

    # -- what a group is made of
    def closure(self, members: Iterable[HloInstruction]) -> list[HloInstruction]:
        """Members with the movement and the scalar constants that they read, in program order."""
        found = dict.fromkeys(members)
        waiting = list(found)
        while waiting:
            for operand in waiting.pop().operands:
                repeats = operand.opcode in MOVEMENT and operand not in self.group_of
                repeats = repeats or operand in self.repeated
                scalar = operand.opcode == "constant" and operand.shape.size == 1 and operand.shape.is_array
                if (repeats or scalar) and operand not in found:
                    found[operand] = None
                    waiting.append(operand)
        return sorted(found, key=self.position.__getitem__)

    def arrays(self, group: Group) -> list[HloInstruction]:
        """What a group reads from outside."""
        inside = set(self.closure(group.members))
        return list(dict.fromkeys(o for i in inside for o in i.operands if o not in inside))

    def readers(self, value: HloInstruction) -> dict[HloInstruction, None]:
        """What reads a value: instructions in groups and all others, through movement that stands in none."""
        found: dict[HloInstruction, None] = {}
        waiting = list(value.users)
        if value is self.computation.root:
            found[value] = None
        while waiting:
            user = waiting.pop()
            if user in self.group_of or user.opcode not in MOVEMENT:
                found[user] = None
                if user in self.repeated:
                    waiting += user.users
                continue
            waiting += user.users
            if user is self.computation.root:
                found[user] = None
        return found

    def results(self, members: Iterable[HloInstruction]) -> list[HloInstruction]:
        """Members that are read outside, in program order."""
        inside = set(members)
        root = self.computation.root
        return [
            m
            for m in sorted(inside, key=self.position.__getitem__)
            if m is root or (m not in self.repeated and any(r not in inside for r in self.readers(m)))
        ]

    def plan(self, members: Iterable[HloInstruction]) -> PlannedKernel | str:
        """The kernel of some members, or why they are not one."""
        members = list(members)
        try:
            planned = plan_members("kernel", self.closure(members), self.results(members))
        except NoPlan as reason:
            return str(reason)
        products = [m for m in members if m.opcode == "dot" and is_product(m)]
        if products and isinstance(planned, GroupPlan):
            return f"the product {products[0].name} would be sums over elements that lie apart"
        return planned

    # -- order
    def would_circle(self, a: Group, b: Group) -> bool:
        """Whether something outside of two groups would both need and feed them as one."""
        both = (a, b)
        last = max(self.position[m] for g in both for m in g.members)
        seen: set[object] = set()
        waiting = [
            node
            for g in both
            for m in g.members
            for node in self._following(m)
            if node is not a and node is not b
        ]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node is a or node is b:
                return True
            members = node.members if isinstance(node, Group) else [node]
            if min(self.position[m] for m in members) > last:
                continue
            for m in members:
                waiting += self._following(m)
        return False

    def _following(self, instruction: HloInstruction) -> list[Group | HloInstruction]:
        found: list[Group | HloInstruction] = []
        for user in (*self.readers(instruction), *instruction.control_successors):
            group = self.group_of.get(user)
            if group is None:
                if user is not instruction:
                    found.append(user)
            elif group is not self.group_of.get(instruction):
                found.append(group)
        return found

    def join(self, a: Group, b: Group) -> Group:
        """Make one group of two."""
        a.members = sorted((*a.members, *b.members), key=self.position.__getitem__)
        for member in b.members:
            self.group_of[member] = a
        return a


def _unstrided(dot: HloInstruction) -> list[HloInstruction]:
    """The factors of a product that it cannot read where they lie."""
    inside = [dot]
    for factor in dot.operands:
        while factor.opcode in MOVEMENT or factor.opcode == "convert":
            inside.append(factor)
            if not factor.operands:
                break
            factor = factor.operands[0]
    inside.reverse()
    found = []
    for factor in dot.operands:
        others = [o for o in dot.operands if o is not factor]
        movement = [i for i in inside if i.opcode in MOVEMENT and i not in others]
        try:
            plan_dot("kernel", [*movement, dot], [dot])
        except NoPlan:
            found.append(factor)
    return found


def _is_part_of(value: HloInstruction, array: HloInstruction) -> bool:
    """Whether movement makes a value of an array: who changes the array must not read it meanwhile."""
    while array.opcode == "bitcast":
        array = array.operands[0]
    while value is not array:
        if value.opcode not in MOVEMENT or not value.operands:
            return False
        value = value.operands[0]
    return True
