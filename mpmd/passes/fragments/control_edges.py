"""Order between fragments that data flow does not give: edges, kept as attributes of the fragments.

While a schedule has to be obeyed by later passes, a fragment that must come first has a number among its
`mpmd.control_ids`, and one that must come later lists such numbers in `mpmd.control_after`.  Both are plain
attributes, so that the program stays valid; a merged fragment has the numbers of its parts.  The dialect's
own form, operands that no block argument stands for, is for tools that compare text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpmd import ir

_IDS, _AFTER = "mpmd.control_ids", "mpmd.control_after"
_START = "mpmd.control_operand_start_idx"


def control_edges(f: ir.Func) -> list[tuple[ir.Fragment, ir.Fragment]]:
    """The (before, after) pairs of a schedule, in program order of the later one."""
    numbered = {number: g for g in ir.fragments(f) for number in _numbers(g, _IDS)}
    pairs = ((numbered.get(number, g), g) for g in ir.fragments(f) for number in _numbers(g, _AFTER))
    return list(dict.fromkeys((before, after) for before, after in pairs if before != after))


def put_control_edges(f: ir.Func, edges: Iterable[tuple[ir.Fragment, ir.Fragment]]) -> None:
    """Sets the control edges of a function to `edges`; its old ones are dropped."""
    befores: dict[ir.Fragment, list[ir.Fragment]] = {}
    for before, after in edges:
        befores.setdefault(after, []).append(before)
    sources = {before for group in befores.values() for before in group}
    number = {g: i for i, g in enumerate(g for g in ir.fragments(f) if g in sources)}
    for g in ir.fragments(f):
        _put_numbers(g, _IDS, [number[g]] if g in number else [])
        _put_numbers(g, _AFTER, sorted({number[b] for b in befores.get(g, [])}))


def keep_control_edges(parts: Sequence[ir.Fragment], merged: ir.Fragment) -> None:
    """Gives a merged fragment the edges of its parts, but for those between them."""
    ids = dict.fromkeys(number for part in parts for number in _numbers(part, _IDS))
    after = dict.fromkeys(number for part in parts for number in _numbers(part, _AFTER))
    _put_numbers(merged, _IDS, list(ids))
    _put_numbers(merged, _AFTER, [number for number in after if number not in ids])


def control_edges_as_operands(f: ir.Func) -> None:
    """Writes the control edges as the dialect does; the function does not verify afterwards.

    Edges from fragments without results have no such form and are lost.
    """
    place = {fragment: i for i, fragment in enumerate(ir.fragments(f))}
    befores: dict[int, list[int]] = {}
    for before, after in control_edges(f):
        befores.setdefault(place[after], []).append(place[before])
    put_control_edges(f, [])
    now = list(place)
    for i, earlier in befores.items():
        old = now[i]
        inputs = list(old.inputs)
        controls = [now[k].results[0] for k in earlier if now[k].results]
        now[i] = ir.rebuild(old, [*inputs, *controls], [r.type for r in old.results])
        ir.put(now[i], _START, ir.i64(len(inputs)))
        ir.replace(old, list(now[i].results))


def _numbers(g: ir.Fragment, name: str) -> list[int]:
    attribute = g.attributes.get(name)
    return [] if attribute is None else [ir.IntegerAttr(number).value for number in ir.ArrayAttr(attribute)]


def _put_numbers(g: ir.Fragment, name: str, numbers: Sequence[int]) -> None:
    ir.put(
        g, name, ir.ArrayAttr.get([ir.i64(number) for number in numbers], ir.context()) if numbers else None
    )
