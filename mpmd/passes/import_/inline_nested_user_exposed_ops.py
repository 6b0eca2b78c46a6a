"""mpmd-inline-nested-user-exposed-ops."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes import structure
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics
from mpmd.support.placement_options import NOTHING, Assignment, NamePlacement

_UNARY = (ir.NamedTensor, ir.Broadcast, ir.Reduce)


class InlineNestedUserExposedOps(FunctionPass):
    """Inlines names inside of named computations, at any depth: only the outermost name is mapped to a mesh.

        comp "f" (a) { x = comp "g" (a) { y = neg a; ret y }; z = name x "t"; ret z }
        -->  comp "f" (a) { y = neg a; ret y }

    Requires: inner names are unassigned or assigned like the enclosing computation.  Ensures: no name, no
    broadcast and no reduce inside of a named computation.  Cost: linear.
    Source: openxla/shardy MPMD, `inline_nested_user_exposed_ops`.

    Attributes:
        assignment: name to mesh, as in mpmd-map-named-ops-to-mpmd-ops.
    """

    assignment: Assignment = NOTHING

    def rewrite_function(self, f: ir.Func) -> None:
        """Inlines one name after the other, inner ones first."""
        places = self.assignment.places
        for op in _inner_first(f.body):
            if not isinstance(op, (ir.NamedComputation, *_UNARY)):
                continue
            parent = next((p for p in structure.around(op) if isinstance(p, ir.NamedComputation)), None)
            if parent is None:
                continue
            if isinstance(op, (ir.NamedComputation, ir.NamedTensor)):
                assigned = _assigned_around(op, places)
                if assigned is None:
                    _report_unassigned(parent, places)
                    return
                _check(op, assigned, places)
            if isinstance(op, ir.NamedComputation):
                ir.replace(op, ir.move_body(op, list(op.operands), op))
            else:
                ir.replace(op, [op.operands[0]])


def _inner_first(block: ir.Block) -> list[ir.Op]:
    """All ops of a block, at any depth, in program order, but each after those in it."""
    found: list[ir.Op] = []
    for op in ir.ops(block):
        for region in op.operation.regions:
            for inner in region:
                found += _inner_first(inner)
        found.append(op)
    return found


def _assigned_around(op: ir.Op, places: dict[str, NamePlacement]) -> ir.NamedComputation | None:
    """The nearest assigned computation around an op; None if no enclosing one is assigned."""
    names = (outer for outer in structure.around(op) if isinstance(outer, ir.NamedComputation))
    return next((outer for outer in names if outer.named.name in places), None)


def _report_unassigned(parent: ir.NamedComputation, places: dict[str, NamePlacement]) -> None:
    name = parent.named.name
    diagnostics.error(
        f"Parent NamedComputation '{name}' is not assigned to a mesh in the user-defined name-to-mesh "
        f"assignment.\n  assigned: {', '.join(places) or 'nothing'}\n  Add '{name}' to the assignment.",
        parent.location,
    )


def _check(op: ir.Op, around_it: ir.NamedComputation, places: dict[str, NamePlacement]) -> None:
    """Reports a name whose placement differs from that of the computation around it."""
    parent, around = around_it.named.name, places[around_it.named.name]
    if isinstance(op, ir.NamedComputation):
        name, what, matter = op.named.name, "NamedComputation", "mesh or stage"
    else:
        name, what, matter = ir.StringAttr(op.attributes["name"]).value, "NamedTensor", "mesh"
    place = places.get(name)
    if place is None:
        return
    if what == "NamedTensor" and place.memory_kind is not None:
        diagnostics.notice(
            f"memory kind {place.memory_kind} of tensor '{name}' is ignored, as it is inside of "
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
