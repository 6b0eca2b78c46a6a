"""Sorting: the place of an element is the number of elements that come before it.

Equal elements keep their order.  Comparing every pair of a row suits the short rows that routers and beams
sort; for longer ones a target has better ways to the same result (`kernels/sorting.py`).
"""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import Index, dim, linear, strides_of, value
from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.kernels.planning.frames import Frame
from mpmd.compile.kernels.planning.trace import NoPlan, Trace, check_dtype
from mpmd.errors import CompileError


def plan_sort(name: str, sort: HloInstruction) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort, and the arrays that it reads; its results follow them.

    Raises:
        NoPlan: the comparison is not one of kernels.
    """
    (along,), dims = sort.dimensions, sort.operands[0].shape.dims
    rank, order = len(dims), [*(d for d in range(len(dims)) if d != along), along]
    # the space: the other dims, the element that is placed, the element that it is compared with
    frame = Frame((*(dims[d] for d in order), dims[along]), 0, 1)
    comparator = sort.to_apply
    trace = Trace(name, frame, dict.fromkeys(comparator.post_order()))
    places = {d: dim(k) for k, d in enumerate(order)}
    here = tuple(places[d] for d in range(rank))
    there = tuple(dim(rank) if d == along else places[d] for d in range(rank))

    def element(operand: HloInstruction, at: tuple[Index, ...]) -> int:
        return trace.build.load(trace.array(check_dtype(operand)), linear(at, strides_of(dims)))

    mine = [element(o, here) for o in sort.operands]
    its = [element(o, there) for o in sort.operands]
    before = _compared(trace, comparator.parameters, comparator.root, its, mine)
    after = _compared(trace, comparator.parameters, comparator.root, mine, its)
    build = trace.build
    earlier = build.apply("compare-lt", build.index(dim(rank)), build.index(dim(rank - 1)))
    first = build.apply("or", before, build.apply("and", build.apply("not", after), earlier))
    count = build.reduce_row("add", build.convert(first, "s32"))
    for operand, node in zip(sort.operands, mine):
        target = tuple(value(count) if d == along else places[d] for d in range(rank))
        result = trace.operand(operand.shape.dtype, operand.shape.size)
        build.store(result, linear(target, strides_of(dims)), node)
    try:
        return build.finish(), tuple(trace.arrays)
    except CompileError as error:
        raise NoPlan(str(error)) from error


def _compared(
    trace: Trace, parameters: list[HloInstruction], root: HloInstruction, a: list[int], b: list[int]
) -> int:
    """The comparator's answer for two elements."""
    trace.substitute(dict(zip(parameters, [node for pair in zip(a, b) for node in pair])))
    node = trace.value(root, ())
    trace.substitute({})
    return node
