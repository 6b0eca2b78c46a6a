"""mpmd-validate-no-param-transfers."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics


class ValidateNoParamTransfers(FunctionPass):
    """Reports parameters that travel between meshes in every step, by the names of arguments.

        t = transfer %"params['transformer']['w']" to m2  ->  warning, or an error with the option
        t = transfer %"x" to m2                           ->  fine

    Requires: locations of arguments hold their path in the user's pytree.
    Ensures: changes nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `validate_no_param_transfers`.

    Attributes:
        fail_on_param_transfers: report errors, not warnings.
        param_pattern: part of an argument's name by which a parameter is known.
    """

    runs_on = "mpmd"
    fail_on_param_transfers: bool = False
    param_pattern: str = "params['transformer"

    def rewrite_function(self, f: ir.Func) -> None:
        """Checks each transfer between meshes."""
        report = diagnostics.error if self.fail_on_param_transfers else diagnostics.warning
        for transfer in ir.ops(f, ir.Transfer):
            source, target = transfer.tensor.type, transfer.result.type
            if transfer.is_intra_mesh:
                continue
            names = (ir.name_of(transfer.tensor.location), ir.name_of(transfer.location))
            found = dict.fromkeys(f'"{name}"' for name in names if name and self.param_pattern in name)
            if found:
                report(
                    f'Detected cross-mesh transfer of a parameter matching "{self.param_pattern}" from mesh '
                    f'"{source.mesh}" to "{target.mesh}". JAX locations: [{", ".join(found)}]\n'
                    f'  It is sent in every step: assign the parameter to "{target.mesh}", or its reader to '
                    f'"{source.mesh}".',
                    transfer.location,
                )
