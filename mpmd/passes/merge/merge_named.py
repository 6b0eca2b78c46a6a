"""Named fragments merged: as the schedule or the user's rules say."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dependencies import Dependencies, control_edges, put_control_edges
from mpmd.passes.fragments.editing import erase_dead_ops, merge
from mpmd.passes.fragments.fragment_info import FragmentInfo, FragmentMergeRule
from mpmd.passes.merge.visit import MergePass, named
from mpmd.support import diagnostics


class MergeForwardWithBackward(MergePass):
    """Merges a forward fragment with the backward fragment that follows it on its mesh and uses it.

        f = m1["f"] cc=0 (a) { x = add a a; ret x }
        b = m1["f"(1)] cc=0 (f) { y = mul f f; ret y }
        -->
        b = m1["f", "f"(1)] cc=0 (a) { x = add a a; y = mul x x; ret y }

    After scheduling this happens on the last stage of orders like 1F1B: one program for both.  The merged
    fragment has two transpose counts and is no longer a scheduling unit.  Fragments of two stages stay two.

    Requires: fragments are in their final order; stages are verified.  Ensures: values are defined before
        they are used.  Cost: linear.  Source: openxla/shardy MPMD, `merge_forward_with_backward`.
    """

    def allows(self, producer: ir.Fragment, consumer: ir.Fragment) -> bool:
        """Forward, then backward, of one stage where both have one."""
        stages_agree = producer.stage == consumer.stage or None in (producer.stage, consumer.stage)
        return producer.is_forward and consumer.is_backward and stages_agree

    def candidate(self, producer: ir.Fragment, following: Iterator[ir.Fragment]) -> ir.Fragment | None:
        """The closest user, if no other fragment of the mesh is between."""
        closest = super().candidate(producer, following)
        return closest if closest is not None and closest == next(following, None) else None


class MergeUserFragmentsIntoSchedulingUnits(MergePass):
    """Merges the named fragments of a mesh that are one microbatch's forward, or backward, work.

        f = m1["f"] cc=0 (a) { x = add a a; ret x }
        g = m1["g"] cc=0 (f) { y = neg f; ret y }
        -->
        g = m1["f", "g"] cc=0 (a) { x = add a a; y = neg x; ret y }

    Merged are a fragment and its closest fragment user if both are named, equally often transposed, and of
    one microbatch and stage where both have one.

    Attributes:
        merge_siblings: merge also independent fragments, such as two encoders, of one stage and microbatch: a
            fragment and the nearest named one after it.

    Requires: neither of two such fragments has several transpose counts (error).
    Ensures: values are defined before they are used.  Cost: linear.
    Source: openxla/shardy MPMD, `merge_user_fragments_into_scheduling_units`; the option is ours.
    """

    merge_siblings: bool = False

    def candidate(self, producer: ir.Fragment, following: Iterator[ir.Fragment]) -> ir.Fragment | None:
        """The closest user, or the nearest sibling."""
        next_one = super().candidate(producer, following)
        if next_one is not None or not self.merge_siblings or not producer.is_user or producer.stage is None:
            return next_one
        behind = next((other for other in following if other.is_user), None)
        return behind if behind is not None and _is_sibling(producer, behind) else None

    def allows(self, producer: ir.Fragment, consumer: ir.Fragment) -> bool:
        """Both named, of one phase, microbatch and stage."""
        if not (producer.is_user and consumer.is_user):
            return False
        mixed = [op for op in (producer, consumer) if op.transpose_count is None]
        for op in mixed:
            diagnostics.error(
                f"{named(op)}: its parts were transposed a different number of times, so that it is neither "
                "forward nor backward work.  Merge forward with backward after scheduling only",
                op.location,
            )
        return (
            not mixed
            and producer.transpose_count == consumer.transpose_count
            and _agree(producer.call_counter, consumer.call_counter)
            and _agree(producer.stage, consumer.stage)
        )


def _is_sibling(a: ir.Fragment, b: ir.Fragment) -> bool:
    """Whether two named fragments are of one phase of one microbatch and stage."""
    phase = a.transpose_count
    return (
        phase is not None
        and phase == b.transpose_count
        and a.call_counter == b.call_counter
        and a.stage == b.stage
        and a.is_remat == b.is_remat
    )


def _agree(a: int | None, b: int | None) -> bool:
    return a == b or a is None or b is None


class RuleBasedMerge(FunctionPass):
    """Merges fragments as rules say.

        rule: sources f cc=1, g; target "f", "g" st=4
        f = m1["f"] cc=1 (a) { x = add a a; ret x }        f, g = m1["f", "g"] st=4 (a, b) {
        t = transfer f to m2                          -->      x = add a a; y = neg b; ret x, y }
        g = m1["g"] (b) { y = neg b; ret y }               t = transfer f to m2

    All fragments of a mesh whose infos are sources of one rule become one; it has the origins, stage, call
    counter and kind of split of the target, and no other attribute of theirs.  Repeated until no rule
    finds two fragments.  Dead fragments are removed, but for sources that come before one that is
    used: they become part of it.

    Attributes:
        rules: the merge rules.
        remove_control_dependencies: whether the order of a scheduler is applied and removed.

    Requires: a rule has two sources or more, of one mesh and stage; no info is in two rules (errors).
    Ensures: ops in dependency order; an error if rules create a cycle.  Cost: linear per round of merges.
    Source: openxla/shardy MPMD, `rule_based_merge`.
    """

    runs_on = "mpmd"
    rules: tuple[FragmentMergeRule, ...] = ()
    remove_control_dependencies: bool = True

    def rewrite(self, module: ir.Module) -> None:
        problems = [problem for rule in self.rules for problem in _problems(rule)]
        seen: dict[FragmentInfo, FragmentMergeRule] = {}
        for rule in self.rules:
            for info in rule.sources:
                if seen.setdefault(info, rule) is not rule:
                    problems.append(f"{info} is a source of two merge rules: it can be merged by one only")
        for problem in problems:
            diagnostics.error(problem)
        if not problems:
            super().rewrite(module)

    def rewrite_function(self, f: ir.Func) -> None:
        by_info = {info: rule for rule in self.rules for info in rule.sources}
        matched: dict[FragmentMergeRule, None] = {}
        applied: dict[FragmentMergeRule, None] = {}
        _erase_dead_but_sources(f, by_info)
        while groups := _groups(f, by_info, matched):
            for (rule, _), group in groups.items():
                merged = functools.reduce(_merged_at_first, group)
                rule.target.put_on(merged)
                applied[rule] = None
        for fragment in ir.fragments(f):
            erase_dead_ops(fragment.body)
        for rule in self.rules:
            if rule not in matched:
                diagnostics.notice(f"@{f.symbol}: no fragment is a source of {rule}", f.location)
        if applied or control_edges(f):
            _sort(f, list(applied))
        if self.remove_control_dependencies:
            put_control_edges(f, [])


def _problems(rule: FragmentMergeRule) -> list[str]:
    problems = []
    if len(rule.sources) < 2:
        problems.append(f"the merge rule {rule} has fewer than two sources: there is nothing to merge")
    stages = {info.stage for info in rule.sources if info.stage is not None}
    if len(stages) > 1:
        listed = ", ".join(map(str, sorted(stages)))
        problems.append(f"the sources of the merge rule {rule} are of the stages {listed}: they must agree")
    meshes = {info.mesh_name for info in (*rule.sources, rule.target) if info.mesh_name is not None}
    if len(meshes) > 1:
        listed = ", ".join(sorted(meshes))
        problems.append(f"the merge rule {rule} is about the meshes {listed}: it must keep to one")
    return problems


def _erase_dead_but_sources(f: ir.Func, by_info: dict[FragmentInfo, FragmentMergeRule]) -> None:
    """Erases dead fragments, last first, unless a later fragment takes them in.

    A fragment is used by its control successors.
    """
    taken: set[tuple[FragmentMergeRule, str]] = set()
    edges = control_edges(f)
    for op in reversed(ir.ops(f)):
        rule = by_info.get(FragmentInfo.of(op)) if isinstance(op, ir.Fragment) else None
        group = None if rule is None else (rule, op.mesh)
        if group in taken:
            continue
        if ir.is_trivially_dead(op) and all(op != before for before, _ in edges):
            edges = [edge for edge in edges if op not in edge]
            ir.erase(op)
        elif group is not None:
            taken.add(group)


def _groups(
    f: ir.Func, by_info: dict[FragmentInfo, FragmentMergeRule], matched: dict[FragmentMergeRule, None]
) -> dict[tuple[FragmentMergeRule, str], list[ir.Fragment]]:
    """Fragments to merge, in dependency order, by rule and mesh; records the rules that match anything."""
    groups: dict[tuple[FragmentMergeRule, str], list[ir.Fragment]] = {}
    for fragment in ir.fragments(f):
        rule = by_info.get(FragmentInfo.of(fragment))
        if rule is not None:
            matched[rule] = None
            groups.setdefault((rule, fragment.mesh), []).append(fragment)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    if not groups:
        return groups
    order, _ = Dependencies(f, control_edges(f)).stable_order()
    rank = {op: i for i, op in enumerate(order)}
    return {key: sorted(group, key=rank.__getitem__) for key, group in groups.items()}


def _merged_at_first(first: ir.Fragment, second: ir.Fragment) -> ir.Fragment:
    """One for two, at the position of the first; the block may be out of order afterwards."""
    ir.move_after(second, first)
    return merge(first, second)


def _sort(f: ir.Func, applied: list[FragmentMergeRule]) -> None:
    """Puts ops into dependency order."""
    order, cycle = Dependencies(f, control_edges(f)).stable_order()
    if not cycle:
        ir.reorder(f, order)
        return
    listed = "; ".join(named(op) for op in cycle if isinstance(op, ir.Fragment))
    rules = "\n  ".join(map(str, applied)) or "none: the order of a schedule causes it"
    diagnostics.error(
        "Cycle detected in the program, not all fragments could be properly merged.\n"
        f"  each needs the next, the last needs the first, in @{f.symbol}: {listed}\n"
        f"by the rules:\n  {rules}\nLeave out of a rule what must run before or after the others",
        f.location,
    )
