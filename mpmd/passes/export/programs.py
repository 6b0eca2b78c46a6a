"""Fragments that can be one program, and the options it is compiled with."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.fragments.splitting import body_keys
from mpmd.support.compiler_options import FragmentOptions, OptionsRow, OptionValue, options_of

ATTRIBUTE = "mpmd.compiler_options"


def put_rows(module: ir.Module, rows: Sequence[OptionsRow]) -> None:
    """Writes the options that a user gave; none removes the attribute."""
    with ir.context():
        ir.put(
            module.operation.opview, ATTRIBUTE, ir.ArrayAttr.get([_row(r) for r in rows]) if rows else None
        )


def rows_of(module: ir.Op) -> tuple[OptionsRow, ...]:
    found = module.attributes.get(ATTRIBUTE)
    return () if found is None else tuple(map(_read_row, ir.ArrayAttr(found)))


def names_of(fragment: ir.Fragment | ir.FragmentCall) -> frozenset[str]:
    """The names that options of a fragment may be for."""
    return frozenset(origin.name for origin in fragment.origins)


def options_of_fragment(fragment: ir.Fragment, rows: Sequence[OptionsRow]) -> FragmentOptions:
    return options_of(rows, fragment.mesh, names_of(fragment)) if rows else ()


def put_options(f: ir.Func, options: FragmentOptions) -> None:
    with ir.context():
        ir.put(f, ATTRIBUTE, _dict(options) if options else None)


def read_options(f: ir.Func) -> FragmentOptions:
    found = f.attributes.get(ATTRIBUTE)
    return () if found is None else _read_dict(found)


def _row(row: OptionsRow) -> ir.Attribute:
    scope = {"mesh": row.mesh, "name": row.name, "unless": ",".join(row.unless)}
    texts = {key: ir.StringAttr.get(text) for key, text in scope.items() if text}
    return ir.DictAttr.get({"options": _dict(row.options), **texts})


def _read_row(attribute: ir.Attribute) -> OptionsRow:
    found = dict(ir.entries_of(attribute))
    options = _read_dict(found.pop("options"))
    texts = {key: str(ir.StringAttr(text).value) for key, text in found.items()}
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
