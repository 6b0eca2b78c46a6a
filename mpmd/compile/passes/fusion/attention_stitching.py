"""hlo-attention-stitching."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mpmd.compile.analysis.call_graph import CallGraph
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.kernels.cost.device import HOST, Device, KernelLimits
from mpmd.compile.kernels.planning.plan_cache import caching_plans
from mpmd.compile.kernels.planning.trace import NoPlan
from mpmd.compile.passes.fusion.attention import Search
from mpmd.compile.passes.fusion.outline import Outlining, remove_all_unused
from mpmd.compile.passes.fusion.row_terms import multiply_by_reciprocals, replace_row_terms
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.errors import ConfigError
from mpmd.support import diagnostics


class AttentionStitching(HloPass):
    """Forms one kernel of products, an operation on rows of their results, and products of that.

    s = dot(q, k); p = softmax(s); ROOT o = dot(p, v)  ->  ROOT o = fusion(q, k, v), kind=kCustom

    Attention forward and backward: the kernel iterates over blocks of queries and keeps a block of scores in
    the cache, so no matrix of scores is written unless something outside reads it.  There is no list of
    patterns: any elementwise work and reductions of rows between the products are planned.  Values that
    forward and backward both need are computed by both.
    Where a device says so, backward reads what forward knows of each row: reductions, and sum(dO · O).
    Masked blocks after a causal mask are skipped; rows whose own scores are as small as the mask's filler are
    detected at run time, and then computed whole.  Where values behind the mask are infinite or NaN, the
    unstitched program gives NaN and this one may not: `off` avoids that.

    Requires: no `call`; layouts are row-major.
    Ensures: every group is one kernel by its plan; each refused group is reported as a notice.
    Cost: one trial plan per product that may mix rows.
    Source: FlashAttention (Dao et al. 2022) for the iteration over blocks; stitching as in TAO's compiler.

    Attributes:
        mode: `auto` or `off`.
        device: what kernels are priced for, and whose limits they keep.
    """

    mode: str = "auto"
    device: Device = HOST

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "off"):
            raise ConfigError(
                f"option mode of {self.name} is {self.mode!r}\n  it is 'auto' or 'off': say one of them"
            )

    @caching_plans()
    def rewrite(self, module: HloModule) -> bool:
        """Rewrites `module`; True iff that changed something."""
        if self.mode == "off":
            return False
        changed = False
        for computation in CallGraph(module).sequential():
            changed |= _stitch(computation, self.device.limits)
        return changed


def _report(text: str) -> None:
    diagnostics.notice(f"hlo-attention-stitching: {text}")


def _stitch(computation: HloComputation, limits: KernelLimits) -> bool:
    if sum(i.opcode == "dot" for i in computation) < 2:
        return False
    search = Search(computation, _report, limits)
    search.run()
    if limits.attention_keeps_rows:
        replaced = replace_row_terms(search.groups)
        if multiply_by_reciprocals(search.groups) or replaced:
            remove_all_unused(computation)
            search = Search(computation, _report, limits)
            search.run()
        search.share_rows()
    outlining = Outlining(computation)
    sources: dict[HloInstruction, Sequence[HloInstruction]] = {}  # result of a kernel -> its inputs
    for number, group in enumerate(search.groups):
        results = search.results(group, search.groups[:number], search.groups[number + 1 :])
        try:
            search.plan(group, results)
        except NoPlan as reason:
            # values of this group that other groups need are computed as before
            search.refuse(f"{group.mixtures[0].name} stays a product of its own: {reason}")
            continue
        members = search.sorted(group.members)
        arrays = outlining.arrays(members, results)
        if _is_made_of(arrays, set(results), sources):
            search.refuse(f"{group.mixtures[0].name} stays a product of its own: other kernels are between")
            continue
        sources |= dict.fromkeys(results, arrays)
        outlining.add(members, results, "kCustom")
    return outlining.finish()


def _is_made_of(
    arrays: Sequence[HloInstruction],
    results: Collection[HloInstruction],
    sources: Mapping[HloInstruction, Sequence[HloInstruction]],
) -> bool:
    """Whether an array depends on a result through kernels, each of which needs all of its inputs."""
    seen: set[HloInstruction] = set()
    waiting = list(arrays)
    while waiting:
        value = waiting.pop()
        if value in results:
            return True
        if value not in seen:
            seen.add(value)
            waiting += [*sources.get(value, value.operands), *value.control_predecessors]
    return False
