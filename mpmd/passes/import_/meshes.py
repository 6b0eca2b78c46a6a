"""The meshes of functions: their topology, and where the user assigned arguments and results."""

from __future__ import annotations

import re

from mpmd import ir
from mpmd.passes.bases import FunctionPass, ModulePass
from mpmd.passes.import_ import assigning
from mpmd.passes.structure import attributes_of
from mpmd.support import diagnostics
from mpmd.support.option_texts import Constraint, IndexPlace, NamePlacement


class CopyTopologyFromMain(ModulePass):
    """Turns the callees of an MPMD function into private MPMD functions of the same meshes.

        main(a) {topology}: x = call body(a)       main(a) {topology}: x = call body(a)
        body(p): ..                           -->  private body(p) {topology}: ..

    Requires: calls name functions of the module.  Ensures: every callee has a topology.  Cost: linear.
    Source: openxla/shardy MPMD, `copy_topology_from_main`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Visits the calls of each function that has a topology."""
        symbols = ir.symbol_table(module)
        for f in [f for f in symbols.values() if f.is_mpmd and not f.is_external]:
            callees = {call.callee_name: symbols[call.callee_name] for call in ir.walk(f, ir.Call)}
            for callee in callees.values():
                ir.put(callee, "topology", f.attributes["topology"])
                ir.put(callee, "sym_visibility", ir.StringAttr.get("private"))


_EMPTY = "empty_mesh"
_SHARDING = re.compile(
    r'<@("(?:[^"\\]|\\.)*"|[\w.$-]+), (\[[^\]]*\](?:, (?:replicated|unreduced)=\{[^}]*\})*)>'
)
_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"')


class GenerateSdyMeshesFromTopology(ModulePass):
    """Creates one `sdy.mesh` per mesh of the topology, and makes every sharding refer to its mesh.

        sdy.mesh @mesh = <["tpu_x"=2]>;  main(a {sharding<@mesh, [{"tpu_x"}]>}) {topology = "tpu", "cpu"}
        -->  sdy.mesh @tpu; sdy.mesh @cpu;  main(a {sharding<@tpu, [{"tpu_x"}]>})

    The axes of a mesh begin with its name and an underscore.  Fully replicated shardings name `@empty_mesh`,
    which is created, and added to the topology, if there is none.

    Requires: a topology.  Ensures: no other meshes with axes.  Cost: linear.
    Source: openxla/shardy MPMD, `generate_sdy_meshes_from_topology`.
    """

    def rewrite(self, module: ir.Module) -> None:
        distributed = [f for f in ir.funcs(module) if f.is_mpmd]
        if not distributed:
            return
        topology = distributed[0].topology
        meshes = [op for op in module.body.operations if isinstance(op, ir.sdy.MeshOp)]
        old = {op.sym_name.value: op for op in meshes}
        kept = {name: op for name, op in old.items() if not len(ir.sdy.MeshAttr(op.mesh).axes)}
        clashing = [name for name in topology if name in old and name not in kept]
        if clashing:
            diagnostics.error(
                f"mesh names of the topology are taken by meshes of shardings: {', '.join(clashing)}. "
                "Rename the meshes of the topology.",
                distributed[0].location,
            )
            return
        pointer = _Pointer(topology, kept)
        for f in ir.funcs(module):
            for op in ir.walk(f):
                pointer.look_at(op)
        if pointer.failed:
            return
        pointer.repoint()
        _exchange(module, topology, old, kept, pointer.needs_empty)
        if pointer.needs_empty and _EMPTY not in kept:
            distributed[0].topology = ir.TopologyAttr({**topology, _EMPTY: _empty_mesh()})


def _empty_mesh() -> ir.Attribute:
    return ir.TopologyAttr.from_axes({_EMPTY: {}})[_EMPTY]


def _exchange(
    module: ir.Module, topology: ir.TopologyAttr, old: dict[str, ir.Op], kept: dict[str, ir.Op], empty: bool
) -> None:
    """Erases the old meshes with axes and creates those of the topology."""
    wanted = {name: mesh for name, mesh in topology.items() if name not in kept}
    if empty and _EMPTY not in kept:
        wanted[_EMPTY] = _empty_mesh()
    where = ir.before(module.body.operations[0])
    for name, mesh in wanted.items():
        ir.create("sdy.mesh", [], [], where, {"sym_name": ir.StringAttr.get(name), "mesh": mesh})
    for name, op in old.items():
        if name not in kept:
            ir.erase(op)


class _Pointer:
    """Finds the mesh names in attributes, and rewrites them."""

    def __init__(self, topology: ir.TopologyAttr, kept: dict[str, ir.Op]) -> None:
        self._topology = topology
        self._kept = kept
        self._found: list[tuple[ir.Op, str, str]] = []
        self.needs_empty = False
        self.failed = False

    def look_at(self, op: ir.Op) -> None:
        """Records the new mesh names of the shardings in all attributes of an op."""
        for name, attribute in attributes_of(op):
            text = str(attribute)
            if "<@" in text and "sdy." in text:
                rewritten = _SHARDING.sub(lambda match: self._rewritten(match, op), text)
                if rewritten != text:
                    self._found.append((op, name, rewritten))

    def repoint(self) -> None:
        for op, name, text in self._found:
            ir.put(op, name, ir.Attribute.parse(text))

    def _rewritten(self, match: re.Match[str], op: ir.Op) -> str:
        mesh, rest = match[1].strip('"'), match[2]
        owners = dict.fromkeys(self._mesh_of_axis(axis) for axis in _AXIS.findall(rest))
        if not owners:
            if mesh in self._kept:
                return match[0]
            self.needs_empty = True
            return f"<@{_EMPTY}, {rest}>"
        names = [name for name in owners if name is not None]
        if len(owners) == len(names) == 1:
            return f"<@{_symbol(names[0])}, {rest}>"
        if None in owners:
            homeless = [axis for axis in _AXIS.findall(rest) if self._mesh_of_axis(axis) is None]
            problem = f"axes {', '.join(homeless)} belong to no mesh of the topology: name them <mesh>_<axis>"
        else:
            problem = f"it has axes of several meshes: {', '.join(names)}"
        self.failed = True
        diagnostics.error(f"cannot find the mesh of the sharding {match[0]}; {problem}", op.location)
        return match[0]

    def _mesh_of_axis(self, axis: str) -> str | None:
        """The mesh of the topology whose name the axis begins with; the longest if there are several."""
        fitting = [name for name in self._topology if axis.startswith(name + "_")]
        return max(fitting, key=len, default=None)


def _symbol(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w.$]*", name) else f'"{name}"'


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
    by_index: dict[int, NamePlacement] = {}
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
        elif by_index.setdefault(item.index, item.place) != item.place:
            diagnostics.error(
                f"{what} {item.index} is assigned to {by_index[item.index]} and to {item.place}; choose one",
                f.location,
            )
    return by_index


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
