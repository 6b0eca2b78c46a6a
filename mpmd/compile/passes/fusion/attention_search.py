"""The search for attention: products of rows of products, and which of them are one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.attention import PlannedAttention, plan_attention, rounds_sums
from mpmd.compile.kernels.planner.dots import is_product
from mpmd.compile.kernels.planner.elements import MOVEMENT, RULES, NoPlan
from mpmd.compile.kernels.product_plans import QUERIES, AttentionPlan
from mpmd.cost.device import KernelLimits

_MAX_FREE = 16
"""Operations that make a mask of nothing: more are worth an array."""


@dataclass(frozen=True)
class MatrixShape:
    """The shape of scores, one matrix per batch index; how the batch is divided into dims does not count."""

    size: int
    rows: int
    columns: int

    @staticmethod
    def of(value: HloInstruction) -> MatrixShape | None:
        """The shape of a value, None if it has less than two dims."""
        dims = value.shape.dims if value.shape.is_array else ()
        return MatrixShape(value.shape.size, *dims[-2:]) if len(dims) > 1 else None


@dataclass(eq=False)
class Cone:
    """The dataflow cone of a matrix of rows, down to arrays.

    Attributes:
        matrix: its shape.
        members: all computed values.
        scores: the products among them.
        repeated: the members that each kernel computes again for itself: movement, masks of constants.
    """

    matrix: MatrixShape
    members: dict[HloInstruction, None] = field(default_factory=dict)
    scores: dict[HloInstruction, None] = field(default_factory=dict)
    repeated: set[HloInstruction] = field(default_factory=set)


@dataclass(eq=False)
class AttentionCandidate:
    """A group that may become one kernel.

    Attributes:
        cone: the cone of its mixtures.
        mixtures: the products after the rows.
        moved: the movement of each mixture in the kernel.
    """

    cone: Cone
    mixtures: list[HloInstruction]
    moved: dict[HloInstruction, tuple[HloInstruction, ...]]

    @property
    def members(self) -> set[HloInstruction]:
        return {*self.cone.members, *self.mixtures, *(m for chain in self.moved.values() for m in chain)}


def cone_of(value: HloInstruction) -> Cone:
    """The cone of a matrix, or of one per batch index: elementwise work and reductions of rows."""
    matrix = MatrixShape.of(value)
    assert matrix is not None, f"{value.name} has no rows"
    cone, waiting = Cone(matrix), [value]
    while waiting:
        instruction = waiting.pop()
        if instruction in cone.members:
            continue
        operands = _computed_from(instruction, cone)
        if operands is not None:
            cone.members[instruction] = None
            if instruction.opcode in MOVEMENT or instruction.opcode == "constant":
                cone.repeated.add(instruction)
            waiting += operands
    return cone


def _computed_from(instruction: HloInstruction, cone: Cone) -> Sequence[HloInstruction] | None:
    """The operands to continue with if an instruction belongs to the rows; None if it is an array."""
    matrix = cone.matrix
    if instruction.opcode == "constant":
        return [] if instruction.shape.size == 1 and instruction.shape.is_array else None
    if not instruction.shape.is_array or instruction.opcode not in RULES:
        return None
    if MatrixShape.of(instruction) == matrix:
        if instruction.opcode == "dot":
            return _take_score(instruction, cone)
        if instruction.is_elementwise or instruction.opcode in ("broadcast", "iota"):
            return list(instruction.operands)
        divided = (
            instruction.opcode in ("reshape", "bitcast") and MatrixShape.of(instruction.operands[0]) == matrix
        )
        return list(instruction.operands) if divided else None
    if _is_of_rows(instruction, matrix) and _reaches_rows(instruction, matrix):
        return list(instruction.operands)
    free = _made_of_nothing(instruction)
    if free is not None:
        cone.members.update(free)
        cone.repeated.update(free)
        return []
    return None


def _take_score(dot: HloInstruction, cone: Cone) -> Sequence[HloInstruction] | None:
    if not is_product(dot) or len(dot.dot_dims.lhs_batch) != dot.shape.rank - 2:
        return None
    cone.scores[dot] = None
    for factor in dot.operands:
        movement = moved_factor(factor)
        cone.members.update(movement)
        cone.repeated.update(movement)
    return []


def moved_factor(value: HloInstruction) -> dict[HloInstruction, None]:
    """The movement and widening between a factor of a product and its array in memory."""
    moves: dict[HloInstruction, None] = {}
    while True:
        widens = value.opcode == "convert" and value.operands[0].shape.dtype == "bf16"
        if value.opcode not in ("reshape", "bitcast", "transpose", "slice", "broadcast", "copy") and not (
            widens and value.shape.dtype == "f32"
        ):
            return moves
        moves[value] = None
        value = value.operands[0]


def _is_of_rows(instruction: HloInstruction, matrix: MatrixShape) -> bool:
    if instruction.opcode == "reduce":
        source = instruction.operands[0]
        return MatrixShape.of(source) == matrix and instruction.dimensions == (source.shape.rank - 1,)
    moves = instruction.opcode in ("reshape", "bitcast", "broadcast", "transpose")
    one_each = instruction.shape.size * matrix.columns == matrix.size
    return one_each and (instruction.is_elementwise or moves)


def _reaches_rows(instruction: HloInstruction, matrix: MatrixShape) -> bool:
    """Whether some value of rows depends on a reduction of a matrix."""
    seen, waiting = {instruction}, [instruction]
    while waiting:
        value = waiting.pop()
        if value.opcode == "reduce":
            return True
        for operand in value.operands:
            if operand not in seen and operand.shape.is_array and _is_of_rows(operand, matrix):
                seen.add(operand)
                waiting.append(operand)
    return False


def _made_of_nothing(instruction: HloInstruction) -> dict[HloInstruction, None] | None:
    """An instruction and its cone, if that is small and reads no array."""
    cone, waiting = {instruction: None}, [instruction]
    while waiting:
        value = waiting.pop()
        elementwise = value.is_elementwise and value.opcode in RULES
        if not elementwise and value.opcode not in ("iota", "broadcast", "constant", "reshape", "bitcast"):
            return None
        if value.opcode == "constant" and value.shape.size != 1:
            return None
        for operand in value.operands:
            if operand not in cone:
                cone[operand] = None
                waiting.append(operand)
        if len(cone) > _MAX_FREE:
            return None
    return cone


# -- groups
class Search:
    """The groups of one computation.

    Args:
        computation: where to look.
        refuse: gets the reason why a product is not part of a group.
            limits: of the device.

    Attributes:
        groups: the result, in program order.  Members that two groups need are computed by both.
    """

    def __init__(
        self, computation: HloComputation, refuse: Callable[[str], None], limits: KernelLimits
    ) -> None:
        self.limits = limits
        self.order = computation.post_order()
        self.position = {i: k for k, i in enumerate(self.order)}
        self.refuse = refuse
        self.groups: list[AttentionCandidate] = []

    def run(self) -> None:
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

    def share_rows(self) -> None:
        """Reductions of rows in several groups are made by the first and read by the others."""
        for number, group in enumerate(self.groups):
            before = self.groups[:number]
            known = {m for g in before for m in g.members if _is_shared(m, group.cone.matrix)}
            shared = known & group.cone.members.keys()
            if shared:
                less = _without(group, shared)
                if not self.refusal(less, before):
                    self.groups[number] = less

    def _place(self, attention: AttentionCandidate) -> None:
        """Join a group with an earlier one that computes the same scores, or keep it alone."""
        for number in reversed(range(len(self.groups))):
            both = together(self.groups[number], attention)
            if both is not None and not self.refusal(both, self.groups[:number]):
                self.groups[number] = both
                return
        self.groups.append(attention)

    def refusal(self, attention: AttentionCandidate, before: Sequence[AttentionCandidate]) -> str:
        """Why a group is not one kernel; empty if it is."""
        ordered = next((m for m in attention.members if m.has_control_edges), None)
        if ordered is not None:
            return f"control edges order {ordered.name} by itself"
        if self._would_create_cycle(attention, before):
            return "its inputs depend on its results"
        try:
            planned = self.plan(attention, self.results(attention, before, ()))
        except NoPlan as reason:
            return str(reason)
        return _loss(planned.plan, self.limits)

    def plan(self, attention: AttentionCandidate, results: Sequence[HloInstruction]) -> PlannedAttention:
        """The kernel of a group.

        Raises:
            NoPlan: there is none.
        """
        return plan_attention("kernel", self.sorted(attention.members), results)

    def sorted(self, members: Iterable[HloInstruction]) -> list[HloInstruction]:
        """Members in program order."""
        return sorted(members, key=self.position.__getitem__)

    def _would_create_cycle(
        self, attention: AttentionCandidate, before: Sequence[AttentionCandidate]
    ) -> bool:
        """Whether a value outside of a group would both depend on it and feed it.

        Values that an earlier group also computes are read from there.
        """
        inside = attention.members
        elsewhere = {m for g in before for m in g.members} | attention.cone.repeated
        seen: set[HloInstruction] = set()
        waiting = [r for m in inside if m not in elsewhere for r in _readers(m, attention.cone.repeated)]
        waiting = [r for r in waiting if r not in inside]
        last = max(self.position[m] for m in inside)
        while waiting:
            instruction = waiting.pop()
            if instruction in seen or self.position[instruction] > last:
                continue
            seen.add(instruction)
            for user in (*instruction.users, *instruction.control_successors):
                if user in inside:
                    return True
                waiting.append(user)
        return False

    def results(
        self,
        attention: AttentionCandidate,
        before: Sequence[AttentionCandidate],
        after: Sequence[AttentionCandidate],
    ) -> list[HloInstruction]:
        """Members of a group that are read outside, except by groups that compute them, too."""
        groups = [*before, attention, *after]
        known = {m for g in before for m in g.members} | attention.cone.repeated
        groups_of: dict[HloInstruction, list[set[HloInstruction]]] = {}
        for members in (g.members for g in groups):
            for member in members:
                groups_of.setdefault(member, []).append(members)
        repeated = {m for g in groups for m in g.cone.repeated}
        results = []
        for member in self.sorted(attention.members - known):
            readers = _readers(member, repeated)
            outside = member.is_root or any(r not in groups_of for r in readers)
            if outside or any(member not in members_there for r in readers for members_there in groups_of[r]):
                results.append(member)
        return results


def _loss(plan: AttentionPlan, limits: KernelLimits) -> str:
    """Why a kernel would be slower than its parts; empty if it would not."""
    widths = [s.depth for s in plan.scores] + [m.width for m in plan.mixtures]
    if max(widths) > limits.attention_width:
        return f"a factor of {max(widths)} columns is more than a kernel holds"
    size = 4 * plan.keys * max(widths)
    if size > limits.attention_factor_bytes:
        return f"a factor of {size >> 10} KiB for all keys is read for every block of queries"
    matrices, large = math.prod(plan.batch), plan.flops > limits.attention_flops
    if matrices < 2 and plan.rows.kind == "loop":
        return "a product, elementwise work and another product hold all of their results at once"
    if large and matrices < 2:
        return "one large product is faster with the blocks of products"
    if large and matrices < limits.attention_matrices and any(m.over == QUERIES for m in plan.mixtures):
        return f"sums over queries of {matrices} matrices are work for as many threads only"
    return ""


def _readers(member: HloInstruction, repeated: Collection[HloInstruction]) -> list[HloInstruction]:
    """The readers of a value, through movement that groups repeat."""
    readers: dict[HloInstruction, None] = {}
    waiting = [*member.users, *member.control_successors]
    while waiting:
        user = waiting.pop()
        if user in readers:
            continue
        readers[user] = None
        if user in repeated:
            waiting += user.users
    return [r for r in readers if r not in repeated]


def _is_shared(value: HloInstruction, matrix: MatrixShape) -> bool:
    """Whether a value is a reduction of rows that loses nothing in memory."""
    return value.opcode == "reduce" and value.shape.dtype == "f32" and _is_of_rows(value, matrix)


def _without(attention: AttentionCandidate, arrays: Collection[HloInstruction]) -> AttentionCandidate:
    cone, needed = attention.cone, dict[HloInstruction, None]()
    waiting = [o for d in attention.mixtures for o in d.operands]
    while waiting:
        value = waiting.pop()
        if value in cone.members and value not in arrays and value not in needed:
            needed[value] = None
            waiting += value.operands
    scores = {d: None for d in cone.scores if d in needed}
    remaining = Cone(cone.matrix, needed, scores, {m for m in cone.repeated if m in needed})
    return AttentionCandidate(remaining, attention.mixtures, attention.moved)


def attention_of(dot: HloInstruction) -> AttentionCandidate | None:
    """The group of one product of rows, None if it is not one."""
    if not is_product(dot):
        return None
    for factor, other in (dot.operands, dot.operands[::-1]):
        moves = factor.opcode in MOVEMENT and factor.opcode not in ("reshape", "bitcast")
        if MatrixShape.of(factor) is None or moves or factor is other or min(factor.shape.dims[-2:]) < 2:
            continue
        cone = cone_of(factor)
        if not cone.scores or dot in cone.members or factor not in cone.members:
            continue
        movement = moved_factor(other)
        cone.members.update(movement)
        cone.repeated.update(movement)
        return AttentionCandidate(cone, [dot], {dot: _moved(dot)})
    return None


def _moved(dot: HloInstruction) -> tuple[HloInstruction, ...]:
    """The movement after a product, up to the last transpose or rounding of sums that is its only reader."""
    chain, end, value = [], 0, dot
    while len(value.users) == 1 and not value.is_root:
        (value,) = value.users
        if value.opcode not in ("transpose", "reshape", "bitcast") and not rounds_sums(value):
            break
        chain.append(value)
        if value.opcode in ("transpose", "convert"):
            end = len(chain)
    return tuple(chain[:end])


def together(a: AttentionCandidate, b: AttentionCandidate) -> AttentionCandidate | None:
    if a.cone.matrix != b.cone.matrix or not a.cone.scores.keys() & b.cone.scores.keys():
        return None
    cone = Cone(
        a.cone.matrix,
        {**a.cone.members, **b.cone.members},
        {**a.cone.scores, **b.cone.scores},
        a.cone.repeated | b.cone.repeated,
    )
    return AttentionCandidate(cone, [*a.mixtures, *b.mixtures], {**a.moved, **b.moved})
