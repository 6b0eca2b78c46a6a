"""mpmd-enforce-input-output-equisharding."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics
from mpmd.support.assignment import Constraint


class EnforceInputOutputEquisharding(FunctionPass):
    """Returns a result on the mesh of the argument whose next value it is.

        main(a@m1): f = m2["f"] ..; return f
        -->  constraints=0:0
        main(a@m1): f = m2["f"] ..; t = transfer f to m1; return t

    Requires: arguments and results are mesh tensors.  Ensures: each pair is on one mesh, and has one
    type if it has one shape.  Cost: linear.
    Source: openxla/shardy MPMD, `enforce_equisharding`.

    Attributes:
        constraints: pairs `"i:o"` of an argument and the result that is its next value.
    """

    runs_on = "entry"
    constraints: tuple[Constraint, ...] = ()

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits each pair."""
        args, returned = f.args, f.returned
        changed = False
        for constraint in self.constraints:
            if not fits(f, constraint):
                continue
            wanted, value = args[constraint.input].type, returned[constraint.output]
            if value.type.tensor != wanted.tensor:  # no next value of it: they share the mesh alone
                wanted = ir.MeshTensor.get(wanted.mesh, value.type.tensor, memory_kind=wanted.memory_kind)
            if value.type != wanted:
                returned[constraint.output] = ir.make_transfer(value, wanted, ir.at_end(f.body)).result
                changed = True
        if changed:
            f.returned = returned
            ir.return_types_changed(f)


def fits(f: ir.Func, constraint: Constraint) -> bool:
    """Whether the function has such an argument and result; reports an error if not."""
    if constraint.input < len(f.args) and constraint.output < len(f.returned):
        return True
    diagnostics.error(
        f"constraint {constraint}: the program has {len(f.args)} arguments and {len(f.returned)} results",
        f.location,
    )
    return False
