"""Collectives between CPU devices: kernels that address the arrays of other devices in place.

The devices of a mesh are threads of one process.  Each reads the parts that it gets from its peers' operands;
in an all-reduce each reduces a share of the elements and also writes them to its peers' results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.kernels.index import Index, dim, linear
from mpmd.compile.kernels.kernel_plan import KernelPlan, Load
from mpmd.compile.kernels.plan_builder import PlanBuilder, renumbered
from mpmd.compile.kernels.planner.collectives import CollectiveArray, CollectivePlan

OWN = -1
"""The member that stands for the device itself."""

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
class PeerKernel:
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


def peer_refusal(plan: CollectivePlan) -> str:
    """Why no kernels carry out a collective; "" if they do: each device addresses as many others."""
    sizes = sorted({len(group) for group in plan.groups})
    if len(sizes) > 1 or (not _is_permute(plan) and sizes[-1] > _MAX_MEMBERS):
        return f"native code joins groups of one size, at most {_MAX_MEMBERS}; these have {sizes} devices"
    return ""


def members_of(plan: CollectivePlan) -> tuple[tuple[int, ...], ...]:
    """Per device the devices whose arrays its kernels touch, as many for each."""
    return tuple(tuple(s for s, _ in sources) or (d,) for d, sources in enumerate(plan.sources))


def ranks_of(plan: CollectivePlan) -> tuple[int, ...]:
    """Per device its place in its group."""
    rank = {device: place for group in plan.groups for place, device in enumerate(group)}
    return tuple(rank[d] for d in range(plan.devices))


def published(kernels: Sequence[PeerKernel]) -> tuple[int, ...]:
    """Numbers of the arrays that kernels of other devices touch."""
    return tuple(sorted({p.array for kernel in kernels for p in kernel.pointers if p.member != OWN}))


def peer_kernels(plan: CollectivePlan) -> list[PeerKernel]:
    """The kernels of a collective that is not refused, without those of empty arrays."""
    kernels: list[PeerKernel] = []
    for number, array in enumerate(plan.arrays):
        result = len(plan.arrays) + number
        if not array.size:
            continue
        if _is_permute(plan):
            kernels += _permute(plan, array, number, result)
        elif plan.opcode == "all-reduce":
            kernels.append(_all_reduce(plan, array, number, result))
        else:
            kernels.append(_collected(plan, array, number, result))
    return kernels


def _is_permute(plan: CollectivePlan) -> bool:
    return plan.opcode in ("collective-permute", "collective-broadcast")


def _all_reduce(plan: CollectivePlan, array: CollectiveArray, number: int, result: int) -> PeerKernel:
    """Every member reduces its share of the elements and writes it to the results of all."""
    members = range(len(plan.groups[0]))
    build = PlanBuilder("kernel", (array.size,))
    sources = [build.operand("", array.dtype, array.size) for _ in members]
    total = _reduced(build, array, [build.load(s, dim(0)) for s in sources])
    for _ in members:
        build.store(build.operand("", array.dtype, array.size), dim(0), total)
    pointers = [*(Pointer(number, m) for m in members), *(Pointer(result, m) for m in members)]
    return PeerKernel(build.finish(), tuple(pointers), shared=True)


def _collected(plan: CollectivePlan, array: CollectiveArray, number: int, result: int) -> PeerKernel:
    """Every member reduces or copies the parts that it gets from all."""
    count, elements = len(plan.groups[0]), array.elements
    build = PlanBuilder("kernel", (array.rows, elements))
    whole = array.size - (array.parts - 1) * elements  # from a part's beginning in the first row on
    sources = [build.operand("", array.dtype, whole) for _ in range(count)]
    loads = [build.load(s, _in_part(array.parts * elements)) for s in sources]
    place, width = count * elements, count
    if array.reduction is not None:
        loads, place, width = [_reduced(build, array, loads)], elements, 1
    target = build.operand("", array.dtype, array.rows * elements * width)
    for m, value in enumerate(loads):
        build.store(target, _in_part(place, m * elements), value)
    stride = elements if array.parts > 1 else 0
    return PeerKernel(build.finish(), (*(Pointer(number, m, stride) for m in range(count)), Pointer(result)))


def _permute(plan: CollectivePlan, array: CollectiveArray, number: int, result: int) -> list[PeerKernel]:
    """Every target copies its source's operand; the other devices write zeros."""
    targets = tuple(d for d, sources in enumerate(plan.sources) if sources)
    others = tuple(d for d, sources in enumerate(plan.sources) if not sources)
    build = PlanBuilder("kernel", (array.size,))
    source, target = (build.operand("", array.dtype, array.size) for _ in range(2))
    build.store(target, dim(0), build.load(source, dim(0)))
    pointers = (Pointer(number, 0), Pointer(result))
    kernels = [PeerKernel(build.finish(), pointers, devices=None if not others else targets)]
    if others:
        build = PlanBuilder("kernel", (array.size,))
        zero = build.constant(False if array.dtype == "pred" else 0, array.dtype)
        build.store(build.operand("", array.dtype, array.size), dim(0), zero)
        kernels.append(PeerKernel(build.finish(), (Pointer(result),), devices=others))
    return kernels


def _in_part(stride: int, offset: int = 0) -> Index:
    """Element `dim 1` of a part in row `dim 0` of rows that are `stride` elements apart."""
    return linear([dim(0), dim(1)], [stride, 1], offset)


def _reduced(build: PlanBuilder, array: CollectiveArray, values: Sequence[int]) -> int:
    """The reduction of one value per member, in their order."""
    reduction = array.reduction
    assert reduction is not None
    dtype = reduction.operands[0].dtype
    total = build.convert(values[0], dtype)
    for value in values[1:]:
        given, numbers = (total, build.convert(value, dtype)), dict[int, int]()
        for number, node in enumerate(reduction.nodes):
            if isinstance(node, Load):
                numbers[number] = given[node.operand]
            else:
                numbers[number] = build.node(renumbered(node, numbers))
        total = numbers[reduction.stores[0].node]
    return build.convert(total, array.dtype)
