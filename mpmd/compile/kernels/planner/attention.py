"""Attention and its gradients: products, an operation on rows, and products again, as one kernel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import Index, constant, delinearized, dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.planner.dots import (
    DotOperand,
    Loops,
    is_product,
    loops_of,
    merged,
    side_of,
    size_of,
)
from mpmd.compile.kernels.planner.elements import MOVEMENT, IndexMap, NoPlan, Trace, position_of
from mpmd.compile.kernels.planner.groups import check_results, places_from
from mpmd.compile.kernels.planner.iteration_space import IterationSpace
from mpmd.compile.kernels.planner.plan_cache import cached_plan
from mpmd.compile.kernels.product_plans import KEYS, QUERIES, AttentionPlan, Mixture, Scores, View

_FACTORS = ("f32", "bf16")


@dataclass(frozen=True)
class PlannedAttention:
    """A group as an attention kernel.

    Attributes:
        plan: its computation.
        factors: for each score the arrays of both factors.
        values: for each mixture the array of its second factor.
        arrays: inputs of the rows, in the order of their operands in memory.
        kept: outputs of the rows, in the order of their operands after those.
        mixed: for each mixture its result.
    """

    plan: AttentionPlan
    factors: tuple[tuple[HloInstruction, HloInstruction], ...]
    values: tuple[HloInstruction, ...]
    arrays: tuple[HloInstruction, ...]
    kept: tuple[HloInstruction, ...]
    mixed: tuple[HloInstruction, ...]

    @property
    def results(self) -> tuple[HloInstruction, ...]:
        return (*self.kept, *self.mixed)


def products_in(group: Sequence[HloInstruction]) -> tuple[list[HloInstruction], list[HloInstruction]]:
    """The products of a group: those that depend on no other one, and those that do."""
    depends: set[HloInstruction] = set()
    first: list[HloInstruction] = []
    second: list[HloInstruction] = []
    for instruction in group:
        needs = any(o in depends for o in instruction.operands)
        if instruction.opcode == "dot" and is_product(instruction):
            (second if needs else first).append(instruction)
            depends.add(instruction)
        elif needs:
            depends.add(instruction)
    return first, second


@cached_plan
def plan_attention(
    name: str, group: Sequence[HloInstruction], results: Sequence[HloInstruction]
) -> PlannedAttention:
    """The kernel of a group of products, rows and products.

    Args:
        name: symbol of the kernel.
        group: instructions, operands before users.
        results: those whose values are needed outside.

    Raises:
        NoPlan: the group is not such a kernel.
    """
    inside = dict.fromkeys(group)
    before, after = products_in(group)
    if not before or not after:
        raise NoPlan("no product of rows of products")
    shape = before[0].shape
    if shape.rank < 2 or min(shape.dims[-2:]) < 2 or any(not _alike(d, before[0]) for d in before):
        raise NoPlan("the scores are not matrices of one size")
    rows = _RowPlanner(name, inside, before, after)
    batch = rows.dims[:-2]
    scores = [_score(d, inside, batch) for d in before]
    outputs = {d: _output(d, results, inside) for d in after}
    mixtures = [_mixture(d, rows.factor_of(d), outputs[d], inside, batch) for d in after]
    kept = [r for r in results if r not in outputs.values()]
    plan = rows.plan(kept)
    arrays = [*(a for s in scores for a in s[3]), *(m.array for m in mixtures)]
    numbers = {array: number for number, array in enumerate(dict.fromkeys(arrays))}
    attention = AttentionPlan(
        name,
        tuple(Scores(*s[:3], rows.sums(d)) for d, s in zip(before, scores)),
        plan,
        tuple(Mixture(m.over, m.width, rows.operand_of(d), m.w, m.c) for d, m in zip(after, mixtures)),
        tuple(numbers[a] for a in arrays),
    )
    if len(set(attention.inner)) != len(before) + len({rows.factor_of(d) for d in after}):
        raise NoPlan("a product is not read by the rows")
    planned = PlannedAttention(
        attention,
        tuple(s[3] for s in scores),
        tuple(m.array for m in mixtures),
        tuple(rows.trace.arrays),
        tuple(kept),
        tuple(outputs[d] for d in after),
    )
    for array in (*sum(planned.factors, ()), *planned.values, *planned.arrays):
        if array in inside:
            raise NoPlan("{0} is computed and read as an array by one kernel", array)
    return planned


def _alike(a: HloInstruction, b: HloInstruction) -> bool:
    """Whether two values are matrices of one size, as many of them."""
    return a.shape.size == b.shape.size and a.shape.rank > 1 and a.shape.dims[-2:] == b.shape.dims[-2:]


# -- the products
def _score(
    dot: HloInstruction, inside: Collection[HloInstruction], batch: tuple[int, ...]
) -> tuple[int, View, View, tuple[HloInstruction, HloInstruction]]:
    """Depth, factors and their arrays of a product before the rows."""
    loops, at_lhs, at_rhs, _ = _divided(dot, batch)
    if len(loops.m) != 1 or len(loops.n) != 1:
        raise NoPlan("{0} has several dims of rows or columns", dot)
    lhs, rhs = (side_of(o, at, inside, loops) for o, at in zip(dot.operands, (at_lhs, at_rhs)))
    _check_dtypes(lhs.array, rhs.array)
    sums = merged(loops.k, loops, lhs, rhs)
    if len(sums) > 1:
        raise NoPlan("{0} sums over dims that are not contiguous", dot)
    a = _view(lhs, loops, loops.m, sums[0] if sums else ())
    b = _view(rhs, loops, sums[0] if sums else (), loops.n)
    return size_of(sums[0] if sums else (), loops), a, b, (lhs.array, rhs.array)


@dataclass(frozen=True)
class _Mixed:
    """A product after the rows, before its factor has a number."""

    over: str
    width: int
    w: View
    c: View
    array: HloInstruction


def _mixture(
    dot: HloInstruction,
    factor: HloInstruction,
    output: HloInstruction,
    inside: Collection[HloInstruction],
    batch: tuple[int, ...],
) -> _Mixed:
    loops, at_lhs, at_rhs, at_dot = _divided(dot, batch)
    first = dot.operands[0] is factor
    numbers = dot.dot_dims
    batched, summed = (
        (numbers.lhs_batch, numbers.lhs_contracting)
        if first
        else (numbers.rhs_batch, numbers.rhs_contracting)
    )
    rank = factor.shape.rank
    if tuple(batched) != tuple(range(rank - 2)) or len(summed) != 1 or dot.operands[0] is dot.operands[1]:
        raise NoPlan("{0} does not mix whole rows of {1}", dot, factor)
    free, wide = (loops.m, loops.n) if first else (loops.n, loops.m)
    other, at = (dot.operands[1], at_rhs) if first else (dot.operands[0], at_lhs)
    side = side_of(other, at, inside, loops)
    if factor.shape.dtype not in _FACTORS:
        raise NoPlan(f"no attention kernel mixes {factor.shape.dtype}")
    _check_dtypes(side.array)
    target = _target(dot, output, loops, at_dot)
    columns = merged(wide, loops, side, target)
    if len(columns) > 1:
        raise NoPlan("{0} has columns that are not contiguous", dot)
    column = columns[0] if columns else ()
    return _Mixed(
        KEYS if summed[0] == rank - 1 else QUERIES,
        size_of(column, loops),
        _view(side, loops, loops.k, column),
        _view(target, loops, free, column),
        side.array,
    )


def _check_dtypes(*arrays: HloInstruction) -> None:
    for array in arrays:
        if array.shape.dtype not in _FACTORS:
            raise NoPlan(f"no attention kernel reads {array.shape.dtype}")


def _view(side: DotOperand, loops: Loops, row: Sequence[int], column: Sequence[int]) -> View:
    steps = side.steps
    return View(
        side.array.shape.dtype,
        side.offset,
        steps[row[-1]] if row else 1,
        steps[column[-1]] if column else 1,
        tuple(steps[d] for d in loops.batch),
    )


def _divided(dot: HloInstruction, batch: tuple[int, ...]) -> tuple[Loops, IndexMap, IndexMap, IndexMap]:
    """The loops of a product with its batch divided as the rows divide theirs.

    Returns:
        The loops, where they read both factors, and where they write the result.
    """
    loops, at_lhs, at_rhs = loops_of(dot)
    own, more = [loops.extents[d] for d in loops.batch], len(batch) - len(loops.batch)
    flat = linear([dim(d) for d in range(len(batch))], strides_of(batch))
    extents = (*batch, *loops.extents[len(own) :])
    parts = dict(enumerate(delinearized(flat, own, batch)))
    parts |= {d: dim(d + more) for d in range(len(own), len(loops.extents))}

    def moved(place: IndexMap) -> IndexMap:
        return tuple(index.substitute(parts, extents) for index in place)

    at_dot = tuple(dim(d) for d in (*loops.batch, *loops.m, *loops.n))
    groups = [tuple(d + more for d in group) for group in (loops.m, loops.n, loops.k)]
    divided = Loops(extents, tuple(range(len(batch))), *groups)
    return divided, moved(at_lhs), moved(at_rhs), moved(at_dot)


def _output(
    dot: HloInstruction, results: Sequence[HloInstruction], inside: Collection[HloInstruction]
) -> HloInstruction:
    """The written value of a product: itself, or the result of movement."""
    value = dot
    while value not in results:
        users = [u for u in value.users if u in inside]
        moves = len(users) == 1 and users[0].opcode in ("transpose", "bitcast", "reshape")
        if not moves and not (len(users) == 1 and rounds_sums(users[0])):
            raise NoPlan("{0} is read by more than movement", dot)
        value = users[0]
    return value


def rounds_sums(value: HloInstruction) -> bool:
    """Whether a value is sums of f32 rounded to bf16, as a kernel may store them."""
    narrows = value.opcode == "convert" and value.shape.dtype == "bf16"
    return narrows and value.operands[0].shape.dtype == "f32"


def _target(dot: HloInstruction, output: HloInstruction, loops: Loops, place: IndexMap) -> DotOperand:
    """The positions of a product's elements in the written array."""
    chain = [output]
    while chain[-1] is not dot:
        chain.append(chain[-1].operands[0])
    for before, after in zip(chain[::-1], chain[-2::-1]):
        if after.opcode == "transpose":
            place = tuple(place[d] for d in after.dimensions)
        elif after.opcode != "convert":
            place = delinearized(position_of(before, place), after.shape.dims, loops.extents)
    at: Index = position_of(output, place)
    if any(atom.kind != "dim" for atom, _ in at.terms):
        raise NoPlan(f"{{0}} is in {{1}} at {at}, which are not equal steps", dot, output)
    return DotOperand(output, at.constant, tuple(at.factor(d) for d in range(len(loops.extents))))


# -- the rows
class _RowPlanner:
    """The plan between the products."""

    def __init__(
        self,
        name: str,
        inside: Collection[HloInstruction],
        before: Sequence[HloInstruction],
        after: Sequence[HloInstruction],
    ) -> None:
        self.factors = {d: _factor(d, before, inside) for d in after}
        rest = dict.fromkeys(i for i in inside if i not in after)
        matrices = [i for i in rest if _alike(i, before[0]) and i.opcode not in ("dot", *MOVEMENT)]
        hero = max(matrices or before, key=lambda i: i.shape.rank)
        self.dims = hero.shape.dims
        space = IterationSpace(self.dims, 0, 1)
        place: IndexMap = tuple(dim(d) if e != 1 else constant(0) for d, e in enumerate(self.dims))
        self.places = places_from({hero: place}, rest, hero, space)
        self.trace = Trace(name, space, rest)
        self.order = position_of(hero, place)
        self.trace.sums = dict.fromkeys(before, ("f32", self.order))
        self._operands: dict[HloInstruction, int] = {}

    def factor_of(self, dot: HloInstruction) -> HloInstruction:
        return self.factors[dot]

    def sums(self, dot: HloInstruction) -> int:
        if dot not in self.trace.sums_operands:
            raise NoPlan("the rows do not read {0}", dot)
        return self.trace.sums_operands[dot]

    def operand_of(self, dot: HloInstruction) -> int:
        return self._operands[self.factors[dot]]

    def plan(self, kept: Sequence[HloInstruction]) -> KernelPlan:
        """The plan that computes the factors and the other results of the rows."""
        trace, places = self.trace, self.places
        factors = list(dict.fromkeys(self.factors.values()))
        for value in (*kept, *factors):
            if value not in places:
                raise NoPlan("{0} has no position among the rows", value)
        for value in factors:
            if position_of(value, places[value]) != self.order:
                raise NoPlan("{0} has no position among the rows", value)
        nodes = {v: trace.value(v, places[v]) for v in (*kept, *factors)}
        check_results(trace, places, [*kept, *factors])
        for value in kept:
            operand = trace.operand(value.shape.dtype, value.shape.size)
            trace.build.store(operand, position_of(value, places[value]), nodes[value])
        for value in factors:
            operand = self._operands[value] = trace.operand(value.shape.dtype, value.shape.size)
            trace.build.store(operand, trace.build.dense(range(len(self.dims))), nodes[value])
        return trace.finish()


def _factor(
    dot: HloInstruction, before: Sequence[HloInstruction], inside: Collection[HloInstruction]
) -> HloInstruction:
    factors = [o for o in dot.operands if o in inside and _alike(o, before[0]) and _needs(o, before, inside)]
    if len(factors) != 1:
        raise NoPlan("{0} mixes no rows", dot)
    return factors[0]


def _needs(
    value: HloInstruction, before: Sequence[HloInstruction], inside: Collection[HloInstruction]
) -> bool:
    """Whether a value is computed from the sums of a product."""
    seen, waiting = {value}, [value]
    while waiting:
        instruction = waiting.pop()
        if instruction in before:
            return True
        for operand in instruction.operands:
            if operand in inside and operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return False
