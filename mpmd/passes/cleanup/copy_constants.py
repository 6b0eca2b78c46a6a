"""mpmd-copy-constants."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class CopyConstants(FunctionPass):
    """Recomputes a constant in each fragment that reads it.

        f = m1["f"] () { c = const 1; ret c }               f = m1["f"] () { c = const 1; ret c }
        t = transfer f to m2                          -->   t = transfer f to m2
        g = m2["g"] (t, b) { y = mul t b; ret y }           g = m2["g"] (t, b) { d = const 1; y = mul d b; ret
        y }

    A constant that one fragment computes and another one uses is cheaper to compute twice than to keep or to
    send.  The old operand is left, unused.

    Requires: nothing.  Ensures: same values.  Cost: linear in operands, times transfers on the way.
    Source: openxla/shardy MPMD, `copy_constants`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Consumers first, so that a clone is not visited again."""
        for fragment in reversed(ir.fragments(f)):
            for value, arg in zip(fragment.inputs, fragment.args):
                source = value_inside(value)
                constant = None if source is None else ir.producer(source)
                if ir.is_constant(constant):
                    copy = ir.clone(constant, ir.at_start(fragment.body))
                    ir.replace_uses(arg, copy.result)


def value_inside(value: ir.Value) -> ir.Value | None:
    """The inner value of a fragment's result, through transfers."""
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        value = op.tensor
        op = ir.producer(value)
    return op.returned[ir.result_index(value)] if isinstance(op, ir.Fragment) else None
