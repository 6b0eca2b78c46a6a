"""The user's layouts of arguments and results, written at the fragments that read and produce them.

A fragment is then compiled for the layout, so that no copy is between it and the user's array.
"""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.export.donation import LAYOUT, Attributes
from mpmd.support import diagnostics

DEFAULT, AUTO = "default", "auto"


class MarkInputOutputWithLayouts(FunctionPass):
    """Propagates the user's layouts of arguments and results to the fragments.

        main(a@m1 {mhlo.layout_mode = "{0, 1}"}):
          f = m1["f"] (a) {...}
        ->
          f = m1["f"] (a) <arg_attrs = [{mhlo.layout_mode = "{0, 1}"}]> {...}

    A layout is `default` (also if none is given), `auto`, which leaves the choice to one compiler run, or
    custom.  All fragments that produce or read a value must agree, hence `auto` only where one does.

    Requires: the results and operands of fragments are final.
    Ensures: a value has one layout everywhere, transfers included; default is an empty dictionary, and
        nothing is written if no layout is requested at all.  Error: a value
        is returned twice, or is an argument and returned, with layouts that differ.  Warning: a custom
        layout is lost in a transfer.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `mark_input_output_with_layouts`.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Arguments first, then results of fragments."""
        table = _LayoutTable(f)
        if _has_layouts(f):
            _choose(f, table)
        else:
            for fragment in ir.fragments(f):
                for i, result in enumerate(fragment.results):
                    if ir.is_unused(result):
                        table.write(fragment, "res_attrs", i, AUTO)
        table.store()


def _has_layouts(f: ir.Func) -> bool:
    """Whether any layout is requested; usually none is, which is fast to check."""
    ops: list[ir.Op] = [f, *ir.fragments(f)]
    attributes = [op.attributes.get(name) for op in ops for name in ("arg_attrs", "res_attrs")]
    return any(LAYOUT in str(attribute) for attribute in attributes if attribute is not None)


def _choose(f: ir.Func, table: _LayoutTable) -> None:
    """A layout for each argument, then for each result of a fragment."""
    for i, arg in enumerate(f.args):
        if ir.is_unused(arg):
            continue
        own = table.read(f, "arg_attrs", i)
        layout = _returned_layout(arg, table, own, f"Arg #{i}")
        if layout is None:
            continue
        layout = _for_transfers(arg, layout, f"Arg #{i}")
        if layout == AUTO and len(_inner_users(arg)) > 1:
            layout = DEFAULT
        table.write(f, "arg_attrs", i, layout)
        _write_to_users(arg, layout, table)
    for fragment in ir.fragments(f):
        for i, result in enumerate(fragment.results):
            layout = _returned_layout(result, table, AUTO, "")
            if layout is None:
                continue
            inner = _inner_users(result)
            if layout == AUTO and inner:
                layout = DEFAULT
            layout = _for_transfers(result, layout, f"Result #{i}")
            table.write(fragment, "res_attrs", i, layout)
            _write_to_users(result, layout, table)


class _LayoutTable:
    """The layouts at all values of a function: read and written here, stored at once."""

    def __init__(self, f: ir.Func) -> None:
        self.f = f
        self.dicts: dict[tuple[ir.Op, str], list[Attributes]] = {}
        self.chosen: dict[tuple[ir.Op, str], None] = {}

    def _at(self, op: ir.Op, name: str) -> list[Attributes]:
        key = (op, name)
        if key not in self.dicts:
            if op == self.f:
                values = op.args if name == "arg_attrs" else op.returned
            else:
                values = op.inputs if name == "arg_attrs" else op.results
            self.dicts[key] = ir.attribute_dicts(op, name, len(values))
        return self.dicts[key]

    def read(self, op: ir.Op, name: str, index: int) -> str:
        layout = self._at(op, name)[index].get(LAYOUT)
        return DEFAULT if layout is None else str(ir.StringAttr(layout).value)

    def shown(self, op: ir.Op, name: str, index: int) -> str:
        """The layout at one value as an attribute prints; none prints as MLIR has it."""
        return str(self._at(op, name)[index].get(LAYOUT, "<<NULL ATTRIBUTE>>"))

    def write(self, op: ir.Op, name: str, index: int, layout: str) -> None:
        """Sets the layout at one value; the default removes it, and may leave an empty dictionary."""
        of_value = self._at(op, name)[index]
        if layout == DEFAULT:
            of_value.pop(LAYOUT, None)
        else:
            of_value[LAYOUT] = ir.StringAttr.get(layout)
        self.chosen[(op, name)] = None

    def store(self) -> None:
        for op, name in self.chosen:
            even_if_empty = isinstance(op, ir.Fragment) or name in op.attributes
            ir.put_attribute_dicts(op, name, self.dicts[(op, name)], even_if_empty)


def _returned_layout(value: ir.Value, table: _LayoutTable, own: str, argument: str) -> str | None:
    """The layout of a value, by its own and those of the results it is returned as; None on a conflict.

    `argument` is the name of the value if it is one, else empty.
    """
    layout, first = AUTO, -1
    terminator = table.f.terminator
    positions = [number for user, number in ir.uses(value) if user == terminator]  # newest first
    for position in positions:
        other = table.read(table.f, "res_attrs", position)
        if other == AUTO:
            continue
        if layout not in (AUTO, other):
            diagnostics.error(
                f"Result #{first} is also returned as result #{position}, but with incompatible layouts: "
                f"{table.shown(table.f, 'res_attrs', first)} vs. "
                f"{table.shown(table.f, 'res_attrs', position)}. Both are one array; request one layout, or "
                "return a copy.",
                terminator.location,
            )
            return None
        layout, first = other, position
    if not argument:
        return layout if positions or ir.is_unused(value) else DEFAULT
    if layout == AUTO:
        return own
    if own not in (AUTO, layout):
        diagnostics.error(
            f"{argument} is returned as result #{first}, but with incompatible layouts: "
            f"{table.shown(table.f, 'arg_attrs', ir.arg_index(value))} vs. "
            f"{table.shown(table.f, 'res_attrs', first)}. Both are one array; request one layout, or return "
            "a copy.",
            table.f.location,
        )
        return None
    return layout


def _inner_users(value: ir.Value) -> list[ir.Op]:
    """The fragments and transfers that use a value, once per use."""
    return [user for user in ir.users(value) if isinstance(user, (ir.Fragment, ir.Transfer))]


def _for_transfers(value: ir.Value, layout: str, called: str) -> str:
    """Default, if the value is sent to a host mesh, which supports no other layout."""
    users = ir.users(value)
    if not any(isinstance(u, ir.Transfer) and u.result.type.mesh.endswith("/cpu") for u in users):
        return layout
    if layout not in (AUTO, DEFAULT):
        diagnostics.warning(
            f'{called} is used in a transfer op, but with a non-default layout: "{layout}". '
            "Forcing the layout to default. A host mesh supports no other layout.",
            value.location,
        )
    return DEFAULT


def _write_to_users(value: ir.Value, layout: str, table: _LayoutTable) -> None:
    """Writes the layout of a value to all its users, and to the users of its transfers."""
    todo = [value]
    while todo:
        current = todo.pop()
        for use in current.uses:
            user, position = use.owner, use.operand_number
            if isinstance(user, ir.Fragment):
                table.write(user, "arg_attrs", position, layout)
            elif isinstance(user, ir.Transfer):
                todo.append(user.result)
            elif user == table.f.terminator:
                if current != value:
                    _warn_if_lost(position, layout, table, current)
                table.write(table.f, "res_attrs", position, layout)


def _warn_if_lost(position: int, layout: str, table: _LayoutTable, value: ir.Value) -> None:
    """Warns if a result that is a transfer does not get the layout that the user wants for it."""
    wanted = table.read(table.f, "res_attrs", position)
    if wanted not in (AUTO, layout):
        diagnostics.notice(
            f"Result #{position} is a transfer of a value of layout {layout} and takes its layout, not "
            f"{wanted}.",
            value.location,
        )
