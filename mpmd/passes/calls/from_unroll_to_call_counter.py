"""mpmd-from-unroll-to-call-counter."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class FromUnrollToCallCounter(FunctionPass):
    """Turns the iteration of an unrolled loop into the microbatch of the calls in it.

        x = call body(a) uc=5    -->    x = call body(a) cc=5

    Only calls; other ops keep their `unroll_counter`.

    Requires: nothing.  Ensures: no call has an `unroll_counter`.  Cost: linear.
    Source: openxla/shardy MPMD, `from_unroll_to_call_counter`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Renames the attribute."""
        for call in ir.walk(f, ir.Call):
            if call.unroll_counter is not None:
                call.call_counter, call.unroll_counter = call.unroll_counter, None
