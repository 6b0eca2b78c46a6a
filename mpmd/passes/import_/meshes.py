"""mpmd-generate-sdy-meshes-from-topology.

mpmd-copy-topology-from-main.
"""

from __future__ import annotations

import re

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.constants import attributes_of
from mpmd.support import diagnostics


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
                rewritten = _SHARDING.sub(lambda found: self._rewritten(found, op), text)
                if rewritten != text:
                    self._found.append((op, name, rewritten))

    def repoint(self) -> None:
        for op, name, text in self._found:
            ir.put(op, name, ir.Attribute.parse(text))

    def _rewritten(self, found: re.Match[str], op: ir.Op) -> str:
        mesh, rest = found[1].strip('"'), found[2]
        owners = dict.fromkeys(self._mesh_of_axis(axis) for axis in _AXIS.findall(rest))
        if not owners:
            if mesh in self._kept:
                return found[0]
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
        diagnostics.error(f"cannot find the mesh of the sharding {found[0]}; {problem}", op.location)
        return found[0]

    def _mesh_of_axis(self, axis: str) -> str | None:
        """The mesh of the topology whose name the axis begins with; the longest if there are several."""
        fitting = [name for name in self._topology if axis.startswith(name + "_")]
        return max(fitting, key=len, default=None)


def _symbol(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w.$]*", name) else f'"{name}"'
