"""Order between fragments that data flow does not give: edges, kept as attributes of the fragments.

While a schedule has to be obeyed by later passes, a fragment that must come first has a number,
`mpmd.control_id`, and one that must come later lists such numbers in `mpmd.control_after`.  Both are plain
attributes, so that the program stays valid.  The dialect's own form, operands that no block argument
stands for, is for tools that compare text.
"""

from __future__ import annotations

from collections.abc import Iterable

from jax.extend.mlir import ir

from mpmd.ir import edit
from mpmd.ir.context import context
from mpmd.ir.ops import Fragment, Func, put
from mpmd.ir.query import fragments

_ID, _AFTER = "mpmd.control_id", "mpmd.control_after"
_START = "mpmd.control_operand_start_idx"


def control_edges(f: Func) -> list[tuple[Fragment, Fragment]]:
    """The (before, after) pairs that a schedule asks for, in program order of the later one."""
    numbered = {_integer(g.attributes[_ID]): g for g in fragments(f) if _ID in g.attributes}
    return [
        (numbered[_integer(number)], g)
        for g in fragments(f)
        if _AFTER in g.attributes
        for number in ir.ArrayAttr(g.attributes[_AFTER])
    ]


def put_control_edges(f: Func, edges: Iterable[tuple[Fragment, Fragment]]) -> None:
    """Makes `edges` the control edges of a function; those that it had are gone."""
    befores: dict[Fragment, list[Fragment]] = {}
    for before, after in edges:
        befores.setdefault(after, []).append(before)
    sources = {before for group in befores.values() for before in group}
    number = {g: i for i, g in enumerate(g for g in fragments(f) if g in sources)}
    for g in fragments(f):
        put(g, _ID, _i64(number[g]) if g in number else None)
        after = [_i64(i) for i in sorted({number[b] for b in befores.get(g, [])})]
        put(g, _AFTER, ir.ArrayAttr.get(after, context()) if after else None)


def control_edges_as_operands(f: Func) -> None:
    """Writes the control edges as the dialect does; the function does not verify afterwards.

    Edges from fragments without results have no such form and are lost.
    """
    edges: dict[Fragment, list[Fragment]] = {}
    for before, after in control_edges(f):
        edges.setdefault(after, []).append(before)
    put_control_edges(f, [])
    now: dict[Fragment, Fragment] = {}
    for after, befores in edges.items():
        inputs = list(after.inputs)
        controls = [now.get(b, b).results[0] for b in befores if b.results]
        made = edit.rebuild(after, [*inputs, *controls], [r.type for r in after.results])
        put(made, _START, _i64(len(inputs)))
        edit.replace(after, list(made.results))
        now[after] = made


def _i64(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64, context()), value)


def _integer(attribute: ir.Attribute) -> int:
    return int(ir.IntegerAttr(attribute).value)
