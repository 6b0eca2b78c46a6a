"""mpmd-lower-to-fragment-calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.shared_bodies import functions_of, put_back
from mpmd.passes.export.programs import (
    fragment_name,
    has_transposed,
    names_of,
    options_of_fragment,
    programs,
    put_options,
    rows_of,
    site_text,
)
from mpmd.passes.fragments.fragment_info import FragmentInfo
from mpmd.passes.fragments.splitting import outline
from mpmd.sharding import shardings
from mpmd.sharding.shards import on_sdy_mesh, sdy_meshes
from mpmd.support import diagnostics
from mpmd.support.xla_options import OptionsRow, contradictions

log = logging.getLogger("mpmd.passes")

# Attributes of a call for runtime and traces, beyond its origins and its mesh.
KEPT = ("call_counter", "stage_id", "remat", "split_keep_transferred", "split_drop_transferred")


class LowerToFragmentCalls(ModulePass):
    """Makes one function per distinct fragment, and fragments calls of them.

        func @main(%a: !m1) -> !m1 {
          %0 = mpmd.fragment<mesh="m1", origin=["f"]> (%a) {call_counter = 0} (%p) { body } : (!m1) -> !m1
          %1 = mpmd.fragment<mesh="m1", origin=["f"]> (%0) {call_counter = 1} (%p) { body } : (!m1) -> !m1
        ->
        func @main(%a: !m1) -> !m1 {
          %0 = mpmd.fragment_call<mesh="m1", origin=["f"]> @p0_f_calls0to1.main(%a) {call_counter = 0}
          %1 = mpmd.fragment_call<mesh="m1", origin=["f"]> @p0_f_calls0to1.main(%0) {call_counter = 1}
        func @p0_f_calls0to1.main(%p: tensor<..>) -> tensor<..> attributes {mesh_shape = ..} { body }

    Fragments are one program if mesh, types, `arg_attrs`, `res_attrs`, bodies and options of XLA are equal;
    locations do not count.  `mpmd.compiler_options` of the module are the options that the user gave for all
    fragments, a mesh or a name; a function's are its own.

    Shardings of the mesh tensor types become `sdy.sharding` of arguments and results.  Where the module has
    an sdy mesh called like the fragment's mesh, all shardings of the function name that one.  Manual
    computations always do, as the axes that they hold are their mesh's: it is created for them.

    Requires: shardings in types, donation marked.
    Ensures: no fragment is left; functions come after the others, numbered by their first call.
    Error: two names of a fragment have different values of one option.
    Cost: linear in the text of the module.
    Source: openxla/shardy MPMD, `lower_to_fragment_calls`; that calls keep call counter, stage and split
        marks is ours.

    Attributes:
        verbose_logging: say how fragments were grouped and named.
    """

    verbose_logging: bool = False

    def rewrite(self, module: ir.Module) -> None:
        """Groups all fragments of the module, names the groups, and replaces the members."""
        callers = [f for f in ir.funcs(module) if f.is_mpmd and not f.is_external]
        groups = programs(fragment for f in callers for fragment in ir.fragments(f))
        bodies = functions_of(module)
        if bodies:
            groups = _with_own_bodies(groups, module)
        sites = [[FragmentInfo.of(fragment) for fragment in group] for group in groups]
        name = module.operation.attributes.get("sym_name")
        of_module = "main" if name is None else str(ir.StringAttr(name).value)
        transposed = has_transposed(site for group in sites for site in group)
        suffix = of_module.removeprefix("jit_")
        names = [
            f"{fragment_name(i, of_group, transposed, group[0].inferred_by)}.{suffix}"
            for i, (group, of_group) in enumerate(zip(groups, sites))
        ]
        if self.verbose_logging:
            self._log(of_module, groups, sites, names, transposed)
        own, rows = set(sdy_meshes(module.operation)), rows_of(module.operation)
        for group, name in zip(groups, names):
            for problem in contradictions(rows, names_of(group[0])):
                diagnostics.error(_one_fragment(problem, group[0]), group[0].location)
            _lower_group(group, name, own, rows)
        for body in bodies:
            ir.erase(body)

    def _log(
        self,
        of_module: str,
        groups: Sequence[Sequence[ir.Fragment]],
        sites: Sequence[Sequence[FragmentInfo]],
        names: Sequence[str],
        transposed: bool,
    ) -> None:
        by_mesh: dict[str, list[str]] = {}
        for group, of_group, name in zip(groups, sites, names):
            lines = by_mesh.setdefault(group[0].mesh, [])
            lines += [f"  - {name} from program with {site_text(site, transposed)}" for site in of_group]
        for mesh, lines in by_mesh.items():
            log.info("Module %s on mesh %s will execute:\n%s", of_module, mesh, "\n".join(lines))


def _with_own_bodies(groups: list[list[ir.Fragment]], module: ir.Module) -> list[list[ir.Fragment]]:
    """Puts shared bodies back into the first fragment of each group; groups that become equal are one."""
    symbols = ir.symbol_table(module)
    group_of = {group[0]: group for group in groups}
    for first in group_of:
        put_back(first, symbols)
    place = {g: i for f in ir.funcs(module) if f.is_mpmd for i, g in enumerate(ir.fragments(f))}
    return [
        sorted((g for first in firsts for g in group_of[first]), key=place.__getitem__)
        for firsts in programs(group_of)
    ]


def _one_fragment(problem: str, fragment: ir.Fragment) -> str:
    return (
        f"the compiler options {problem} contradict: both are in one fragment on mesh {fragment.mesh!r}\n"
        "  give the mesh the option instead"
    )


def _lower_group(
    group: Sequence[ir.Fragment], name: str, meshes: set[str], rows: Sequence[OptionsRow]
) -> None:
    first = group[0]
    mesh = _topology_of(first)[first.mesh]
    reserved = [
        ir.IntegerAttr(fragment.attributes["reserved_hbm_bytes"]).value
        for fragment in group
        if "reserved_hbm_bytes" in fragment.attributes
    ]
    own = first.mesh if first.mesh in meshes else None
    argument_attributes = _with_shardings(first, "arg_attrs", list(first.inputs), own)
    result_attributes = _with_shardings(first, "res_attrs", list(first.results), own)
    if own is not None:
        shardings.point_to(ir.walk(first)[1:], own)
    elif manual := ir.walk(first, ir.sdy.ManualComputationOp):
        _create_sdy_mesh(first.mesh, mesh, ir.module_of(first))
        for computation in manual:
            shardings.point_to(ir.walk(computation), first.mesh)
    options = options_of_fragment(first, rows)
    made = outline(first, name)
    ir.put(made, "mesh_shape", mesh)
    put_options(made, options)
    if reserved:
        ir.put(made, "reserved_hbm_bytes", ir.i64(max(reserved)))
    ir.put_attribute_dicts(made, "arg_attrs", argument_attributes)
    ir.put_attribute_dicts(made, "res_attrs", result_attributes)
    for fragment in group:
        _replace_by_call(fragment, name)


def _create_sdy_mesh(name: str, mesh: ir.Attribute, module: ir.Op) -> None:
    if name not in sdy_meshes(module):
        where = ir.at_start(module.regions[0].blocks[0])
        ir.create("sdy.mesh", [], [], where, {"sym_name": ir.StringAttr.get(name), "mesh": mesh})


def _topology_of(fragment: ir.Fragment) -> ir.TopologyAttr:
    f = fragment.operation.parent
    while not isinstance(f.opview, ir.Func):
        f = f.parent
    return f.opview.topology


def _with_shardings(
    fragment: ir.Fragment, attribute: str, values: Sequence[ir.Value], own: str | None
) -> list[dict[str, ir.Attribute]]:
    """The attributes of each operand or result, with the sharding of its type, on the sdy mesh `own`."""
    dicts = ir.attribute_dicts(fragment, attribute, len(values))
    for of_value, value in zip(dicts, values, strict=True):
        sharding = value.type.sharding if isinstance(value.type, ir.MeshTensor) else None
        if sharding is not None:
            of_value["sdy.sharding"] = sharding if own is None else on_sdy_mesh(sharding, own)
    return dicts


def _replace_by_call(fragment: ir.Fragment, name: str) -> None:
    attributes = {kept: fragment.attributes[kept] for kept in KEPT if kept in fragment.attributes}
    attributes["mesh_name"] = fragment.attributes["mesh_name"]
    attributes["origin"] = fragment.attributes["origin"]
    attributes["callee"] = ir.FlatSymbolRefAttr.get(name)
    types = [r.type for r in fragment.results]
    where, inputs = ir.before(fragment), list(fragment.inputs)
    call = ir.create("mpmd.fragment_call", inputs, types, where, attributes, fragment.location)
    ir.replace(fragment, list(call.results))
