"""A collective: which devices take part, and the kernels of those that address each other's memory.

A kernel reads the arrays of other devices in place, and in an all-reduce also writes into theirs: each device
sums a share of the elements for all.  A target whose devices exchange messages takes opcode and groups of a
plan and leaves its kernels alone, or refuses the plan (`Target.refuses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpmd.compile.hlo.collective_groups import collective_groups, permute_pairs
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.reducers import simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import Index, dim, linear
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.plan import KernelPlan
from mpmd.compile.kernels.planning.iteration_space import IterationSpace
from mpmd.compile.kernels.planning.trace import NoPlan, Trace, check_dtype
from mpmd.errors import CompileError

OWN = -1
"""The member that stands for the device itself."""

_WIDE = {"bf16": "f32", "f16": "f32"}
_MAX_MEMBERS = 16
"""Devices of a group: beyond this a kernel would take too many pointers."""


@dataclass(frozen=True)
class Pointer:
    """Where a kernel of a collective finds an array.

    Attributes:
        array: number among the operands, then the results, of the collective.
        member: whose array: a position in the device's list of members, or `OWN`.
        stride: elements to go further per rank of the device.
    """

    array: int
    member: int = OWN
    stride: int = 0


@dataclass(frozen=True)
class CollectiveKernel:
    """A kernel that devices run while all of them are there.

    Attributes:
        plan: what it computes.
        pointers: one per operand of the plan.
        shared: whether each member does only its share of the work's units.
        devices: which devices run it; all if None.
    """

    plan: KernelPlan
    pointers: tuple[Pointer, ...]
    shared: bool = False
    devices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CollectivePlan:
    """A collective.

    Attributes:
        opcode: its opcode.
        devices: how many devices run the program.
        groups: devices that wait for each other; each device is in one group at most.
        members: per device the devices whose arrays its kernels touch, as many for each.
        ranks: per device its place in its group.
        pieces: its kernels, where devices address each other's memory.
        operands: how many arrays it reads; its results come after them.
    """

    opcode: str
    devices: int
    groups: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    pieces: tuple[CollectiveKernel, ...]
    operands: int

    @property
    def peers(self) -> tuple[int, ...]:
        """Numbers of the arrays that kernels of other devices touch."""
        used = {p.array for piece in self.pieces for p in piece.pointers if p.member != OWN}
        return tuple(sorted(used))

    def may_share(self, operand: int, result: int) -> bool:
        """Whether a result may take its operand's memory: where each element is summed by one device."""
        return self.opcode == "all-reduce" and operand == result


def plan_collective(name: str, instruction: HloInstruction) -> CollectivePlan:
    """The work of a collective.

    Args:
        name: symbol of its kernels.
        instruction: the collective.

    Raises:
        NoPlan: of a kind, element type or grouping that kernels do not have.
    """
    for operand in instruction.operands:
        check_dtype(operand)
    module, opcode = instruction.parent.module, instruction.opcode
    replicas, partitions = module.replica_count, module.num_partitions
    devices = replicas * partitions
    if opcode == "collective-permute":
        return _permute(name, instruction, permute_pairs(instruction, replicas, partitions), devices)
    groups = tuple(collective_groups(instruction, replicas, partitions))
    if opcode == "collective-broadcast":
        pairs = [(group[0], device) for group in groups for device in group]
        return _permute(name, instruction, pairs, devices)
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or max(sizes) > _MAX_MEMBERS or sum(map(len, groups)) != devices:
        raise NoPlan(f"no kernel joins the groups {instruction.replica_groups} of {devices} devices")
    group_of = {device: group for group in groups for device in group}
    return CollectivePlan(
        opcode,
        devices,
        groups,
        tuple(group_of[d] for d in range(devices)),
        tuple(group_of[d].index(d) for d in range(devices)),
        tuple(_PIECES[opcode](name, instruction, sizes.pop())),
        len(instruction.operands),
    )


def _results(instruction: HloInstruction) -> list[Shape]:
    return [shape for _, shape in instruction.shape.leaves()]


def _all_reduce(name: str, instruction: HloInstruction, count: int) -> list[CollectiveKernel]:
    """Every member sums its share of the elements and writes the sums into everybody's result."""
    pieces = []
    for number, operand in enumerate(instruction.operands):
        size, dtype = operand.shape.size, operand.shape.dtype
        trace = _trace(name, instruction.to_apply, (size,))
        sources = [trace.operand(dtype, size) for _ in range(count)]
        total = _joined(trace, instruction.to_apply, [trace.build.load(s, dim(0)) for s in sources], dtype)
        for _ in range(count):
            trace.build.store(trace.operand(dtype, size), dim(0), total)
        result = len(instruction.operands) + number
        pointers = [*(Pointer(number, m) for m in range(count)), *(Pointer(result, m) for m in range(count))]
        pieces.append(CollectiveKernel(_finished(trace.build), tuple(pointers), shared=True))
    return pieces


def _reduce_scatter(name: str, instruction: HloInstruction, count: int) -> list[CollectiveKernel]:
    """Every member sums its part of everybody's operand."""
    pieces = []
    for number, (operand, result) in enumerate(zip(instruction.operands, _results(instruction), strict=True)):
        outer, inner = _around(result, instruction.dimensions[0])
        dtype, whole = operand.shape.dtype, operand.shape.size - (count - 1) * inner
        trace = _trace(name, instruction.to_apply, (outer, inner))
        sources = [trace.operand(dtype, whole) for _ in range(count)]
        loads = [trace.build.load(s, _part(count * inner)) for s in sources]
        total = _joined(trace, instruction.to_apply, loads, dtype)
        trace.build.store(trace.operand(dtype, result.size), _part(inner), total)
        pointers = [Pointer(number, m, inner) for m in range(count)]
        place = Pointer(len(instruction.operands) + number)
        pieces.append(CollectiveKernel(_finished(trace.build), (*pointers, place)))
    return pieces


def _all_gather(name: str, instruction: HloInstruction, count: int) -> list[CollectiveKernel]:
    """Every member copies everybody's operand."""
    pieces = []
    for number, (operand, result) in enumerate(zip(instruction.operands, _results(instruction), strict=True)):
        outer, inner = _around(operand.shape, instruction.dimensions[0])
        build = PlanBuilder(name, (outer, inner))
        sources = [build.operand("", operand.shape.dtype, operand.shape.size) for _ in range(count)]
        target = build.operand("", operand.shape.dtype, result.size)
        for m, source in enumerate(sources):
            build.store(target, _part(count * inner, m * inner), build.load(source, _part(inner)))
        pointers = [Pointer(number, m) for m in range(count)]
        place = Pointer(len(instruction.operands) + number)
        pieces.append(CollectiveKernel(_finished(build), (*pointers, place)))
    return pieces


def _all_to_all(name: str, instruction: HloInstruction, count: int) -> list[CollectiveKernel]:
    """Every member copies its part of everybody's operand."""
    if not instruction.dimensions:
        raise NoPlan("no kernel exchanges the elements of tuples")
    (operand,) = instruction.operands
    shape, along = operand.shape, instruction.dimensions[0]
    outer = math.prod(shape.dims[:along])
    inner = shape.size // max(1, outer * count)
    build = PlanBuilder(name, (outer, inner))
    sources = [build.operand("", shape.dtype, shape.size - (count - 1) * inner) for _ in range(count)]
    target = build.operand("", shape.dtype, shape.size)
    for m, source in enumerate(sources):
        build.store(target, _part(count * inner, m * inner), build.load(source, _part(count * inner)))
    return [CollectiveKernel(_finished(build), (*(Pointer(0, m, inner) for m in range(count)), Pointer(1)))]


def _permute(
    name: str, instruction: HloInstruction, pairs: Sequence[tuple[int, int]], devices: int
) -> CollectivePlan:
    """Every target copies its source's operands; a device that is not a target gets zeros."""
    sources = {target: source for source, target in pairs}
    targets, others = tuple(sorted(sources)), tuple(d for d in range(devices) if d not in sources)
    count, pieces = len(instruction.operands), []
    for number, operand in enumerate(instruction.operands):
        shape = operand.shape
        build = PlanBuilder(name, (shape.size,))
        source, target = (build.operand("", shape.dtype, shape.size) for _ in range(2))
        build.store(target, dim(0), build.load(source, dim(0)))
        pointers = (Pointer(number, 0), Pointer(count + number))
        pieces.append(CollectiveKernel(_finished(build), pointers, devices=None if not others else targets))
        if others:
            build = PlanBuilder(name, (shape.size,))
            zero = build.constant(False if shape.dtype == "pred" else 0, shape.dtype)
            build.store(build.operand("", shape.dtype, shape.size), dim(0), zero)
            pieces.append(CollectiveKernel(_finished(build), (Pointer(count + number),), devices=others))
    return CollectivePlan(
        instruction.opcode,
        devices,
        (tuple(range(devices)),),
        tuple((sources.get(d, d),) for d in range(devices)),
        tuple(range(devices)),
        tuple(pieces),
        count,
    )


def _around(shape: Shape, along: int) -> tuple[int, int]:
    """Elements before a dim, and elements from it on."""
    return math.prod(shape.dims[:along]), math.prod(shape.dims[along:])


def _part(stride: int, offset: int = 0) -> Index:
    """Element of part `dim 1` in row `dim 0` of rows that lie `stride` elements apart."""
    return linear([dim(0), dim(1)], [stride, 1], offset)


def _trace(name: str, reducer: HloComputation, extents: tuple[int, ...]) -> Trace:
    return Trace(name, IterationSpace(extents, 0, 0), dict.fromkeys(reducer.post_order()))


def _joined(trace: Trace, reducer: HloComputation, values: Sequence[int], dtype: str) -> int:
    """The reduction of one value per member, in their order; sums of narrow floats are kept in wide ones."""
    build, opcode = trace.build, simple_opcode(reducer)
    if opcode is not None and dtype not in OPERATIONS[opcode].dtypes:
        raise NoPlan(f"no kernel computes {opcode} of {dtype}")
    total = values[0]
    if opcode in ("add", "multiply") and dtype in _WIDE:
        total = build.convert(total, _WIDE[dtype])
        for value in values[1:]:
            total = build.apply(opcode, total, build.convert(value, _WIDE[dtype]))
        return build.convert(total, dtype)
    for value in values[1:]:
        if opcode is not None:
            total = build.apply(opcode, total, value)
            continue
        trace.substitute(dict(zip(reducer.parameters, (total, value))))
        total = trace.value(reducer.root, ())
        trace.substitute({})
    return total


def _finished(build: PlanBuilder) -> KernelPlan:
    try:
        return build.finish()
    except CompileError as error:
        raise NoPlan(str(error)) from error


_PIECES: dict[str, Callable[[str, HloInstruction, int], list[CollectiveKernel]]] = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "reduce-scatter": _reduce_scatter,
}

COLLECTIVES = frozenset({*_PIECES, "collective-permute", "collective-broadcast"})
"""Opcodes of collectives that kernels compute."""
