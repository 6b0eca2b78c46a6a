"""Groups of elementwise work and reductions that one kernel computes, with one or several results.

The space is that of the group's hero: a reduction if there is one, else its largest result.  The positions
of the other values in the space follow from the hero, edge by edge; a group is one kernel if every value with
a cost is computed at one position only, and every result is written once.

Updates in place: dynamic-update-slice and scatter iterate over the update, not over the whole array.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import constant, delinearized, dim, linear, strides_of, value
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.operations import REDUCTIONS
from mpmd.compile.kernels.planner.elements import (
    MOVEMENT,
    PAIRS,
    IndexMap,
    NoPlan,
    Trace,
    elements_of,
    position_of,
)
from mpmd.compile.kernels.planner.index_rules import (
    clamped_start,
    index_place,
    read_broadcast,
    read_transpose,
)
from mpmd.compile.kernels.planner.iteration_space import (
    IterationSpace,
    contraction_space,
    full_place,
    loop_space,
    reduce_space,
    reducer_of,
    window_space,
)

REDUCING = frozenset(("reduce", "reduce-window", "dot"))
_READ = MOVEMENT | {"constant", "parameter"}


@dataclass(frozen=True)
class GroupPlan:
    """A group as a kernel.

    Attributes:
        plan: its computation; its operands are the arrays, then the results.
        arrays: its inputs, in the order of the operands.
        results: its outputs, in the order of the operands after them.
    """

    plan: KernelPlan
    arrays: tuple[HloInstruction, ...]
    results: tuple[HloInstruction, ...]


def plan_group(name: str, group: Sequence[HloInstruction], results: Sequence[HloInstruction]) -> GroupPlan:
    """The kernel that computes a group.

    Args:
        name: symbol of the kernel.
        group: instructions, operands before users.
        results: those whose values are needed outside.

    Raises:
        NoPlan: the group is not one kernel.
    """
    inside = dict.fromkeys(group)
    hero = hero_of(group, results)
    space, places = _places(hero, inside)
    trace = Trace(name, space, inside)
    for result in results:
        if result not in places and hero.opcode not in REDUCING and result.shape.dims == hero.shape.dims:
            places[result] = places[hero]  # nothing joins them, but they have the same space
        if result not in places:
            raise NoPlan("{0} has no position in the space of {1}", result, hero)
    nodes = [
        trace.pair(r, places[r]) if r.shape.dtype in PAIRS else (trace.value(r, places[r]),) for r in results
    ]
    check_results(trace, places, results)
    for result, parts in zip(results, nodes):
        operand, place = trace.operand(*elements_of(result)), position_of(result, places[result])
        for number, node in enumerate(parts):
            trace.build.store(operand, place * len(parts) + number, node)
    return GroupPlan(trace.finish(), tuple(trace.arrays), tuple(results))


def hero_of(group: Sequence[HloInstruction], results: Sequence[HloInstruction]) -> HloInstruction:
    reducing = [i for i in group if i.opcode in REDUCING]
    if reducing:
        return max(reducing, key=_points)
    return max(results, key=lambda r: r.shape.size)


def _points(instruction: HloInstruction) -> int:
    """Points of a reduction's space; reductions along rows come before those that add rows up."""
    source = instruction.operands[0].shape
    rows = bool(source.dims) and source.rank - 1 in instruction.dimensions
    return 2 * (instruction.shape.size if instruction.opcode == "reduce-window" else source.size) + rows


def check_results(
    trace: Trace, places: dict[HloInstruction, IndexMap], results: Sequence[HloInstruction]
) -> None:
    """Refuse a group that computes a value twice, or does not write a result exactly once.

    Raises:
        NoPlan: it does.
    """
    for instruction, positions in trace.places.items():
        if len(positions) > 1:
            raise NoPlan(f"{{0}} would be computed {len(positions)} times", instruction)
    space = trace.space
    for result in results:
        used = frozenset[int]().union(*(index.dims() for index in places[result]))
        if space.count(used) != result.shape.size:
            raise NoPlan("{0} would not be written exactly once", result)
    reduces = any(i.opcode in REDUCING and i not in trace.sums for i in trace.places)
    if not reduces and any(r.shape.size != space.count(range(len(space.extents))) for r in results):
        raise NoPlan("a loop whose results have different sizes")


# -- positions of values
def _places(
    hero: HloInstruction, inside: Collection[HloInstruction]
) -> tuple[IterationSpace, dict[HloInstruction, IndexMap]]:
    """The space of a hero, and the positions of all values that are connected to it."""
    if hero.opcode == "reduce":
        space, place = reduce_space(hero)
        places = {hero.operands[0]: place, hero: _kept(hero, place)}
    elif hero.opcode == "reduce-window":
        space, place = window_space(hero)
        places = {hero: place}
    elif hero.opcode == "dot":
        space, place = contraction_space(hero)
        places = {hero: place}
    else:
        space, place = loop_space(hero)
        places = {hero: place}
    return space, places_from(places, inside, hero, space)


def places_from(
    places: dict[HloInstruction, IndexMap],
    inside: Collection[HloInstruction],
    hero: HloInstruction,
    space: IterationSpace,
) -> dict[HloInstruction, IndexMap]:
    """The positions that follow from known ones, edge by edge.

    A computed value has one position, which its operands and users follow.  Arrays in memory and movement may
    be read at several: the position of one user's read does not apply to another user, and is used for it
    only if there is no other.
    """
    places, computed, read = dict(places), list(places), list[HloInstruction]()
    readers: dict[HloInstruction, dict[HloInstruction, None]] = {}
    for instruction in inside:
        for operand in instruction.operands:
            readers.setdefault(operand, {})[instruction] = None

    def place_operands(user: HloInstruction) -> None:
        waiting = [user]
        while waiting:
            user = waiting.pop()
            for number, operand in enumerate(user.operands if user in inside else ()):
                if operand in places:
                    continue
                place = _operand_place(user, number, operand, places[user], hero, space)
                if place is not None:
                    places[operand] = place
                    is_read = operand not in inside or operand.opcode in _READ
                    (read if is_read else computed).append(operand)
                    waiting.append(operand)

    for instruction in computed[:]:
        place_operands(instruction)
    while computed or read:
        instruction = computed.pop() if computed else read.pop()
        for user in readers.get(instruction, ()):
            if user not in places:
                place = _user_place(instruction, user, places[instruction], hero, space)
                if place is not None:
                    places[user] = place
                    computed.append(user)
                    place_operands(user)
    return places


def _kept(reduce: HloInstruction, place: IndexMap) -> IndexMap:
    return tuple(index for d, index in enumerate(place) if d not in reduce.dimensions)


def _user_place(
    x: HloInstruction, user: HloInstruction, at: IndexMap, hero: HloInstruction, space: IterationSpace
) -> IndexMap | None:
    dims = user.shape.dims
    if user.is_elementwise:
        return at if dims == x.shape.dims else None
    if user.opcode in ("reshape", "bitcast"):
        return delinearized(position_of(x, at), dims, space.extents)
    if user.opcode == "transpose":
        return tuple(at[d] for d in user.dimensions)
    if user.opcode == "reduce" and user.operands[0] is x:
        return _kept(user, at)
    if user.opcode == "broadcast":
        grown = [d for d in range(len(dims)) if d not in user.dimensions]
        if any(dims[d] != 1 for d in grown):
            return _full(user, hero, space)
        place_of = dict(zip(user.dimensions, at))
        return tuple(place_of.get(d, constant(0)) for d in range(len(dims)))
    return None


def _operand_place(
    x: HloInstruction,
    number: int,
    operand: HloInstruction,
    at: IndexMap,
    hero: HloInstruction,
    space: IterationSpace,
) -> IndexMap | None:
    if x.is_elementwise:
        return at if operand.shape.dims == x.shape.dims else None
    if x.opcode in ("reshape", "bitcast"):
        return delinearized(position_of(x, at), operand.shape.dims, space.extents)
    if x.opcode == "transpose":
        return read_transpose(x, at)
    if x.opcode == "broadcast":
        return read_broadcast(x, at)
    if x.opcode == "reduce" and number == 0:
        return _full(operand, hero, space)
    return None


def _full(value: HloInstruction, hero: HloInstruction, space: IterationSpace) -> IndexMap | None:
    """The position of a value with as many elements as the space has points, in the space's order."""
    whole = hero.operands[0] if hero.opcode == "reduce" else hero
    if value.shape.dims == whole.shape.dims:
        if hero.opcode == "reduce":
            return reduce_space(hero)[1]
        if hero.opcode not in REDUCING:
            return tuple(dim(d) if e != 1 else constant(0) for d, e in enumerate(value.shape.dims))
    if hero.opcode not in REDUCING and value.shape.size == whole.shape.size:
        return full_place(value.shape.dims, space)
    return None


UPDATES = frozenset(("dynamic-update-slice", "scatter"))


@dataclass(frozen=True)
class UpdatePlan:
    """An update of an array.

    Attributes:
        plan: its computation; its operands are the arrays, then the result.
        target: the array whose value the result begins with.
        arrays: inputs of the plan.
        result: the array afterwards.
    """

    plan: KernelPlan
    target: HloInstruction
    arrays: tuple[HloInstruction, ...]
    result: HloInstruction


def plan_update(name: str, group: Sequence[HloInstruction], root: HloInstruction) -> UpdatePlan:
    """The kernel of a group whose one result is an update of an array.

    It may read the array itself, `scatter(x, i, x)`: then it changes a copy, see `overwritten_pairs`.

    Raises:
        NoPlan: the group is not one kernel.
    """
    inside = dict.fromkeys(group)
    target = array_beneath(root.operands[0])
    if target in inside:
        raise NoPlan("{0} changes {1}, which is computed in the same group", root, target)
    trace = _slice_update(name, inside, root) if root.opcode != "scatter" else _scatter(name, inside, root)
    others = [i for i in group if i is not root and i.opcode != "bitcast"]
    if any(array_beneath(o) is target for i in others for o in i.operands):
        raise NoPlan("{0} reads elsewhere in the array that it changes", root)
    return UpdatePlan(trace.finish(), target, tuple(trace.arrays), root)


def array_beneath(value: HloInstruction) -> HloInstruction:
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value


def _slice_update(name: str, inside: dict[HloInstruction, None], root: HloInstruction) -> Trace:
    source, update, *starts = root.operands
    dims = update.shape.dims
    trace = Trace(name, IterationSpace(dims), inside)
    at = tuple(dim(d) for d in range(len(dims)))
    node = trace.value(update, at)
    place = [
        index + clamped_start(trace, start, (), full - size, -1)
        for index, start, full, size in zip(at, starts, source.shape.dims, dims)
    ]
    operand = trace.operand(root.shape.dtype, root.shape.size)
    trace.build.store(operand, linear(place, strides_of(root.shape.dims)), node)
    return trace


def _scatter(name: str, inside: dict[HloInstruction, None], root: HloInstruction) -> Trace:
    if len(root.operands) != 3:
        raise NoPlan("no kernel scatters into several arrays at once")
    source, indices, updates = root.operands
    dims, numbers = updates.shape.dims, root.scatter_dims
    trace = Trace(name, IterationSpace(dims), inside)
    combine = _combiner(root)
    if combine and root.shape.dtype not in REDUCTIONS[combine].dtypes:
        raise NoPlan(f"no kernel combines {root.shape.dtype} by {combine}")
    batch = [dim(d) for d in range(len(dims)) if d not in numbers.update_window_dims]
    skipped = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    windowed = [d for d in range(source.shape.rank) if d not in skipped]
    place, sizes = [constant(0)] * source.shape.rank, [1] * source.shape.rank
    for d, along in zip(windowed, numbers.update_window_dims):
        place[d], sizes[d] = dim(along), dims[along]
    batch_dims = [d for d in range(indices.shape.rank) if d != numbers.index_vector_dim]
    for d, along in zip(numbers.input_batching_dims, numbers.scatter_indices_batching_dims):
        place[d] = batch[batch_dims.index(along)]
    where = -1
    for number, d in enumerate(numbers.scatter_dims_to_operand_dims):
        start_index = trace.value(indices, index_place(batch, number, numbers.index_vector_dim, indices))
        start = value(trace.build.convert(start_index, "s64"))
        condition = trace.within(start, 0, source.shape.dims[d] - sizes[d] + 1)
        where = trace.guarded(where, condition)
        place[d] = place[d] + start
    node = trace.value(updates, tuple(dim(d) for d in range(len(dims))))
    operand = trace.operand(root.shape.dtype, root.shape.size)
    position = linear(place, strides_of(source.shape.dims))
    trace.build.store(operand, position, node, combine=combine, where=where)
    return trace


def _combiner(scatter: HloInstruction) -> str:
    """The reduction by which updates are combined with the old values, or "" if they replace them."""
    root = scatter.to_apply.root
    if root.opcode == "parameter" and root.parameter_number == 1:
        return ""
    return reducer_of(scatter.to_apply)
