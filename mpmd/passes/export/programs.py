"""Exported programs: which fragments are one, its name, its options, and the calls that replace them.

A name such as `p3_block_0:3_bwd_calls0to7` has number, origins, phase and microbatches.
"""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.bodies import functions_of, put_back
from mpmd.passes.fragments.fragment_info import FragmentInfo
from mpmd.passes.fragments.splitting import body_keys, outline
from mpmd.sharding import shardings
from mpmd.sharding.shardings import on_sdy_mesh, sdy_meshes
from mpmd.support import diagnostics
from mpmd.support.option_texts import FragmentOptions, OptionsRow, OptionValue, contradictions, options_of

MAX_LENGTH = 200
_ELLIPSIS = "<...>"
_EXCHANGES: dict[tuple[str, ...], str] = {("defer_reductions",): "reduce", ("hoist_gathers",): "gather"}


def is_exchange(name: str) -> bool:
    """Whether a program was made to exchange values between the devices of a mesh."""
    return re.match(rf"p\d+_({'|'.join(_EXCHANGES.values())})\.", name) is not None


def is_reduction(name: str) -> bool:
    """Whether a program was made to add what devices of a mesh hold."""
    return re.match(r"p\d+_reduce\.", name) is not None


def has_transposed(sites: Iterable[FragmentInfo]) -> bool:
    """Whether some computation was transposed, so that names must distinguish forward from backward."""
    return any(count for site in sites for count in _counts(site))


def fragment_name(
    number: int, sites: Sequence[FragmentInfo], transposed: bool, inferred_by: Sequence[str] = ()
) -> str:
    """The name of program `number`, after its first fragment; at most 200 characters.

    One that was inferred may be called after the only pass that made it.
    """
    unnamed = _EXCHANGES.get(tuple(inferred_by), "inferred")
    works = [[_what(site, unnamed), *(map(_phase, _counts(site)) if transposed else ())] for site in sites]
    parts = [f"p{number}", *works[0]]
    if all(work == works[0] for work in works):
        parts += _calls([site.call_counter for site in sites])
    name = "_".join(parts)
    return name if len(name) <= MAX_LENGTH else name[: MAX_LENGTH - len(_ELLIPSIS)] + _ELLIPSIS


def site_text(site: FragmentInfo, transposed: bool) -> str:
    """`origins [f(fwd), g(fwd)], stage 1, call counter 0`."""
    names = [f"{o.name}({_phase(o.transpose_count)})" if transposed else o.name for o in site.origins]
    text = f"origins [{', '.join(names)}]"
    if site.stage is not None:
        text += f", stage {site.stage}"
    if site.call_counter is not None:
        text += f", call counter {site.call_counter}"
    return text


def _counts(site: FragmentInfo) -> list[int]:
    return sorted({o.transpose_count for o in site.origins})


def _phase(count: int) -> str:
    return {0: "fwd", 1: "bwd"}.get(count, f"transpose{count}")


def _what(site: FragmentInfo, unnamed: str) -> str:
    """The stage; or the most frequent name of the origins, with their numbers."""
    if site.stage is not None:
        return f"stage{site.stage}"
    if not site.origins:
        return unnamed
    split = [_name_and_counter(o.name) for o in site.origins]
    votes = collections.Counter(name for name, _ in split)
    name = min(votes, key=lambda n: (-votes[n], n))
    text = name + _counters(
        sorted({c for n, c in split if n == name and c is not None}), _counts(site) == [1]
    )
    return text if len(votes) == 1 else text + "..."


def _name_and_counter(name: str) -> tuple[str, int | None]:
    """`block_3` is number 3 of the blocks; a name without a number after its last underscore is itself."""
    match = re.fullmatch(r"(.*)_(\d+)", name, re.DOTALL)
    return (match[1], int(match[2])) if match else (name, None)


def _counters(counters: Sequence[int], backward: bool) -> str:
    if not counters:
        return ""
    first, last = (counters[-1], counters[0]) if backward else (counters[0], counters[-1])
    return f"_{first}" if first == last else f"_{first}:{last}"


def _calls(counters: Sequence[int | None]) -> list[str]:
    """The microbatches of a program, if they have a short form."""
    first, last = counters[0], counters[-1]
    if first is None or last is None:
        return []
    if len(counters) == 1:
        return [f"call{first}"]
    if list(counters) == list(range(first, last + 1)):
        return [f"calls{first}to{last}"]
    if list(counters) == list(range(first, last - 1, -1)):
        return [f"calls{first}from{last}"]
    return []


ATTRIBUTE = "mpmd.compiler_options"


def put_rows(module: ir.Module, rows: Sequence[OptionsRow]) -> None:
    """Writes the options that a user gave; none removes the attribute."""
    with ir.context():
        ir.put(
            module.operation.opview, ATTRIBUTE, ir.ArrayAttr.get([_row(r) for r in rows]) if rows else None
        )


def rows_of(module: ir.Op) -> tuple[OptionsRow, ...]:
    attribute = module.attributes.get(ATTRIBUTE)
    return () if attribute is None else tuple(map(_read_row, ir.ArrayAttr(attribute)))


def names_of(fragment: ir.Fragment | ir.FragmentCall) -> frozenset[str]:
    """The names that options of a fragment may be for."""
    return frozenset(origin.name for origin in fragment.origins)


def options_of_fragment(fragment: ir.Fragment, rows: Sequence[OptionsRow]) -> FragmentOptions:
    return options_of(rows, fragment.mesh, names_of(fragment)) if rows else ()


def put_options(f: ir.Func, options: FragmentOptions) -> None:
    with ir.context():
        ir.put(f, ATTRIBUTE, _dict(options) if options else None)


def read_options(f: ir.Func) -> FragmentOptions:
    attribute = f.attributes.get(ATTRIBUTE)
    return () if attribute is None else _read_dict(attribute)


def _row(row: OptionsRow) -> ir.Attribute:
    scope = {"mesh": row.mesh, "name": row.name, "unless": ",".join(row.unless)}
    texts = {key: ir.StringAttr.get(text) for key, text in scope.items() if text}
    return ir.DictAttr.get({"options": _dict(row.options), **texts})


def _read_row(attribute: ir.Attribute) -> OptionsRow:
    entries = dict(ir.entries_of(attribute))
    options = _read_dict(entries.pop("options"))
    texts = {key: str(ir.StringAttr(text).value) for key, text in entries.items()}
    unless = texts.pop("unless", "")
    return OptionsRow(options, **texts, unless=tuple(unless.split(",")) if unless else ())


def _dict(options: FragmentOptions) -> ir.Attribute:
    return ir.DictAttr.get({name: _value(value) for name, value in options})


def _value(value: OptionValue) -> ir.Attribute:
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.i64(value)
    return ir.FloatAttr.get_f64(value) if isinstance(value, float) else ir.StringAttr.get(value)


def _read_dict(attribute: ir.Attribute) -> FragmentOptions:
    return tuple((name, value.value) for name, value in sorted(ir.entries_of(attribute).items()))


def programs(fragments: Iterable[ir.Fragment]) -> list[list[ir.Fragment]]:
    """The fragments in groups, each of which can be one program; both in the order of the first members."""
    some = list(fragments)
    rows = rows_of(ir.module_of(some[0])) if some else ()
    groups: dict[Hashable, list[ir.Fragment]] = {}

    def signature(fragment: ir.Fragment) -> Hashable:
        return _signature(fragment), options_of_fragment(fragment, rows)

    for fragment, identity in zip(some, body_keys(some, signature)):
        groups.setdefault(identity, []).append(fragment)
    return list(groups.values())


def _signature(fragment: ir.Fragment) -> Hashable:
    """The identity of a program except for its body and its options of XLA."""
    return (
        fragment.mesh,
        tuple(v.type for v in fragment.inputs),
        tuple(v.type for v in fragment.results),
        *(fragment.attributes.get(name) for name in ("arg_attrs", "res_attrs")),
    )


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
    program = outline(first, name)
    ir.put(program, "mesh_shape", mesh)
    put_options(program, options)
    if reserved:
        ir.put(program, "reserved_hbm_bytes", ir.i64(max(reserved)))
    ir.put_attribute_dicts(program, "arg_attrs", argument_attributes)
    ir.put_attribute_dicts(program, "res_attrs", result_attributes)
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
