"""Sorting: the position of an element is the number of elements that come before it.

Equal elements keep their order.  Comparing every pair of a row suits the short rows that routers and beams
sort; for longer ones a target has better ways to the same result (`kernels/sorting.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mpmd.compile.hlo.attributes import SliceDims
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import dim, linear, strides_of, value
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.planner.comparators import Comparator
from mpmd.compile.kernels.planner.elements import NoPlan, Trace, check_dtype
from mpmd.compile.kernels.planner.iteration_space import IterationSpace
from mpmd.errors import CompileError

_MAX_ARRAYS = 64  # each deepens the comparison, which is planned recursively


def plan_sort(name: str, sort: HloInstruction) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort, and the arrays that it reads; its results follow them.

    Raises:
        NoPlan: kernels do not support the comparison.
    """
    every = range(len(sort.operands))
    return _planned(name, sort, every, sort.operands[0].shape.dims[sort.dimensions[0]], ())


def plan_sort_prefix(
    name: str, group: Sequence[HloInstruction], results: Sequence[HloInstruction]
) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort of whose results only the first elements are used; see `plan_sort`.

    Args:
        name: symbol of the kernel.
        group: the sort, the iota of its positions, its elements, and slices of them.
        results: the slices.

    Raises:
        NoPlan: something else is in the group, or kernels do not support the comparison.
    """
    sort = next(i for i in group if i.opcode == "sort")
    (along,), dims = sort.dimensions, sort.operands[0].shape.dims
    taken = results[0].shape.dims[along]
    numbers = []
    for result in results:
        element = result.operands[0] if result.opcode == "slice" else result
        whole = (*dims[:along], taken, *dims[along + 1 :])
        of_sort = element is sort or (element.opcode == "get-tuple-element" and element.operands[0] is sort)
        if not of_sort or result.opcode != "slice" or result.slice_dims != first_elements(whole):
            raise NoPlan("{0} is not the beginning of a sorted array", result)
        numbers.append(0 if element is sort else element.tuple_index)
    return _planned(name, sort, numbers, taken, group)


def first_elements(dims: Sequence[int]) -> SliceDims:
    """The slice that takes the first elements along each dim."""
    return SliceDims((0,) * len(dims), tuple(dims), (1,) * len(dims))


def _planned(
    name: str, sort: HloInstruction, numbers: Iterable[int], taken: int, inside: Iterable[HloInstruction]
) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort that writes as many elements as are taken, of the operands with these numbers."""
    (along,), dims = sort.dimensions, sort.operands[0].shape.dims
    if len(sort.operands) > _MAX_ARRAYS:
        raise NoPlan(f"it sorts {len(sort.operands)} arrays at once")
    rank, order = len(dims), [*(d for d in range(len(dims)) if d != along), along]
    # the space: the other dims, the element that is placed, the element that it is compared with
    space = IterationSpace((*(dims[d] for d in order), dims[along]), 0, 1)
    comparator = sort.to_apply
    trace = Trace(name, space, dict.fromkeys((*comparator.post_order(), *inside)))
    places = {d: dim(k) for k, d in enumerate(order)}
    here = tuple(places[d] for d in range(rank))
    there = tuple(dim(rank) if d == along else places[d] for d in range(rank))
    mine = [trace.value(check_dtype(o), here) for o in sort.operands]
    its = [trace.value(check_dtype(o), there) for o in sort.operands]
    before = _compared(trace, comparator.parameters, comparator.root, its, mine)
    after = _compared(trace, comparator.parameters, comparator.root, mine, its)
    build = trace.build
    earlier = build.apply("compare-lt", build.index(dim(rank)), build.index(dim(rank - 1)))
    first = build.apply("or", before, build.apply("and", build.apply("not", after), earlier))
    count = build.reduce_row("add", build.convert(first, "s32"))
    where = -1
    if taken < dims[along]:
        where = build.apply("compare-lt", count, build.constant(taken, "s32"))
    kept = [taken if d == along else e for d, e in enumerate(dims)]
    for number in numbers:
        target = tuple(value(count) if d == along else places[d] for d in range(rank))
        result = trace.operand(sort.operands[number].shape.dtype, math.prod(kept))
        build.store(result, linear(target, strides_of(kept)), mine[number], where=where)
    try:
        return build.finish(), tuple(trace.arrays)
    except CompileError as error:
        raise NoPlan(str(error)) from error


def _compared(
    trace: Trace, parameters: list[HloInstruction], root: HloInstruction, a: list[int], b: list[int]
) -> int:
    """The comparator's answer for two elements, as a strict weak order."""
    trace.substitute(dict(zip(parameters, [node for pair in zip(a, b) for node in pair])))
    node = trace.value(root, ())
    trace.substitute({})
    return Comparator(trace.build, a, b, node).answer
