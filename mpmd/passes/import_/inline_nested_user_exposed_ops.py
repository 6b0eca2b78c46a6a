"""mpmd-inline-nested-user-exposed-ops."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.import_.assignment import NOTHING, Assignment, Place
from mpmd.support import diagnostics

_UNARY = (ir.NamedTensor, ir.Broadcast, ir.Reduce)


@dataclasses.dataclass(frozen=True)
class InlineNestedUserExposedOps(FunctionPass):
    """Inlines names that stand inside of named computations: only the outermost name is mapped to a mesh.

        comp "f" (a) { x = comp "g" (a) { y = neg a; ret y }; z = name x "t"; ret z }
        -->  comp "f" (a) { y = neg a; ret y }

    Requires: inner names are unassigned or assigned where the outermost is.  Ensures: no name, broadcast or
    reduce inside of a named computation.  Cost: linear.
    Source: openxla/shardy MPMD, `inline_nested_user_exposed_ops`.
    """

    name: ClassVar[str] = "mpmd-inline-nested-user-exposed-ops"
    assignment: Assignment = NOTHING

    def rewrite_function(self, f: ir.Func) -> None:
        """Empties each outermost computation of names."""
        places = self.assignment.places
        inside: dict[ir.NamedComputation, list[ir.Op]] = {}
        seen: set[ir.Op] = set()
        for outer in ir.walk(f, ir.NamedComputation):
            if outer not in seen:
                inside[outer] = ir.walk(outer, (ir.NamedComputation, *_UNARY))[1:]
                seen.update(inside[outer])
        for outer, inner in inside.items():
            if not _inline(inner, outer, places):
                return


def _inline(inner: list[ir.Op], outer: ir.NamedComputation, places: dict[str, Place]) -> bool:
    """Inlines names of one computation, innermost first; False if the computation itself has no place."""
    names = [op for op in inner if not isinstance(op, (ir.Broadcast, ir.Reduce))]
    if names and outer.named.name not in places:
        diagnostics.error(
            f"Parent NamedComputation '{outer.named.name}' is not assigned to a mesh in the user-defined "
            f"name-to-mesh assignment.\n  assigned: {', '.join(places) or 'nothing'}\n"
            f"  Add '{outer.named.name}' to the assignment.",
            outer.location,
        )
        return False
    for op in names:
        _check(op, outer, places)
    for op in reversed(inner):
        if isinstance(op, ir.NamedComputation):
            ir.replace(op, ir.move_body(op, list(op.operands), op))
        else:
            ir.replace(op, [op.operands[0]])
    return True


def _check(op: ir.Op, outer: ir.NamedComputation, places: dict[str, Place]) -> None:
    """Reports a name whose place is another one than that of the computation around it."""
    parent, around = outer.named.name, places[outer.named.name]
    if isinstance(op, ir.NamedComputation):
        name, what, matter = op.named.name, "NamedComputation", "mesh or stage"
    else:
        name, what, matter = ir.StringAttr(op.attributes["name"]).value, "NamedTensor", "mesh"
    place = places.get(name)
    if place is None:
        return
    if what == "NamedTensor" and place.memory_kind is not None:
        diagnostics.notice(
            f"memory kind {place.memory_kind} of tensor '{name}' is ignored, as it stands inside of "
            f"computation '{parent}'",
            op.location,
        )
    same_stage = what == "NamedTensor" or place.stage == around.stage
    if place.mesh != around.mesh or not same_stage:
        diagnostics.error(
            f"{what} '{name}' is nested in a NamedComputation '{parent}' which has a different {matter} "
            f"assignment.\n  '{name}': {place}\n  '{parent}': {around}\n"
            f"  Assign both alike, leave '{name}' unassigned, or call it outside of '{parent}'.",
            op.location,
        )
