"""mpmd-validate-named-ops-in-mpmd-func."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics
from mpmd.support.source import frames_of

_PLACES = {
    "stablehlo.while": ("a loop that is not unrolled", "loop"),
    "stablehlo.case": ("a branch of a conditional", "conditional"),
    "stablehlo.if": ("a branch of a conditional", "conditional"),
    "sdy.manual_computation": ("a shard_map", "shard_map"),
}
"""The user's construct of an op with regions, and what to name instead."""


class ValidateNamedOpsInMpmdFunc(FunctionPass):
    """Reports names where they cannot be mapped to a mesh, such as inside of `lax.scan`.

        while { x = comp "f" (a) { .. } }  -->  error: Named computations can only be nested in ..

    Requires: nothing.  Ensures: nothing changes.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_named_ops_in_mpmd_func`.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Checks the parent of each name."""
        for op in ir.walk(f, (ir.NamedComputation, ir.NamedTensor)):
            parent = op.operation.parent.opview
            fits = parent.is_mpmd if isinstance(parent, ir.Func) else parent.name.startswith("mpmd.")
            if not fits:
                diagnostics.late_error(_message(op, parent), op.location)


def _message(op: ir.Op, parent: ir.Op) -> str:
    if isinstance(op, ir.NamedComputation):
        kind, name = "Named computation", op.named.name
    else:
        kind, name = "Named tensor", ir.StringAttr(op.attributes["name"]).value
    if isinstance(parent, ir.Func):
        place = f"function @{parent.symbol}, which belongs to no topology"
        advice = "call the function from the MPMD program itself"
    else:
        operation = parent.operation.name
        place, whole = _PLACES.get(operation, (f"the function of a {operation}", "operation"))
        advice = f"put the whole {whole} into one named computation"
    frames = frames_of(op)
    where = f", {frames[0]}" if frames else ""
    return (
        f"{kind.lower()} {name!r} is in {place}, where it cannot have a mesh{where}\n"
        f"  {kind}s can only be nested in mpmd functions or mpmd ops.\n  {advice}"
    )
