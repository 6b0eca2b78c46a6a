"""mpmd-convert-sdy-constants."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from mpmd import ir
from mpmd.passes.bases import FunctionPass


@dataclasses.dataclass(frozen=True)
class ConvertSdyConstants(FunctionPass):
    """Turns `sdy.constant` back into `stablehlo.constant`.

        %c = sdy.constant dense<1.0> : tensor<4xf32>  ->  %c = stablehlo.constant dense<1.0> : tensor<4xf32>

    Shardy uses ops of its own while it propagates, so that nothing joins equal constants.

    Requires: propagation is over.  Ensures: no `sdy.constant` is left; attributes stay.
    Cost: linear in the module.
    Source: openxla/shardy MPMD, `convert_sdy_constants`.
    """

    name: ClassVar[str] = "mpmd-convert-sdy-constants"
    runs_on: ClassVar[Literal["any", "distributed", "mpmd", "entry"]] = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """However deep they stand."""
        for op in ir.walk(f, ir.sdy.ConstantOp):
            ir.stablehlo_constant(op)
