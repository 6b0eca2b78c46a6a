"""Groups of a computation's instructions: members, inputs and outputs, until they become fusions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.kernels.planner.dots import is_product, plan_dot
from mpmd.compile.kernels.planner.elements import MOVEMENT, RULES, NoPlan
from mpmd.compile.kernels.planner.groups import UPDATES, GroupPlan, array_beneath
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel, plan_members
from mpmd.compile.passes.rewriter import is_trivial
from mpmd.cost.device import HOST, KernelLimits

FUSIBLE = frozenset(RULES) | UPDATES


class FusionGroup:
    """Instructions that one kernel computes.

    Attributes:
        members: those that are computed in this group only, in program order.
        followers: nodes that must run after them, computed on demand.
    """

    def __init__(self, member: HloInstruction) -> None:
        self.members = [member]
        self.followers: dict[HloInstruction, None] | None = None
        self._refused: set[tuple[FusionGroup, int, int]] = set()

    def refuse(self, other: FusionGroup) -> None:
        """Record that two groups in their current form are not one kernel."""
        # Sizes identify the form: members are only added.  A refusal holds until one of the two grows.
        self._refused.add((other, len(self.members), len(other.members)))

    def was_refused(self, other: FusionGroup) -> bool:
        """Whether two groups in their current form are known not to be one kernel."""
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


Node = FusionGroup | HloInstruction
"""A group, or an instruction without one."""


class Grouping:
    """The groups of one computation.

    Movement is in no group, unless its result must be an array: then it is a group of its own.

    Attributes:
        computation: the computation.
        limits: of the device.
        order: its instructions, operands before users.
        position: number of each instruction in that order.
        group_of: the group of each grouped instruction.
        repeated: members that other groups compute again instead of reading them.
    """

    def __init__(self, computation: HloComputation, limits: KernelLimits = HOST.limits) -> None:
        self.computation = computation
        self.limits = limits
        self.order = computation.post_order()
        self.position = {i: k for k, i in enumerate(self.order)}
        self.group_of: dict[HloInstruction, FusionGroup] = {}
        self.repeated: set[HloInstruction] = set()
        self._readers: dict[HloInstruction, dict[HloInstruction, None]] = {}
        self._ranks = GroupOrder(self)
        # Movement without a group is repeated by each reader, as index arithmetic.  Where memory must hold
        # its result (a library call, a result, the target of an update), it needs a kernel, and so a group.
        needed = self._arrays()
        for instruction in self.order:
            if not is_fusible(instruction) or not instruction.shape.is_array:
                continue
            if instruction.opcode not in MOVEMENT or instruction in needed:
                self.group_of[instruction] = FusionGroup(instruction)

    def _arrays(self) -> set[HloInstruction]:
        """Movement whose result must be in memory."""
        needed: set[HloInstruction] = set()
        for instruction in self.order:
            if not is_fusible(instruction):
                needed.update(instruction.operands)
            elif instruction.opcode in UPDATES:
                needed.add(instruction.operands[0])
                needed.update(_read_of_target(instruction))
            elif instruction.opcode == "dot" and is_product(instruction):
                needed.update(_unstrided(instruction))
        needed.add(self.computation.root)
        # The source of a bitcast is the array; from the end, so that a chain of them hands the need on.
        for instruction in reversed(self.order):
            if instruction in needed and instruction.opcode == "bitcast":
                needed.discard(instruction)
                needed.add(instruction.operands[0])
        return {i for i in needed if is_movement(i)}

    def groups(self) -> list[FusionGroup]:
        """All groups, in program order of their first member."""
        return list(dict.fromkeys(self.group_of[i] for i in self.order if i in self.group_of))

    # -- inputs and outputs of a group
    def closure(self, members: Iterable[HloInstruction]) -> list[HloInstruction]:
        """Members with the movement and the scalar constants that they read, in program order."""
        closure = dict.fromkeys(members)
        waiting = list(closure)
        while waiting:
            for operand in waiting.pop().operands:
                repeats = is_movement(operand) and operand not in self.group_of
                repeats = repeats or operand in self.repeated
                scalar = operand.opcode == "constant" and operand.shape.size == 1 and operand.shape.is_array
                if (repeats or scalar) and operand not in closure:
                    closure[operand] = None
                    waiting.append(operand)
        return sorted(closure, key=self.position.__getitem__)

    def arrays(self, group: FusionGroup) -> list[HloInstruction]:
        inside = set(self.closure(group.members))
        return list(dict.fromkeys(o for i in inside for o in i.operands if o not in inside))

    def readers(self, value: HloInstruction) -> Mapping[HloInstruction, None]:
        """The readers of a value: grouped instructions and all others, through ungrouped movement.

        This does not change when groups join.
        """
        readers = self._readers.get(value)
        if readers is None:
            readers = self._readers[value] = self._find_readers(value)
        return readers

    def _find_readers(self, value: HloInstruction) -> dict[HloInstruction, None]:
        readers: dict[HloInstruction, None] = {}
        root = self.computation.root
        waiting = list(value.users)
        if value is root:
            readers[value] = None
        while waiting:
            user = waiting.pop()
            if user in self.group_of or not is_movement(user):
                readers[user] = None
                # Who repeats a value reads its operands, so that its readers are theirs.
                if user in self.repeated:
                    waiting += user.users
                continue
            waiting += user.users
            if user is root:
                readers[user] = None
        return readers

    def repeat(self, members: set[HloInstruction]) -> None:
        """Let other groups compute members again instead of reading them."""
        self.repeated |= members
        # Readers pass through repeated members: which ones those are has changed.
        self._readers.clear()

    def keep(self, members: set[HloInstruction]) -> None:
        """Undo `repeat`."""
        self.repeated -= members
        self._readers.clear()

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
            results = self.results(members)
            if not results:
                return f"nothing reads {members[-1].name}"
            planned = plan_members("kernel", needed_of(self.closure(members), results), results)
        except NoPlan as reason:
            return str(reason)
        plan = planned.plan if isinstance(planned, GroupPlan) else None
        if plan is not None and plan.kind == "mixed" and plan.row_size > self.limits.mixed_row:
            return f"a kernel that reduces rows of {plan.row_size} elements does not add up columns, too"
        # A product that is planned as a sum of its group's space reads its factors with strides.
        products = [m for m in members if m.opcode == "dot" and is_product(m)]
        if products and isinstance(planned, GroupPlan):
            return f"the product {products[0].name} would be sums over elements that are not contiguous"
        return planned

    # -- order
    def would_create_cycle(self, a: FusionGroup, b: FusionGroup) -> bool:
        """Whether a node outside of two groups would both depend on them and feed them as one."""
        return self._ranks.between(a, b) is None

    def followers(self, node: Node) -> Iterable[HloInstruction]:
        """The successors of a node in the graph of groups and all other instructions."""
        if not isinstance(node, FusionGroup):
            return self._following(node)
        group = node
        if group.followers is None:
            group.followers = {f: None for m in group.members for f in self._following(m)}
            for member in group.members:
                group.followers.pop(member, None)
        return group.followers

    def _following(self, instruction: HloInstruction) -> list[HloInstruction]:
        """The successors of an instruction: its readers, through movement, and its control successors."""
        users = (*self.readers(instruction), *instruction.control_successors)
        return [user for user in users if user is not instruction]

    def join(self, a: FusionGroup, b: FusionGroup) -> FusionGroup:
        a.members = sorted((*a.members, *b.members), key=self.position.__getitem__)
        for member in b.members:
            self.group_of[member] = a
        a.followers = None
        self._ranks.joined(a, b)
        return a


class GroupOrder:
    """A topological order of groups and all other instructions.

    It shows at once which of two groups cannot precede the other, and bounds the search for paths by the
    position of the later one.  When two groups join, the nodes found between them move after the later one,
    whose position the joined group takes: no other node moves.

    Args:
        grouping: the groups.
    """

    def __init__(self, grouping: Grouping) -> None:
        self.grouping = grouping
        # positions are compared from left to right, so that there is always room after one
        self._places: dict[Node, tuple[int, ...]] = {}
        self._searched: tuple[Node, Node, set[Node]] | None = None
        self._turn = 0

    def between(self, a: FusionGroup, b: FusionGroup) -> set[Node] | None:
        """Nodes between two groups that depend on the earlier one; None if the later one depends on them."""
        if not self._places:
            self._places = {node: (k,) for k, node in enumerate(self._sorted())}
        places, group_of = self._places, self.grouping.group_of
        # In a topological order the later group cannot precede the earlier one.  A cycle needs a path from
        # the earlier to the later one over another node, and all nodes of it have places between the two.
        first, second = (a, b) if places[a] < places[b] else (b, a)
        end = places[second]
        nodes: set[Node] = set()
        waiting = [f for f in self.grouping.followers(first) if group_of.get(f) is not second]
        while waiting:
            value = waiting.pop()
            node = group_of.get(value, value)
            if node is second:
                return None
            # Nodes behind the later group cannot lead back to it: the search never leaves the interval.
            if node not in nodes and places[node] < end:
                nodes.add(node)
                waiting += self.grouping.followers(node)
        self._searched = first, second, nodes
        return nodes

    def joined(self, a: FusionGroup, b: FusionGroup) -> None:
        """Update the order after two groups became `a`."""
        searched, self._searched = self._searched, None
        if searched is None or {searched[0], searched[1]} != {a, b}:
            self._places = {}  # several groups join at once, which only together may be acyclic
            return
        _, second, nodes = searched
        place, self._turn = self._places[second], self._turn + 1
        behind = sorted(nodes, key=self._places.__getitem__)
        # They depend on the earlier group, which is now at the place of the later one, so they go behind it
        # and keep their order.  The negative turn puts them before what earlier joins left behind the same
        # place.
        self._places.update({node: (*place, -self._turn, k) for k, node in enumerate(behind)})
        self._places[a] = place
        if b is not a:
            del self._places[b]

    def _sorted(self) -> list[Node]:
        group_of, done, out = self.grouping.group_of, set[Node](), list[Node]()
        for start in reversed(self.grouping.order):
            waiting: list[tuple[Node, bool]] = [(group_of.get(start, start), False)]
            while waiting:
                node, left = waiting.pop()
                if left:
                    out.append(node)
                elif node not in done:
                    done.add(node)
                    waiting.append((node, True))
                    waiting += [(group_of.get(f, f), False) for f in self.grouping.followers(node)]
        return out[::-1]


def is_fusible(instruction: HloInstruction) -> bool:
    """Whether a kernel may compute an instruction together with others; kernels have no empty arrays."""
    if instruction.opcode not in FUSIBLE or instruction.has_control_edges:
        return False
    return not any(is_trivial(value) for value in (instruction, *instruction.operands))


def is_movement(instruction: HloInstruction) -> bool:
    """Whether all readers of a value may read its source instead."""
    return (
        instruction.opcode in MOVEMENT and not instruction.has_control_edges and not is_trivial(instruction)
    )


def needed_of(closure: Sequence[HloInstruction], results: Sequence[HloInstruction]) -> list[HloInstruction]:
    """The members that the results of a closure need: members that others repeat may be unused."""
    inside, needed = set(closure), set(results)
    for instruction in reversed(closure):
        if instruction in needed:
            needed.update(o for o in instruction.operands if o in inside)
    return [i for i in closure if i in needed]


def _read_of_target(update: HloInstruction) -> list[HloInstruction]:
    """Reads of an array by the group that updates it in place, through movement."""
    target = array_beneath(update.operands[0])
    operands = []
    for operand in update.operands[1:]:
        seen, waiting = {operand}, [operand]
        while waiting and array_beneath(operand) is not target:
            value = waiting.pop()
            if value is target:
                operands.append(operand)
                break
            if value.opcode in MOVEMENT:
                waiting += [o for o in value.operands if o not in seen]
                seen.update(value.operands)
    return operands


def _unstrided(dot: HloInstruction) -> list[HloInstruction]:
    """The factors of a product that it cannot read in place."""
    inside = [dot]
    for factor in dot.operands:
        while factor.opcode in MOVEMENT or factor.opcode == "convert":
            inside.append(factor)
            if not factor.operands:
                break
            factor = factor.operands[0]
    inside.reverse()
    factors = []
    for factor in dot.operands:
        others = [o for o in dot.operands if o is not factor]
        movement = [i for i in inside if i.opcode in MOVEMENT and i not in others]
        # Asked of the planner, with the movement of this factor alone: it refuses strides that products lack.
        try:
            plan_dot("kernel", [*movement, dot], [dot])
        except NoPlan:
            factors.append(factor)
    return factors


class Outlining:
    """Groups of one computation that become fusions, all at once, from the unchanged computation.

    Args:
        computation: their computation.
    """

    def __init__(self, computation: HloComputation) -> None:
        self.computation = computation
        self._fusions: list[tuple[HloInstruction, Sequence[HloInstruction]]] = []

    def arrays(
        self, members: Sequence[HloInstruction], results: Sequence[HloInstruction]
    ) -> list[HloInstruction]:
        """The operands of a fusion of members with given results."""
        needed = needed_of(members, results)
        inside = set(needed)
        return list(dict.fromkeys(o for i in needed for o in i.operands if o not in inside))

    def add(self, members: Sequence[HloInstruction], results: Sequence[HloInstruction], kind: str) -> None:
        """Make a fusion.

        Args:
            members: its body, operands before users.
            results: those of them that are read outside.
            kind: of the fusion.
        """
        arrays = self.arrays(members, results)
        members = needed_of(members, results)
        body = self.computation.module.create_computation("fused")
        copies: dict[HloInstruction, HloInstruction] = {}
        for number, array in enumerate(arrays):
            parameter = HloInstruction("parameter", array.shape, (), {"parameter_number": number})
            copies[array] = body.add(parameter)
        for instruction in members:
            copies[instruction] = body.add(instruction.clone([copies[o] for o in instruction.operands]))
        shape = results[0].shape
        if len(results) == 1:
            body.set_root(copies[results[0]])
        else:
            shape = tuple_of([r.shape for r in results])
            body.set_root(body.add(HloInstruction("tuple", shape, [copies[r] for r in results])))
        fusion = HloInstruction("fusion", shape, arrays, {"kind": kind}, (body,))
        fusion.metadata = results[-1].metadata
        self._fusions.append((self.computation.add(fusion), results))

    def finish(self) -> bool:
        """Replace the members by the fusions; True if anything changed."""
        for fusion, results in self._fusions:
            if len(results) == 1:
                results[0].replace_all_uses_with(fusion)
                continue
            for number, result in enumerate(results):
                element = HloInstruction("get-tuple-element", result.shape, [fusion], {"index": number})
                result.replace_all_uses_with(self.computation.add(element))
        removed = remove_all_unused(self.computation)
        return bool(self._fusions) or removed


def outline(grouping: Grouping) -> bool:
    """Replace every group of several instructions by a fusion; True if there was one."""
    outlining = Outlining(grouping.computation)
    for group in grouping.groups():
        results = grouping.results(group.members)
        closure = needed_of(grouping.closure(group.members), results)
        if len(closure) > 1 and results:
            kind = "kOutput" if group.product else "kInput" if group.reduces else "kLoop"
            outlining.add(closure, results, kind)
    return outlining.finish()


def remove_all_unused(computation: HloComputation) -> bool:
    removed = False
    for instruction in reversed(computation.post_order()):
        dead = not instruction.users and instruction is not computation.root
        if dead and instruction.opcode != "parameter" and not instruction.has_side_effect:
            computation.remove(instruction)
            removed = True
    return removed
