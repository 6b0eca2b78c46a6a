"""Names of exported programs: `p3_block_0:3_bwd_calls0to7` has number, origins, phase, microbatches.

Fragments that can be one program, and the options it is compiled with.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.fragments.fragment_info import FragmentInfo
from mpmd.passes.fragments.splitting import body_keys
from mpmd.support.xla_options import FragmentOptions, OptionsRow, OptionValue, options_of

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
    found = re.fullmatch(r"(.*)_(\d+)", name, re.DOTALL)
    return (found[1], int(found[2])) if found else (name, None)


def _counters(found: Sequence[int], backward: bool) -> str:
    if not found:
        return ""
    first, last = (found[-1], found[0]) if backward else (found[0], found[-1])
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
