"""mpmd-convert-sdy-constants."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.constants import attributes_of, constant_text, holds_complex


class ConvertSdyConstants(FunctionPass):
    """Turns `sdy.constant` back into `stablehlo.constant`.

        %c = sdy.constant dense<1.0> : tensor<4xf32>  ->  %c = stablehlo.constant dense<1.0> : tensor<4xf32>

    Shardy uses ops of its own while it propagates, so that nothing joins equal constants.

    Requires: propagation is over.  Ensures: no `sdy.constant` is left; attributes stay.
    Cost: linear in the module.
    Source: openxla/shardy MPMD, `convert_sdy_constants`.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """At any depth."""
        for op in ir.walk(f, ir.sdy.ConstantOp):
            made = _complex_constant(op) if holds_complex(op) else _constant(op)
            ir.replace(op, [made.results[0]])


def _constant(op: ir.Op) -> ir.Op:
    attributes = dict(op.attributes.items())
    made: ir.Op = ir.create(
        "stablehlo.constant", [], [op.result.type], ir.before(op), attributes, op.location
    )
    return made


def _complex_constant(op: ir.Op) -> ir.Op:
    """The bindings have no attributes of complex numbers, so the op is rebuilt from text."""
    kind = op.result.type
    module = ir.parse(
        f'"stablehlo.constant"() <{{value = {constant_text(op)}}}> : () -> {kind} {op.location}'
    )
    made: ir.Op = ir.clone(module.body.operations[0], ir.before(op))
    for name, attribute in attributes_of(op):
        if not isinstance(attribute, str):
            ir.put(made, name, attribute)
    return made
