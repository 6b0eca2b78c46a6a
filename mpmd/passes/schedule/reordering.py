"""What scheduling passes do once they know which fragment has to come before which."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd import ir
from mpmd.support import diagnostics

Edges = Sequence[tuple[ir.Fragment, ir.Fragment]]


def apply_edges(f: ir.Func, edges: Edges, remove_control_dependencies: bool) -> None:
    """Sorts a function by data flow and `edges`, which it keeps as control edges unless told otherwise."""
    order, cycle = ir.Dependencies(f, edges).stable_order()
    if cycle:
        diagnostics.notice(
            f"the schedule of @{f.symbol} contradicts itself; these keep their order: each needs the next, "
            f"and the last needs the first: {'; '.join(map(describe, cycle))}",
            f.location,
        )
    ir.reorder(f, order)
    ir.put_control_edges(f, [] if remove_control_dependencies else edges)


def describe(op: ir.Op) -> str:
    """One op in words that the user can recognise."""
    if isinstance(op, ir.Transfer):
        return f'transfer from mesh "{op.tensor.type.mesh}" to "{op.result.type.mesh}"'
    if not isinstance(op, ir.Fragment):
        return str(op.operation.name)
    origins = ", ".join(map(str, op.origins))
    text = f"fragment {origins}" if op.is_user else "inferred fragment"
    text += f' on mesh "{op.mesh}"'
    if op.stage is not None:
        text += f", stage {op.stage}"
    if op.call_counter is not None:
        text += f", microbatch {op.call_counter}"
    return text
