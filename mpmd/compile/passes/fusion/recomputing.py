"""Attention backward: compute the forward's rows again, or keep what they gave."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.cost.device import Device
from mpmd.compile.kernels.cost.models import projected
from mpmd.compile.kernels.cost.workload import KernelWorkload
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.passes.fusion.attention import AttentionCandidate, Search, attention_of, together


def recompute_or_keep(search: Search, device: Device) -> None:
    """Let groups read what earlier groups computed, too, where that is cheaper than computing it again.

    Args:
        search: the groups, changed in place.
        device: what prices the choice; a description and not a measurement, so that the choice is always the
            same.
    """
    for number, group in enumerate(search.groups):
        for index, earlier in enumerate(search.groups[:number]):
            shared = group.cone.scores.keys() & earlier.cone.scores.keys()
            if not shared:
                continue
            inputs = _inputs(search, group, earlier)
            share = search.plan(earlier, search.results(earlier, search.groups[:index], ())).plan.share
            again = _seconds_again(group, earlier, share, device)
            kept = _seconds_kept(inputs, device)
            if kept < again:
                search.refuse(
                    f"{group.mixtures[0].name} reads {', '.join(b.name for b in inputs)}: "
                    f"keeping them takes {kept * 1e6:.0f} us, computing them again {again * 1e6:.0f} us"
                )
                _stop_at(search, number, inputs)
                break
    search.groups = [g for g in search.groups if g.mixtures]


def _inputs(search: Search, group: AttentionCandidate, earlier: AttentionCandidate) -> list[HloInstruction]:
    """The values that the later group would read of the earlier one."""
    shared = (group.members & earlier.members) - group.cone.repeated
    own = group.members - shared
    found = []
    for value in search.sorted(shared):
        readers = {u for u in value.users if u in own}
        if readers:
            found.append(value)
    return found


def _seconds_again(
    group: AttentionCandidate, earlier: AttentionCandidate, share: float, device: Device
) -> float:
    """What computing the shared members a second time takes."""
    seconds = 0.0
    vectors = 0.0
    for member in (group.members & earlier.members) - group.cone.repeated:
        if member in group.cone.scores:
            depth = _depth(member)
            work = _matmul(2.0 * member.shape.size * depth * share, member.operands[0].shape.dtype)
            seconds += projected(work, device).seconds
        elif member.opcode in OPERATIONS:
            vectors += 4.0 * member.shape.size * OPERATIONS[member.opcode].cycles * share
        elif member.opcode == "reduce":
            vectors += 4.0 * member.operands[0].shape.size * share
    return seconds + vectors / device.vector_bytes / device.vector_rate


def _depth(dot: HloInstruction) -> int:
    depth = 1
    for d in dot.dot_dims.lhs_contracting:
        depth *= dot.operands[0].shape.dims[d]
    return depth


def _matmul(flops: float, dtype: str) -> KernelWorkload:
    return KernelWorkload("matmul", flops, 0.0, 0.0, 0.0, 0.0, parts=1 << 20, matmul_dtype=dtype)


def _seconds_kept(inputs: Sequence[HloInstruction], device: Device) -> float:
    """What writing values and reading them again takes."""
    size = 2.0 * sum(v.shape.byte_size for v in inputs)
    return size / device.bandwidth_for(size)


def _stop_at(search: Search, number: int, inputs: Sequence[HloInstruction]) -> None:
    """Build a group again that reads the inputs; mixtures of what it reads stay products."""
    group = search.groups[number]
    rebuilt: AttentionCandidate | None = None
    for dot in group.mixtures:
        attention = attention_of(dot, inputs)
        if attention is None:
            continue
        joined = attention if rebuilt is None else together(rebuilt, attention)
        if joined is not None and not search.refusal(joined, search.groups[:number]):
            rebuilt = joined
    search.groups[number] = rebuilt or AttentionCandidate(group.cone, [], {})
