"""hlo-sort-simplifier."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule


class SortSimplifier(ComputationPass):
    """Sorts only used operands, and nothing along a dim of size 1.

    (keys, values) = sort(k, v), only keys used -> keys = sort(k)

    Requires: no schedule.
    Ensures: each operand of a sort is compared or its result used; the sorted dim has two elements or more.
    Cost: linear.
    Source: XLA's sort simplifier.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules: dict[str, tuple[Rule, ...]] = {"sort": (_sort_of_one, _sort_used)}
        return Rewriter(computation).run(rules, lambda instruction: True)


def _sort_of_one(site: RewriteSite) -> HloInstruction | None:
    if site.operands[0].shape.dims[site.at.dimensions[0]] > 1:
        return None
    return site.build.tuple(site.operands) if site.shape.is_tuple else site.operands[0]


def _sort_used(site: RewriteSite) -> HloInstruction | None:
    if site.at.is_root or not site.shape.is_tuple:
        return None
    if any(u.opcode != "get-tuple-element" for u in site.at.users):
        return None
    order = site.at.to_apply
    compared = {p.parameter_number // 2 for p in order.parameters if p.users or p.is_root}
    used = {u.tuple_index for u in site.at.users}
    count = len(site.operands)
    kept = [i for i in range(count) if i in used or i in compared]
    if len(kept) == count or not kept:
        return None
    smaller = order.clone()
    for number in reversed(range(2 * count)):
        if number // 2 not in kept:
            smaller.remove_parameter(number)
    values = [site.operands[i] for i in kept]
    made = site.build.add(
        "sort",
        *values,
        shape=values[0].shape if len(kept) == 1 else tuple_of([v.shape for v in values]),
        called=(smaller,),
        dimensions=site.at.dimensions,
        is_stable=bool(site.at.attributes.get("is_stable", False)),
    )
    results = [made] if len(kept) == 1 else [site.build.element(made, i) for i in range(len(kept))]
    # Unused elements may be anything of their shape.
    elements = [results[kept.index(i)] if i in kept else site.operands[i] for i in range(count)]
    return site.build.tuple(elements)
