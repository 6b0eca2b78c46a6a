"""Fragments that can be one program."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from mpmd import ir
from mpmd.passes.export.compiler_options import options_of_fragment, rows_of
from mpmd.passes.fragments.bodies import body_keys


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
