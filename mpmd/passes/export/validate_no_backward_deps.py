"""mpmd-validate-no-backward-deps."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.mesh_order import mesh_order
from mpmd.support import diagnostics


class ValidateNoBackwardDeps(FunctionPass):
    """Reports data that flows back to an earlier mesh in a program without a backward pass.

        a = call p0 on m1; t = transfer a to m2; b = call p1 on m2      ->  fine
        u = transfer b to m1; c = call p2 on m1 (u)                     ->  warning, or an error

    Such a pipeline stalls: the next microbatch waits for the last mesh.  If something is transposed data
    must flow back: then nothing is checked, and requesting an error is one.

    Requires: fragments are calls.  Ensures: changes nothing.  Cost: linear, with chains of transfers.
    Source: openxla/shardy MPMD, `validate_no_backward_deps`.

    Attributes:
        fail_on_backward_deps: report errors, not warnings.
    """

    runs_on = "mpmd"
    fail_on_backward_deps: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Checks the operands of each call."""
        calls = ir.ops(f, ir.FragmentCall)
        transposed = next((o for call in calls for o in call.origins if o.transpose_count), None)
        if transposed is not None:
            if self.fail_on_backward_deps:
                diagnostics.error(
                    "Expected forward-only program but found non-forward fragments.\n"
                    f"  {transposed} is transposed: data must flow back to earlier meshes.\n"
                    "  Leave fail-on-backward-deps out for programs with a backward pass.",
                    f.location,
                )
            return
        report = diagnostics.error if self.fail_on_backward_deps else diagnostics.warning
        for call in calls:
            for value in call.operands:
                source = _call_behind(value)
                if source is None or mesh_order([source.mesh, call.mesh])[-1] == call.mesh:
                    continue
                report(
                    "Detected backward dependency but expected forward-only pipeline since there are no "
                    f'transpose fragments: fragment "{source.callee_name}" mesh="{source.mesh}" produces a '
                    f'value consumed by fragment "{call.callee_name}" mesh="{call.mesh}". In a forward-only '
                    "pipeline, dependencies must go from earlier meshes to later meshes.",
                    call.location,
                )


def _call_behind(value: ir.Value) -> ir.FragmentCall | None:
    """The call that computed a value, before any transfers."""
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        op = ir.producer(op.tensor)
    return op if isinstance(op, ir.FragmentCall) else None
