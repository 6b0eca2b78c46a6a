"""The meshes of a function's arguments and results, as the user assigned them."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.import_ import assigning
from mpmd.support import diagnostics
from mpmd.support.placement_options import Constraint, IndexPlace, NamePlacement


class EnforceInputOutputEquisharding(FunctionPass):
    """Returns a result on the mesh of the argument whose next value it is.

        main(a@m1): f = m2["f"] ..; return f
        -->  constraints=0:0
        main(a@m1): f = m2["f"] ..; t = transfer f to m1; return t

    Requires: arguments and results are mesh tensors.  Ensures: each pair is on one mesh, and has one
    type if it has one shape.  Cost: linear.
    Source: openxla/shardy MPMD, `enforce_equisharding`.

    Attributes:
        constraints: pairs `"i:o"` of an argument and the result that is its next value.
    """

    runs_on = "entry"
    constraints: tuple[Constraint, ...] = ()

    def rewrite_function(self, f: ir.Func) -> None:
        args, returned = f.args, f.returned
        changed = False
        for constraint in self.constraints:
            if not fits(f, constraint):
                continue
            wanted, value = args[constraint.input].type, returned[constraint.output]
            if value.type.tensor != wanted.tensor:  # no next value of it: they share the mesh alone
                wanted = ir.MeshTensor.get(wanted.mesh, value.type.tensor, memory_kind=wanted.memory_kind)
            if value.type != wanted:
                returned[constraint.output] = ir.make_transfer(value, wanted, ir.at_end(f.body)).result
                changed = True
        if changed:
            f.returned = returned
            ir.return_types_changed(f)


def fits(f: ir.Func, constraint: Constraint) -> bool:
    """Whether the function has such an argument and result; reports an error if not."""
    if constraint.input < len(f.args) and constraint.output < len(f.returned):
        return True
    diagnostics.error(
        f"constraint {constraint}: the program has {len(f.args)} arguments and {len(f.returned)} results",
        f.location,
    )
    return False


_MEMORY_KIND = "mhlo.memory_kind"


class MapInputOutputToMesh(FunctionPass):
    """Assigns the arguments and results of the program to the meshes that the user gave them.

        main(a): x = add a a; return x
        -->  input-assignment=0@m1 output-assignment=0@m2
        main(a@m1): u = unassign a by user_in; x = add u u; y = assign x to m2 by user_out; return y

    Requires: indices are flat indices of the entry function.  Ensures: those positions are mesh tensors.  The
    attribute `mhlo.memory_kind` of a position is removed where the type has the memory kind.  Cost: linear.
    Source: openxla/shardy MPMD, `map_input_output_to_mesh`.

    Attributes:
        input_assignment: argument to mesh: `"0@m1"`, `"2@m2#pinned_host"`.
        output_assignment: likewise for results.
    """

    runs_on = "entry"
    input_assignment: tuple[IndexPlace, ...] = ()
    output_assignment: tuple[IndexPlace, ...] = ()

    def rewrite_function(self, f: ir.Func) -> None:
        inputs = _checked(f, self.input_assignment, len(f.args), "argument")
        outputs = _checked(f, self.output_assignment, len(f.returned), "result")
        where = ir.at_start(f.body)
        for i, place in sorted(inputs.items()):
            if _can_be_assigned(f, f.args[i].type, f"argument {i}", place):
                assigning.assign_argument(f, i, _on(place, f.args[i].type), assigning.USER_IN, where)
        returned = f.returned
        for i, place in sorted(outputs.items()):
            value = returned[i]
            if _can_be_assigned(f, value.type, f"result {i}", place):
                location = assigning.result_location(f, i)
                kind, end = _on(place, value.type), ir.at_end(f.body)
                returned[i] = assigning.assign(value, kind, end, assigning.USER_OUT, location)
        if inputs or outputs:
            f.returned = returned
            ir.return_types_changed(f)
        _drop_memory_kind_attributes(f)


def _checked(f: ir.Func, places: tuple[IndexPlace, ...], count: int, what: str) -> dict[int, NamePlacement]:
    """The placements whose index and mesh exist; the others are errors."""
    found: dict[int, NamePlacement] = {}
    meshes = f.topology
    for item in places:
        if item.index >= count:
            diagnostics.error(
                f"{what} {item.index} is assigned to {item.place}, but the program has only {count} {what}s",
                f.location,
            )
        elif item.place.mesh not in meshes:
            diagnostics.error(
                f'{what} {item.index} is assigned to mesh "{item.place.mesh}", which the topology lacks; '
                f"its meshes are {', '.join(meshes)}",
                f.location,
            )
        elif found.setdefault(item.index, item.place) != item.place:
            diagnostics.error(
                f"{what} {item.index} is assigned to {found[item.index]} and to {item.place}; choose one",
                f.location,
            )
    return found


def _can_be_assigned(f: ir.Func, kind: ir.Type, what: str, place: NamePlacement) -> bool:
    if assigning.is_tensor(kind):
        return True
    diagnostics.error(
        f"{what} cannot be assigned to {place}: it is not a plain tensor, but a {kind}", f.location
    )
    return False


def _on(place: NamePlacement, tensor: ir.Type) -> ir.Type:
    return ir.MeshTensor.get(place.mesh, tensor, memory_kind=place.memory_kind)


def _drop_memory_kind_attributes(f: ir.Func) -> None:
    """Removes memory kinds from attributes where the type has one."""
    sides = (
        ("argument", "arg_attrs", [a.type for a in f.args]),
        ("result", "res_attrs", [v.type for v in f.returned]),
    )
    for what, name, kinds in sides:
        dicts = ir.attribute_dicts(f, name, len(kinds))
        for i, (kind, entries) in enumerate(zip(kinds, dicts)):
            if _MEMORY_KIND not in entries or not assigning.is_mesh_tensor(kind) or kind.memory_kind is None:
                continue
            said = ir.StringAttr(entries.pop(_MEMORY_KIND)).value
            if said != kind.memory_kind:
                diagnostics.notice(
                    f"{what} {i} is assigned to {kind.memory_kind} memory; its sharding says {said}",
                    f.location,
                )
        ir.put_attribute_dicts(f, name, dicts)
