"""Updates in place: dynamic-update-slice and scatter iterate over the update, not over the whole array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import constant, dim, linear, strides_of, value
from mpmd.compile.kernels.operations import REDUCTIONS
from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.kernels.planning.iteration_space import IterationSpace, reducer_of
from mpmd.compile.kernels.planning.rules import clamped_start, index_place
from mpmd.compile.kernels.planning.trace import NoPlan, Trace

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
        found = trace.value(indices, index_place(batch, number, numbers.index_vector_dim, indices))
        start = value(trace.build.convert(found, "s64"))
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
