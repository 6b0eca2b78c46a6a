"""mpmd-rule-based-schedule."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.fragment_info import FragmentInfo, FragmentScheduleRule
from mpmd.passes.schedule.reordering import Precedence, apply_edges, way
from mpmd.support import diagnostics


class RuleBasedSchedule(FunctionPass):
    """Orders fragments by the user's rules.

    With `rules=FragmentScheduleRule(ordered_fragments=[INFO_OF_G->INFO_OF_F])`:

        f = m1["f"] cc=0 (a) {...}         g = m1["g"] cc=0 (b) {...}
        g = m1["g"] cc=0 (b) {...}    ->   f = m1["f"] cc=0 (a) {...}

    Requires: no two user fragments of a function have the same info.  Error: two named computations share
        a name, a mesh and a microbatch.
    Ensures: the order of the rules, where data flow and earlier rules leave a choice; all other ops keep
        their order where nothing forbids it.  Remark: the parts of a rule that were left out.
    Cost: linear in the module and in the rules, but for the reachability of n ops: n*n bits.
    Source: openxla/shardy MPMD, `rule_based_schedule`.

    Attributes:
        rules: fragments in the order in which they are to run.
        remove_control_dependencies: drop the order once it is applied; merge rules need it as edges.
    """

    runs_on = "mpmd"
    rules: tuple[FragmentScheduleRule, ...] = ()
    remove_control_dependencies: bool = True

    def rewrite_function(self, f: ir.Func) -> None:
        """Adds an edge per pair of neighbours of each rule, then sorts."""
        known = _fragments_by_info(f)
        if known is None:
            return
        precedence = Precedence(f)
        for rule in self.rules:
            if len(rule.ordered_fragments) < 2:
                diagnostics.notice(f"a rule that orders less than two fragments: {rule}", f.location)
            _follow(rule, known, precedence, f)
        apply_edges(f, precedence.edges, self.remove_control_dependencies)


def _fragments_by_info(f: ir.Func) -> dict[FragmentInfo, ir.Fragment] | None:
    """The user fragments by the attributes that rules use; None if these are ambiguous."""
    known: dict[FragmentInfo, ir.Fragment] = {}
    unique = True
    for fragment in ir.fragments(f):
        if not fragment.is_user:
            continue
        info = FragmentInfo.of(fragment)
        if info in known:
            unique = False
            diagnostics.error(
                f"Fragment info {info} already exists for another fragment: rules cannot distinguish them. "
                "Two named computations share a name; give each a name of its own.\n"
                f"  one is at {known[info].location}, the other at {fragment.location}",
                f.location,
            )
        known.setdefault(info, fragment)
    return known if unique else None


def _follow(
    rule: FragmentScheduleRule,
    known: dict[FragmentInfo, ir.Fragment],
    precedence: Precedence,
    f: ir.Func,
) -> None:
    """Adds the edges of one rule."""
    before = rule.ordered_fragments[0] if rule.ordered_fragments else None
    for after in rule.ordered_fragments[1:]:
        if before not in known:
            diagnostics.notice(f"a schedule rule names {before}, which is not a fragment", f.location)
            before = after
            continue
        if after not in known:
            diagnostics.notice(f"a schedule rule names {after}, which is not a fragment", f.location)
            continue
        first, second = known[before], known[after]
        if first.mesh != second.mesh:
            diagnostics.notice(
                f"a schedule rule orders fragments of two meshes: {before}, {after}", f.location
            )
        else:
            opposite = precedence.add(first, second)
            if opposite:
                diagnostics.notice(
                    f"a schedule rule orders {before} before {after}, but the opposite is known: "
                    f"{way(opposite)}",
                    first.location,
                )
        before = after
