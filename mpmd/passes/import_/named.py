"""Named computations of the user, checked and turned into operations of the dialect.

Names inside of names are inlined, and constants that a named computation returns are cloned without the name.
"""

from __future__ import annotations

from mpmd import ir
from mpmd.passes import structure
from mpmd.passes.bases import FunctionPass
from mpmd.passes.cleanup.fragments import simplify
from mpmd.passes.fragments.editing import erase_dead_ops
from mpmd.passes.import_ import assigning
from mpmd.passes.structure import is_negligible
from mpmd.support import diagnostics
from mpmd.support.option_texts import NOTHING, Assignment, NamePlacement
from mpmd.support.user_code import frames_of


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
    fragment = ir.create("mpmd.fragment", inputs, types, where, attributes, op.location, regions=1)
    fragment.stage = place.stage
    results = list(op.results)
    op.body.append_to(fragment.regions[0])
    ir.replace(
        op,
        [
            assigning.unassign(new, where, name, op.location) if assigning.is_tensor(old.type) else new
            for old, new in zip(results, fragment.results)
        ],
    )


class SimplifyNamedComputations(FunctionPass):
    """Removes from named computations forwarded, unneeded and duplicate values.

        x, y, z = comp "f" (a, b) { p, q = barrier a b; s = add p p; ret s, s, q }; w = add x y; return w, z
        -->  x = comp "f" (a) { p = barrier a; s = add p p; ret s }; w = add x x; return w, b

    Values that a computation forwards would otherwise be tied to its mesh.

    Requires: nothing.  Ensures: no equal operands or results, no result that is an argument, no unused pure
    result, no unused operand.  Cost: linear, times the length of the longest chain of computations that only
    pass values on.  Source: openxla/shardy MPMD, `simplify_named_computations`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Simplifies the computations, last first, until none changes any more.

        A dead op still uses its operands, be it around a computation or in one.
        """
        erase_dead_ops(f.body)
        for computation in ir.walk(f, ir.NamedComputation):
            for op in ir.ops(computation.body):
                if op.operation.name == "stablehlo.optimization_barrier":
                    _drop_forwarded_operands(op)
        again = True
        while again:
            again = False
            for op in reversed(ir.walk(f, ir.NamedComputation)):
                again |= simplify(op)
            for op in reversed(ir.ops(f)):
                if ir.is_trivially_dead(op):
                    ir.erase(op)
                    again = True


def _drop_forwarded_operands(barrier: ir.Op) -> None:
    """Removes values that a barrier forwards from an argument of the computation to its results."""
    kept: list[tuple[ir.Value, ir.Value]] = []
    dropped: list[tuple[ir.Value, ir.Value]] = []
    for operand, result in zip(barrier.operands, barrier.results):
        users = ir.users(result)
        is_dropped = ir.producer(operand) is None and len(users) == 1 and isinstance(users[0], ir.Return)
        (dropped if is_dropped else kept).append((operand, result))
    if not dropped:
        return
    for operand, result in dropped:
        ir.replace_uses(result, operand)
    if kept:
        rebuilt = ir.rebuild(barrier, [v for v, _ in kept], [r.type for _, r in kept])
        for (_, old), new in zip(kept, rebuilt.results):
            ir.replace_uses(old, new)
    ir.erase(barrier)


_PLACES = {
    "stablehlo.while": ("a loop that is not unrolled", "loop"),
    "stablehlo.case": ("a branch of a conditional", "conditional"),
    "stablehlo.if": ("a branch of a conditional", "conditional"),
    "sdy.manual_computation": ("a shard_map", "shard_map"),
}
"""The user's construct of an op with regions, and what to name instead."""


class ValidateNamedOpsInMpmdFunc(FunctionPass):
    """Reports names where they cannot be mapped to a mesh, such as inside of `lax.scan`.

        while { x = comp "f" (a) { .. } }  -->  error: Named computations can only be nested in ..

    Requires: nothing.  Ensures: nothing changes.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_named_ops_in_mpmd_func`.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.walk(f, (ir.NamedComputation, ir.NamedTensor)):
            parent = op.operation.parent.opview
            fits = parent.is_mpmd if isinstance(parent, ir.Func) else parent.name.startswith("mpmd.")
            if not fits:
                diagnostics.late_error(_message(op, parent), op.location)


def _message(op: ir.Op, parent: ir.Op) -> str:
    if isinstance(op, ir.NamedComputation):
        kind, name = "Named computation", op.named.name
    else:
        kind, name = "Named tensor", ir.StringAttr(op.attributes["name"]).value
    if isinstance(parent, ir.Func):
        place = f"function @{parent.symbol}, which belongs to no topology"
        advice = "call the function from the MPMD program itself"
    else:
        operation = parent.operation.name
        place, whole = _PLACES.get(operation, (f"the function of a {operation}", "operation"))
        advice = f"put the whole {whole} into one named computation"
    frames = frames_of(op)
    where = f", {frames[0]}" if frames else ""
    return (
        f"{kind.lower()} {name!r} is in {place}, where it cannot have a mesh{where}\n"
        f"  {kind}s can only be nested in mpmd functions or mpmd ops.\n  {advice}"
    )


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
    ordered: list[ir.Op] = []
    for op in ir.ops(block):
        for region in op.operation.regions:
            for inner in region:
                ordered += _inner_first(inner)
        ordered.append(op)
    return ordered


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


class InsertNamelessCloneOfNegligibleOps(FunctionPass):
    """Clones constants that a named computation returns, for all uses but the program's results.

        x = comp "f" () { c = const 1; ret c }       x = comp "f" () { c = const 1; ret c }
        y = add a x                             -->  d = const 1
                                                     y = add a d

    Otherwise the users of the constant would be tied to the mesh of the computation.  A constant that the
    function returns keeps the mesh that its name gives it.  Computations in computations come first.

    Requires: nothing.  Ensures: the computation is unchanged; results, and clones, may be unused.
    Cost: linear.
    Source: openxla/shardy MPMD, `insert_nameless_clones_of_negligible_ops`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        terminator = f.terminator
        for computation in reversed(ir.walk(f, ir.NamedComputation)):
            where = ir.after(computation)
            for result, returned in zip(computation.results, computation.returned):
                source = ir.producer(returned)
                if source is None or not is_negligible(source):
                    continue
                copy = ir.clone(source, where)
                used = [(use.owner, use.operand_number) for use in result.uses if use.owner != terminator]
                for owner, number in used:
                    ir.set_operand(owner, number, copy.results[0])
