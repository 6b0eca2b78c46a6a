"""Matrix products: factors are read in place, and users become an epilogue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import Index, constant, delinearized, dim
from mpmd.compile.kernels.planner.elements import RULES, IndexMap, NoPlan, Trace, check_dtype, position_of
from mpmd.compile.kernels.planner.groups import check_results, places_from
from mpmd.compile.kernels.planner.index_rules import read_broadcast, read_reshape, read_slice, read_transpose
from mpmd.compile.kernels.planner.iteration_space import IterationSpace
from mpmd.compile.kernels.planner.plan_cache import cached_plan
from mpmd.compile.kernels.product_plans import MatmulPlan, View

FACTORS = ("f32", "bf16", "f16", "f64")
_WIDENING = {("bf16", "f32"), ("f16", "f32")}


@dataclass(frozen=True)
class DotPlan:
    """A matrix product with its epilogue.

    Attributes:
        plan: its computation.
        factors: the arrays of the two factors.
        arrays: inputs of the epilogue, in the order of its operands, the sums left out.
        results: its results: the epilogue's operands after those, or the product itself.
    """

    plan: MatmulPlan
    factors: tuple[HloInstruction, HloInstruction]
    arrays: tuple[HloInstruction, ...]
    results: tuple[HloInstruction, ...]


def is_product(dot: HloInstruction) -> bool:
    """Whether a dot's element types are those of the matrix-product kernels."""
    kinds = [o.shape.dtype for o in dot.operands]
    wide = "f64" in kinds
    return (
        dot.opcode == "dot"
        and len(kinds) == 2
        and all(k in FACTORS for k in kinds)
        and (kinds[0] == kinds[1] or not wide)
        and dot.shape.dtype in FACTORS
        and (dot.shape.dtype == "f64") == wide
        and dot.shape.size * dot.operands[0].shape.size * dot.operands[1].shape.size > 0
    )


@dataclass(frozen=True)
class DotOperand:
    """A factor: its array, and the step along each of the product's loop dims."""

    array: HloInstruction
    offset: int
    steps: tuple[int, ...]


def strided(
    value: HloInstruction, at: IndexMap, inside: Collection[HloInstruction], extents: Sequence[int]
) -> tuple[HloInstruction, Index]:
    """The array outside of a group that holds a value, and its position.

    Raises:
        NoPlan: the value is computed, or is not in steps of the same size.
    """
    while value in inside:
        source = value.operands[0] if value.operands else value
        if value.opcode in ("reshape", "bitcast"):
            at = read_reshape(value, at, extents)
        elif value.opcode == "transpose":
            at = read_transpose(value, at)
        elif value.opcode == "slice":
            at = read_slice(value, at)
        elif value.opcode == "broadcast":
            at = read_broadcast(value, at)
        elif value.opcode != "copy" and not (
            value.opcode == "convert" and (source.shape.dtype, value.shape.dtype) in _WIDENING
        ):
            raise NoPlan(f"factor {{0}} is computed by {value.opcode}", value)
        value = source
    place = position_of(value, at)
    if any(atom.kind != "dim" for atom, _ in place.terms):
        raise NoPlan(f"a factor is in {{0}} at {place}, which are not equal steps", value)
    return value, place


@dataclass(frozen=True)
class Loops:
    """The loop dims of a product: batch, rows, columns and sums, as numbers of dims with extents."""

    extents: tuple[int, ...]
    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]


def loops_of(dot: HloInstruction) -> tuple[Loops, IndexMap, IndexMap]:
    """The loops of a dot, and the positions of its factors."""
    lhs, rhs, numbers = *dot.operands, dot.dot_dims
    left, right = numbers.lhs_free(lhs.shape.rank), numbers.rhs_free(rhs.shape.rank)
    sizes = [lhs.shape.dims[d] for d in numbers.lhs_batch]
    sizes += [lhs.shape.dims[d] for d in left] + [rhs.shape.dims[d] for d in right]
    sizes += [lhs.shape.dims[d] for d in numbers.lhs_contracting]
    counts = (len(numbers.lhs_batch), len(left), len(right), len(numbers.lhs_contracting))
    groups, start = [], 0
    for count in counts:
        groups.append(tuple(range(start, start + count)))
        start += count
    at_lhs, at_rhs = [constant(0)] * lhs.shape.rank, [constant(0)] * rhs.shape.rank
    for loops, dims, place in (
        (groups[0], numbers.lhs_batch, at_lhs),
        (groups[1], left, at_lhs),
        (groups[3], numbers.lhs_contracting, at_lhs),
        (groups[0], numbers.rhs_batch, at_rhs),
        (groups[2], right, at_rhs),
        (groups[3], numbers.rhs_contracting, at_rhs),
    ):
        for loop, d in zip(loops, dims):
            place[d] = dim(loop)
    return Loops(tuple(sizes), *groups), tuple(at_lhs), tuple(at_rhs)


def side_of(
    value: HloInstruction, at: IndexMap, inside: Collection[HloInstruction], loops: Loops
) -> DotOperand:
    """The position of a factor.

    Raises:
        NoPlan: it is computed, or not in equal steps, or no product reads its element type.
    """
    array, place = strided(value, at, inside, loops.extents)
    if check_dtype(array).shape.dtype not in FACTORS:
        raise NoPlan(f"no matrix product reads {array.shape.dtype}")
    return DotOperand(array, place.constant, tuple(place.factor(d) for d in range(len(loops.extents))))


def merged(dims: Sequence[int], loops: Loops, *sides: DotOperand) -> list[list[int]]:
    """Neighbouring loops that all operands traverse as one, outermost first."""
    groups: list[list[int]] = []
    for d in (d for d in dims if loops.extents[d] != 1):
        together = groups and all(s.steps[groups[-1][-1]] == s.steps[d] * loops.extents[d] for s in sides)
        if together:
            groups[-1].append(d)
        else:
            groups.append([d])
    return groups


@cached_plan
def plan_dot(name: str, group: Sequence[HloInstruction], results: Sequence[HloInstruction]) -> DotPlan:
    """The kernel of a group with one dot.

    Raises:
        NoPlan: the group is not one kernel.
    """
    inside = dict.fromkeys(group)
    dots = [i for i in group if i.opcode == "dot"]
    if len(dots) != 1 or not is_product(dots[0]):
        raise NoPlan("not one matrix product of floats")
    dot = dots[0]
    loops, at_lhs, at_rhs = loops_of(dot)
    lhs, rhs = (side_of(o, at, inside, loops) for o, at in zip(dot.operands, (at_lhs, at_rhs)))
    batch = merged(loops.batch, loops, lhs, rhs)
    rows, columns = merged(loops.m, loops, lhs), merged(loops.n, loops, rhs)
    sums = merged(loops.k, loops, lhs, rhs)
    if len(sums) > 1:
        raise NoPlan("the factors are summed over dims that are not contiguous")
    outer = [*batch, *rows[:-1], *columns[:-1]]
    last = [rows[-1:], columns[-1:], sums]
    sizes = [size_of(g, loops) for g in (*outer, *(part[0] if part else [] for part in last))]
    count = len(outer)
    space = tuple(sizes[: count + 2])
    at_dot = _dot_place(loops, [*outer, *(part[0] if part else [] for part in last[:2])], space)

    def view(side: DotOperand, row: list[list[int]], column: list[list[int]]) -> View:
        def step(part: list[list[int]]) -> int:
            return side.steps[part[0][-1]] if part else 1

        dtype = side.array.shape.dtype
        return View(dtype, side.offset, step(row), step(column), tuple(side.steps[g[-1]] for g in outer))

    a, b = view(lhs, last[0], last[2]), view(rhs, last[2], last[1])
    place = position_of(dot, at_dot)
    steps = [place.factor(d) for d in range(len(space))]
    c = View(dot.shape.dtype, 0, steps[count], steps[count + 1] or 1, tuple(steps[:count]))
    m, n, k = sizes[count : count + 3]
    plan = MatmulPlan(name, tuple(sizes[:count]), m, n, k, a, b, c, exact=_is_exact(dot))
    factors = (lhs.array, rhs.array)
    if list(results) == [dot] and all(a.kind == "dim" for a, _ in place.terms):
        return DotPlan(plan, factors, (), (dot,))
    return _with_epilogue(plan, factors, dot, at_dot, IterationSpace(space), group, results)


def _is_exact(dot: HloInstruction) -> bool:
    """Whether factors of f32 may lose no digits: an algorithm says it, or else the precision."""
    algorithm = str(dot.attributes.get("algorithm", "unset"))
    if algorithm != "unset":
        return algorithm != "dot_tf32_tf32_f32"
    precision = dot.attributes.get("operand_precision")
    return isinstance(precision, tuple) and "highest" in precision


def size_of(group: Sequence[int], loops: Loops) -> int:
    size = 1
    for d in group:
        size *= loops.extents[d]
    return size


def _dot_place(loops: Loops, groups: Sequence[Sequence[int]], space: Sequence[int]) -> IndexMap:
    """The position of the product's result in the kernel's space."""
    index: dict[int, Index] = {}
    for number, group in enumerate(groups):
        parts = delinearized(dim(number), [loops.extents[d] for d in group], space)
        index.update(zip(group, parts))
    order = (*loops.batch, *loops.m, *loops.n)
    return tuple(index.get(d, constant(0)) for d in order)


def _with_epilogue(
    plan: MatmulPlan,
    factors: tuple[HloInstruction, HloInstruction],
    dot: HloInstruction,
    at_dot: IndexMap,
    space: IterationSpace,
    group: Sequence[HloInstruction],
    results: Sequence[HloInstruction],
) -> DotPlan:
    below = _feeding(dot, group)
    inside = dict.fromkeys(i for i in group if i not in below)
    places = places_from({dot: at_dot}, inside, dot, space)
    trace = Trace(plan.name, space, inside)
    accumulator = "f64" if plan.a.dtype == "f64" else "f32"
    trace.sums[dot] = accumulator, position_of(dot, at_dot)
    for result in results:
        if result not in places:
            raise NoPlan("{0} has no position in the space of {1}", result, dot)
    nodes = [trace.value(r, places[r]) for r in results]
    check_results(trace, places, results)
    if any(i in below for i in trace.arrays) or dot not in trace.sums_operands:
        raise NoPlan("the epilogue of {0} reads inner values of its factors", dot)
    for result, node in zip(results, nodes):
        operand = trace.operand(result.shape.dtype, result.shape.size)
        trace.build.store(operand, position_of(result, places[result]), node)
    epilogue = trace.finish()
    arrays, sums = tuple(trace.arrays), trace.sums_operands[dot]
    return DotPlan(replace(plan, epilogue=epilogue, sums=sums), factors, arrays, tuple(results))


def _feeding(dot: HloInstruction, group: Sequence[HloInstruction]) -> set[HloInstruction]:
    feeding: set[HloInstruction] = set()
    waiting = list(dot.operands)
    members = set(group)
    while waiting:
        instruction = waiting.pop()
        if instruction in members and instruction not in feeding:
            feeding.add(instruction)
            waiting += instruction.operands
    return feeding


def _sums(t: Trace, i: HloInstruction, at: IndexMap, where: int) -> int:
    """The product itself: its sums, rounded to its element type."""
    if i not in t.sums:
        return _AS_REDUCTION(t, i, at, where)
    dtype, place = t.sums[i]
    if position_of(i, at) != place:
        raise NoPlan("{0} is read at another place than the one where it is summed", i)
    if i not in t.sums_operands:
        t.sums_operands[i] = t.operand(dtype, t.space.count(range(len(t.extents))))
    node = t.build.load_dense(t.sums_operands[i])
    return t.build.convert(node, i.shape.dtype)


_AS_REDUCTION = RULES["dot"]
RULES["dot"] = _sums
