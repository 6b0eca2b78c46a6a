"""mpmd-map-named-ops-to-mpmd-ops."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.import_ import assigning
from mpmd.support import diagnostics
from mpmd.support.assignment import NOTHING, Assignment, NamePlacement


class MapNamedOpsToMpmdOps(FunctionPass):
    """Turns names into fragments, and named tensors into assigns, as the user's assignment says.

        main(a):                                         p = assign a to m1 by f
          x = comp "f" (a as p, a as q) { y = add p q }  q = m1["f"] st=0 (p as k, p as l) { y = add k l }
          z = name x "t"                            -->  r = unassign q by f
          return z                                       s = assign r to m2 by t; w = unassign s by t

    Requires: no names inside of names.  Ensures: no names, but for those in regions, which validation
    reports.  Attributes of a computation are dropped.  Cost: linear.
    Source: openxla/shardy MPMD, `map_named_ops_to_mpmd_ops`.

    Attributes:
        assignment: name to mesh: `"f@m1"`, `"f@m1/0"` with a stage, `"t@m1#pinned_host"` in host memory.
    """

    assignment: Assignment = NOTHING

    def rewrite_function(self, f: ir.Func) -> None:
        """Maps the names of one function."""
        places = self.assignment.places
        meshes = list(f.topology) if f.is_mpmd else []
        for op in ir.walk(f, (ir.NamedComputation, ir.NamedTensor)):
            if not isinstance(op.operation.parent.opview, (ir.Func, ir.For)):
                continue
            if isinstance(op, ir.NamedTensor):
                self._map_tensor(op, places.get(ir.StringAttr(op.attributes["name"]).value), meshes)
            elif _can_be_mapped(op, places, meshes):
                _map_computation(op, places[op.named.name])

    def _map_tensor(self, op: ir.NamedTensor, place: NamePlacement | None, meshes: list[str]) -> None:
        name = ir.StringAttr(op.attributes["name"]).value
        value = op.operands[0]
        if place is not None and _mesh_exists(op, name, place, meshes):
            where = ir.before(op)
            kind = ir.MeshTensor.get(place.mesh, value.type, memory_kind=place.memory_kind)
            there = assigning.assign(value, kind, where, name, op.location)
            value = assigning.unassign(there, where, name, op.location)
        ir.replace(op, [value])


def _can_be_mapped(op: ir.NamedComputation, places: dict[str, NamePlacement], meshes: list[str]) -> bool:
    name = op.named.name
    if name not in places:
        diagnostics.error(
            f"Top-level NamedComputation '{name}' is not assigned to a mesh in the user-defined "
            f"named-to-mesh assignment.\n  assigned: {', '.join(places) or 'nothing'}\n"
            f"  Add '{name}' to the assignment.",
            op.location,
        )
        return False
    return _mesh_exists(op, name, places[name], meshes)


def _mesh_exists(op: ir.Op, name: str, place: NamePlacement, meshes: list[str]) -> bool:
    if place.mesh in meshes:
        return True
    diagnostics.error(
        f"'{name}' is assigned to mesh \"{place.mesh}\", which the topology lacks; "
        f"its meshes are {', '.join(meshes) or 'none'}",
        op.location,
    )
    return False


def _map_computation(op: ir.NamedComputation, place: NamePlacement) -> None:
    name = op.named.name
    if place.memory_kind is not None:
        diagnostics.notice(
            f"memory kind {place.memory_kind} of computation '{name}' is ignored; name its result instead",
            op.location,
        )
    where = ir.before(op)
    mesh = place.mesh
    there = {v: v for v in op.operands}
    for v in there:
        if assigning.is_tensor(v.type):
            there[v] = assigning.assign(v, mesh, where, name, op.location)
    types = [ir.MeshTensor.get(mesh, r.type) if assigning.is_tensor(r.type) else r.type for r in op.results]
    attributes = {"mesh_name": ir.StringAttr.get(mesh), "origin": ir.ArrayAttr.get([op.named.attribute()])}
    inputs = [there[v] for v in op.operands]
    made = ir.create("mpmd.fragment", inputs, types, where, attributes, op.location, regions=1)
    made.stage = place.stage
    results = list(op.results)
    op.body.append_to(made.regions[0])
    ir.replace(
        op,
        [
            assigning.unassign(new, where, name, op.location) if assigning.is_tensor(old.type) else new
            for old, new in zip(results, made.results)
        ],
    )
