"""mpmd-scheduling-units-verifier."""

from __future__ import annotations

import collections

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics


class SchedulingUnitsVerifier(FunctionPass):
    """Warns of meshes that do not have one forward and one backward unit per microbatch.

        m1: f0 f1 b0 b1;  m2: f0 f1 b0 b1       ->  fine
        m1: f0 f1 b0 b1;  m2: f0 f1 b0 b0' b1   ->  warning: mesh m2 has 3 backward units, not 2

    Changes nothing: a program whose units could not be merged runs, but its schedule is not the requested
    one.  Programs without microbatches are left alone, with a remark.  It does not support split backward
    fragments, nor several stages per mesh.

    Requires: scheduling units are merged, not split.  Ensures: nothing.  Cost: linear.
    Source: openxla/shardy MPMD, `scheduling_units_verifier`.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Counts."""
        fragments = ir.fragments(f)
        counters = {op.call_counter for op in fragments if op.call_counter is not None}
        expected = max(counters, default=0) + (0 in counters)
        if not expected:
            diagnostics.notice(f"@{f.symbol} has no microbatches: nothing to count", f.location)
            return
        count = collections.Counter((op.mesh, op.is_forward) for op in fragments if op.is_scheduling_unit)
        for mesh in f.topology.schedulable:
            for phase, is_forward in (("forward", True), ("backward", False)):
                got = count[mesh, is_forward]
                if got != expected:
                    diagnostics.warning(
                        f"Number of {phase} scheduling units in mesh {mesh} does not match expected "
                        f"number for {expected} microbatches. Got {got}. {_advice(got, expected)}",
                        f.location,
                    )


def _advice(got: int, expected: int) -> str:
    if got > expected:
        return "Named computations of one mesh are kept apart by work on another one between them."
    return "Name some of the work of every microbatch on this mesh."
