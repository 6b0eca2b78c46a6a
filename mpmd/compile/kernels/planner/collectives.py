"""A collective: which parts of whose arrays each device gets, and how parts are reduced.

How devices reach each other's arrays is the target's: kernels that read shared memory, messages, a library.
A target that cannot carry out a plan refuses it (`Target.refuses`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.collective_groups import collective_groups, permute_pairs
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.planner.elements import NoPlan, Trace, check_dtype
from mpmd.compile.kernels.planner.iteration_space import IterationSpace
from mpmd.errors import CompileError

_WIDE = {"bf16": "f32", "f16": "f32"}

COLLECTIVES = frozenset(
    ("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter")
)
"""Opcodes of collectives that have plans."""


@dataclass(frozen=True)
class CollectiveArray:
    """An operand of a collective, as an array [rows, parts, elements], and what becomes of it.

    Attributes:
        dtype: of its elements, and of those of the result.
        rows: its first dim.
        parts: its second dim; devices get one part each, the same in all rows.
        elements: its last dim.
        reduction: a kernel that reduces two parts, operands 0 and 1, to operand 2, in the dtype in which sums
            are kept; None where the parts that a device gets become the second dim of its result.
    """

    dtype: str
    rows: int
    parts: int
    elements: int
    reduction: KernelPlan | None = None

    @property
    def size(self) -> int:
        return self.rows * self.parts * self.elements


@dataclass(frozen=True)
class CollectivePlan:
    """A collective.

    Attributes:
        opcode: its opcode.
        devices: how many devices run the program.
        groups: devices that take part together; each device is in one group at most.
        sources: per device what it gets of each array, in order: a device, and the number of its part.  The
            result of a device that gets nothing is zeros.
        arrays: its operands; it has as many results.
    """

    opcode: str
    devices: int
    groups: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[tuple[int, int], ...], ...]
    arrays: tuple[CollectiveArray, ...]

    def may_share(self, operand: int, result: int) -> bool:
        """Whether a result may take its operand's memory: it needs each element only at the same place."""
        return self.opcode == "all-reduce" and operand == result


def plan_collective(name: str, instruction: HloInstruction) -> CollectivePlan:
    """The plan of a collective.

    Args:
        name: symbol of its kernels.
        instruction: the collective.

    Raises:
        NoPlan: it has elements or a reduction that kernels do not have, or leaves out devices.
    """
    for operand in instruction.operands:
        check_dtype(operand)
    module, opcode = instruction.parent.module, instruction.opcode
    replicas, partitions = module.replica_count, module.num_partitions
    devices = replicas * partitions
    if opcode == "collective-permute":
        return _permute(instruction, permute_pairs(instruction, replicas, partitions), devices)
    groups = tuple(collective_groups(instruction, replicas, partitions))
    if opcode == "collective-broadcast":
        pairs = [(group[0], device) for group in groups for device in group]
        return _permute(instruction, pairs, devices)
    if sum(map(len, groups)) != devices:
        raise NoPlan(f"the groups {instruction.replica_groups} leave out some of {devices} devices")
    if opcode == "all-to-all" and not instruction.dimensions:
        raise NoPlan("no kernel exchanges the elements of tuples")
    _check_sizes(instruction, groups)
    group_of = {device: group for group in groups for device in group}
    divided = opcode in ("reduce-scatter", "all-to-all")
    sources = tuple(
        tuple((member, group_of[d].index(d) if divided else 0) for member in group_of[d])
        for d in range(devices)
    )
    parts = len(groups[0]) if divided else 1
    arrays = tuple(_array(name, instruction, operand, parts) for operand in instruction.operands)
    return CollectivePlan(opcode, devices, groups, sources, arrays)


def _check_sizes(instruction: HloInstruction, groups: Sequence[Sequence[int]]) -> None:
    """The sizes of groups show in the shapes: text may be meant for other devices than its header says."""
    opcode = instruction.opcode
    results = instruction.shape.elements if instruction.shape.is_tuple else (instruction.shape,)
    for count in {len(group) for group in groups}:
        gathered, scattered = (count if opcode == o else 1 for o in ("all-gather", "reduce-scatter"))
        fits = all(
            operand.shape.size * gathered == result.size * scattered
            for operand, result in zip(instruction.operands, results, strict=True)
        )
        parts = [o.shape.dims[d] for o in instruction.operands for d in instruction.dimensions]
        if not fits or (opcode == "all-to-all" and any(n % count for n in parts)):
            of = ", ".join(str(o.shape.logical) for o in instruction.operands)
            raise NoPlan(
                f"{opcode} {instruction.name} makes {instruction.shape.logical} of {of}, which groups of "
                f"{count} devices do not: the header's replica_count and num_partitions must fit its groups"
            )


def _array(name: str, instruction: HloInstruction, operand: HloInstruction, parts: int) -> CollectiveArray:
    dtype, dims, opcode = operand.shape.dtype, operand.shape.dims, instruction.opcode
    rows = 1 if opcode == "all-reduce" else math.prod(dims[: instruction.dimensions[0]])
    elements = operand.shape.size // max(1, rows * parts)
    reduced = opcode in ("all-reduce", "reduce-scatter")
    reduction = _reduction(name, instruction.to_apply, dtype, rows * elements) if reduced else None
    return CollectiveArray(dtype, rows, parts, elements, reduction)


def _permute(instruction: HloInstruction, pairs: Sequence[tuple[int, int]], devices: int) -> CollectivePlan:
    source_of = {target: source for source, target in pairs}
    sources = tuple(((source_of[d], 0),) if d in source_of else () for d in range(devices))
    arrays = tuple(CollectiveArray(o.shape.dtype, 1, 1, o.shape.size) for o in instruction.operands)
    return CollectivePlan(instruction.opcode, devices, (tuple(range(devices)),), sources, arrays)


def _reduction(name: str, reducer: HloComputation, dtype: str, size: int) -> KernelPlan:
    """The reduction of two parts; sums of narrow floats are kept in wide ones."""
    opcode = simple_opcode(reducer)
    if opcode is not None and dtype not in OPERATIONS[opcode].dtypes:
        raise NoPlan(f"no kernel computes {opcode} of {dtype}")
    if opcode in ("add", "multiply"):
        dtype = _WIDE.get(dtype, dtype)
    trace = Trace(name, IterationSpace((size,), 0, 0), dict.fromkeys(reducer.post_order()))
    build = trace.build
    first, second = (build.load(trace.operand(dtype, size), dim(0)) for _ in range(2))
    if opcode is not None:
        total = build.apply(opcode, first, second)
    else:
        trace.substitute(dict(zip(reducer.parameters, (first, second))))
        total = trace.value(reducer.root, ())
    build.store(trace.operand(dtype, size), dim(0), total)
    try:
        return build.finish()
    except CompileError as error:
        raise NoPlan(str(error)) from error
