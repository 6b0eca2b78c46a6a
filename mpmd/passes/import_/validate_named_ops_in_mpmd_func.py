"""mpmd-validate-named-ops-in-mpmd-func."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics
from mpmd.support.source import location_of

_ADVICE = {
    "stablehlo.while": (
        "It stands inside of a loop (lax.scan, fori_loop or while_loop). Write the loop over microbatches "
        "with mpmd's loop, or unroll it with a Python `for`, or name the whole loop."
    ),
    "stablehlo.case": (
        "It stands inside of a branch (lax.cond or switch). Name the whole branch, or choose with jnp.where."
    ),
    "stablehlo.if": (
        "It stands inside of a branch (lax.cond). Name the whole branch, or choose with jnp.where."
    ),
}


@dataclasses.dataclass(frozen=True)
class ValidateNamedOpsInMpmdFunc(FunctionPass):
    """Reports names where they cannot be mapped to a mesh, such as inside of `lax.scan`.

        while { x = comp "f" (a) { .. } }  -->  error: Named computations can only be nested in ..

    Requires: nothing.  Ensures: nothing changes.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_named_ops_in_mpmd_func`.
    """

    name: ClassVar[str] = "mpmd-validate-named-ops-in-mpmd-func"
    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Looks at the parent of each name."""
        for op in ir.walk(f, (ir.NamedComputation, ir.NamedTensor)):
            parent = op.operation.parent.opview
            fits = parent.is_mpmd if isinstance(parent, ir.Func) else parent.name.startswith("mpmd.")
            if not fits:
                diagnostics.late_error(_message(op, parent), op.location)


def _message(op: ir.Op, parent: ir.Op) -> str:
    if isinstance(op, ir.NamedComputation):
        what, name = "Named computations", op.named.name
    else:
        what, name = "Named tensors", ir.StringAttr(op.attributes["name"]).value
    text = f"{what} can only be nested in mpmd functions or mpmd ops.\n  '{name}'"
    place = location_of(op)
    if place is not None and place[0] != "-":
        text += f", {place[0]}:{place[1]},"
    if isinstance(parent, ir.Func):
        advice = (
            "A function that is called from inside of a loop or branch, or of a plain jax.jit, holds no "
            "names: call it from the MPMD program itself."
        )
        return f"{text} is in function @{parent.symbol}, which belongs to no topology. {advice}"
    advice = _ADVICE.get(parent.operation.name, "Name what is around it.")
    return f"{text} is in a {parent.operation.name}. {advice}"
