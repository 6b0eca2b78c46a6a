"""The search for attention: products of rows of products, and which of them are one kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planning.attention import PlannedAttention, plan_attention
from mpmd.compile.kernels.planning.dots import is_product
from mpmd.compile.kernels.planning.trace import MOVEMENT, RULES, NoPlan

Dims = tuple[int, ...]

_MOST_FREE = 16
"""Operations that make a mask of nothing: more are worth an array."""


@dataclass(eq=False)
class Cone:
    """What a matrix of rows is made of, down to arrays.

    Attributes:
        dims: of the matrix.
        members: everything that is computed for it.
        scores: the products among them.
        repeated: the members that any kernel makes again for itself: movement, masks made of nothing.
    """

    dims: Dims
    members: dict[HloInstruction, None] = field(default_factory=dict)
    scores: dict[HloInstruction, None] = field(default_factory=dict)
    repeated: set[HloInstruction] = field(default_factory=set)


@dataclass(eq=False)
class Attention:
    """A group that may become one kernel.

    Attributes:
        cone: what its mixtures are made of.
        mixtures: the products after the rows.
        moved: what a mixture becomes by movement that the kernel does.
    """

    cone: Cone
    mixtures: list[HloInstruction]
    moved: dict[HloInstruction, HloInstruction]

    @property
    def members(self) -> set[HloInstruction]:
        """Everything that is computed in it."""
        return {*self.cone.members, *self.mixtures, *self.moved.values()}


def cone_of(value: HloInstruction, stop: Collection[HloInstruction] = ()) -> Cone:
    """What a matrix is made of: elementwise work and reductions of rows, down to products and arrays.

    Args:
        value: the matrix, or one per batch index.
        stop: values that are read and not computed.
    """
    cone, waiting = Cone(value.shape.dims), [value]
    while waiting:
        instruction = waiting.pop()
        if instruction in cone.members or instruction in stop:
            continue
        operands = _computed_from(instruction, cone)
        if operands is not None:
            cone.members[instruction] = None
            if instruction.opcode in MOVEMENT or instruction.opcode == "constant":
                cone.repeated.add(instruction)
            waiting += operands
    return cone


def _computed_from(instruction: HloInstruction, cone: Cone) -> Sequence[HloInstruction] | None:
    """The operands to go on with if an instruction belongs to the rows; None if it is an array for them."""
    dims = cone.dims
    if instruction.opcode == "constant":
        return [] if instruction.shape.size == 1 and instruction.shape.is_array else None
    if not instruction.shape.is_array or instruction.opcode not in RULES:
        return None
    if instruction.shape.dims == dims:
        if instruction.opcode == "dot":
            return _take_score(instruction, cone)
        if instruction.is_elementwise or instruction.opcode in ("broadcast", "iota"):
            return list(instruction.operands)
        return None
    if _is_of_rows(instruction, dims) and _reaches_rows(instruction, dims):
        return list(instruction.operands)
    free = _made_of_nothing(instruction)
    if free is not None:
        cone.members.update(free)
        cone.repeated.update(free)
        return []
    return None


def _take_score(dot: HloInstruction, cone: Cone) -> Sequence[HloInstruction] | None:
    if not is_product(dot) or len(dot.dot_dims.lhs_batch) != len(cone.dims) - 2:
        return None
    cone.scores[dot] = None
    for factor in dot.operands:
        movement = moved_factor(factor)
        cone.members.update(movement)
        cone.repeated.update(movement)
    return []


def moved_factor(value: HloInstruction) -> dict[HloInstruction, None]:
    """The movement and widening between a factor of a product and the array in which it lies."""
    found: dict[HloInstruction, None] = {}
    while True:
        widens = value.opcode == "convert" and value.operands[0].shape.dtype == "bf16"
        if value.opcode not in ("reshape", "bitcast", "transpose", "slice", "broadcast", "copy") and not (
            widens and value.shape.dtype == "f32"
        ):
            return found
        found[value] = None
        value = value.operands[0]


def _is_of_rows(instruction: HloInstruction, dims: Dims) -> bool:
    size = instruction.shape.size
    count = 1
    for d in dims[:-1]:
        count *= d
    if instruction.opcode == "reduce":
        return instruction.operands[0].shape.dims == dims and instruction.dimensions == (len(dims) - 1,)
    moves = instruction.opcode in ("reshape", "bitcast", "broadcast", "transpose")
    return size == count and (instruction.is_elementwise or moves)


def _reaches_rows(instruction: HloInstruction, dims: Dims) -> bool:
    """Whether something of rows is made from a reduction of a matrix."""
    seen, waiting = {instruction}, [instruction]
    while waiting:
        value = waiting.pop()
        if value.opcode == "reduce" and value.operands[0].shape.dims == dims:
            return True
        for operand in value.operands:
            if operand not in seen and operand.shape.is_array and _is_of_rows(operand, dims):
                seen.add(operand)
                waiting.append(operand)
    return False


def _made_of_nothing(instruction: HloInstruction) -> dict[HloInstruction, None] | None:
    """An instruction and what it is made of, if that is little and reads no array."""
    found, waiting = {instruction: None}, [instruction]
    while waiting:
        value = waiting.pop()
        elementwise = value.is_elementwise and value.opcode in RULES
        if not elementwise and value.opcode not in ("iota", "broadcast", "constant", "reshape", "bitcast"):
            return None
        if value.opcode == "constant" and value.shape.size != 1:
            return None
        for operand in value.operands:
            if operand not in found:
                found[operand] = None
                waiting.append(operand)
        if len(found) > _MOST_FREE:
            return None
    return found


# -- groups
class Search:
    """The groups of one computation.

    Args:
        computation: where to look.
        refuse: is told why a product that might be part of a group is not.

    Attributes:
        groups: what was found, in program order.  What two groups both need, both compute.
    """

    def __init__(self, computation: HloComputation, refuse: Callable[[str], None]) -> None:
        self.order = computation.post_order()
        self.position = {i: k for k, i in enumerate(self.order)}
        self.refuse = refuse
        self.groups: list[Attention] = []

    def run(self) -> None:
        """Find the groups."""
        scores: set[HloInstruction] = set()
        for dot in self.order:
            if dot.opcode != "dot" or dot in scores:
                continue
            attention = attention_of(dot)
            if attention is None:
                continue
            reason = self.refusal(attention, self.groups)
            if reason:
                self.refuse(f"{dot.name} stays a product of its own: {reason}")
                continue
            scores.update(attention.cone.scores)
            self._place(attention)

    def _place(self, attention: Attention) -> None:
        """Join a group with an earlier one that computes the same scores, or let it stand alone."""
        for number in reversed(range(len(self.groups))):
            both = together(self.groups[number], attention)
            if both is not None and not self.refusal(both, self.groups[:number]):
                self.groups[number] = both
                return
        self.groups.append(attention)

    def refusal(self, attention: Attention, before: Sequence[Attention]) -> str:
        """Why a group is not one kernel; empty if it is."""
        if self._would_circle(attention, before):
            return "what it needs is made of what it gives"
        try:
            self.plan(attention, self.results(attention, before, ()))
        except NoPlan as reason:
            return str(reason)
        return ""

    def plan(self, attention: Attention, results: Sequence[HloInstruction]) -> PlannedAttention:
        """The kernel of a group.

        Raises:
            NoPlan: it is none.
        """
        return plan_attention("kernel", self.sorted(attention.members), results)

    def sorted(self, members: Iterable[HloInstruction]) -> list[HloInstruction]:
        """Members in program order."""
        return sorted(members, key=self.position.__getitem__)

    def _would_circle(self, attention: Attention, before: Sequence[Attention]) -> bool:
        """Whether something outside of a group would both need and feed it.

        What an earlier group computes, too, is read from there.
        """
        inside = attention.members
        elsewhere = {m for g in before for m in g.members} | attention.cone.repeated
        seen: set[HloInstruction] = set()
        waiting = [r for m in inside if m not in elsewhere for r in _readers(m, [attention])]
        waiting = [r for r in waiting if r not in inside]
        while waiting:
            instruction = waiting.pop()
            if instruction in seen:
                continue
            seen.add(instruction)
            for user in (*instruction.users, *instruction.control_successors):
                if user in inside:
                    return True
                waiting.append(user)
        return False

    def results(
        self, attention: Attention, before: Sequence[Attention], after: Sequence[Attention]
    ) -> list[HloInstruction]:
        """What of a group is read outside: by what is no group, or by one that does not compute it, too."""
        groups = [*before, attention, *after]
        known = {m for g in before for m in g.members} | attention.cone.repeated
        found = []
        for member in self.sorted(attention.members - known):
            homes = [[g for g in groups if r in g.members] for r in _readers(member, groups)]
            outside = member.is_root or any(not h for h in homes)
            if outside or any(member not in g.members for h in homes for g in h):
                found.append(member)
        return found


def _readers(member: HloInstruction, groups: Sequence[Attention]) -> list[HloInstruction]:
    """What reads a value, through movement that groups repeat."""
    found: dict[HloInstruction, None] = {}
    waiting = [*member.users, *member.control_successors]
    while waiting:
        user = waiting.pop()
        if user in found:
            continue
        found[user] = None
        if any(user in g.cone.repeated for g in groups):
            waiting += user.users
    return [r for r in found if not any(r in g.cone.repeated for g in groups)]


def attention_of(dot: HloInstruction, stop: Collection[HloInstruction] = ()) -> Attention | None:
    """The group of one product of rows, None if it is not one.

    Args:
        dot: the product.
        stop: values that are read and not computed.
    """
    if not is_product(dot):
        return None
    for factor, other in (dot.operands, dot.operands[::-1]):
        rank = factor.shape.rank
        if rank < 2 or factor.opcode in MOVEMENT or factor is other or min(factor.shape.dims[-2:]) < 2:
            continue
        cone = cone_of(factor, stop)
        if not cone.scores or dot in cone.members or factor not in cone.members:
            continue
        movement = moved_factor(other)
        cone.members.update(movement)
        cone.repeated.update(movement)
        users = list(dot.users)
        moved = {dot: users[0]} if len(users) == 1 and users[0].opcode == "transpose" else {}
        return Attention(cone, [dot], moved)
    return None


def together(a: Attention, b: Attention) -> Attention | None:
    """Two groups that compute the same scores, as one."""
    if a.cone.dims != b.cone.dims or not a.cone.scores.keys() & b.cone.scores.keys():
        return None
    cone = Cone(
        a.cone.dims,
        {**a.cone.members, **b.cone.members},
        {**a.cone.scores, **b.cone.scores},
        a.cone.repeated | b.cone.repeated,
    )
    return Attention(cone, [*a.mixtures, *b.mixtures], {**a.moved, **b.moved})
