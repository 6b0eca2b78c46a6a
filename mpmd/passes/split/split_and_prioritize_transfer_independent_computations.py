"""mpmd-split-and-prioritize-transfer-independent-computations."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.splitting import split


class SplitAndPrioritizeTransferIndependentComputations(FunctionPass):
    """Splits fragments that wait for a transfer, so that the rest of their work can begin before.

        t = transfer b to m2                              t = transfer b to m2
        f, g = m2["f"] (a, t) {                           f = m2["f"] keep (a) { x = neg a; ret x }
          x = neg a; y = add x t; ret x, y }        -->   g = m2["f"] drop (t, f) { y = add f t; ret y }

    The first half has all ops that do not depend on transferred values, also through regions.  (Both
    still have all operands; canonicalize, fragment-dedup and fragment-dce drop those they do not need.)

    Requires: shardings are not propagated.  Ensures: nothing to split is left.  Cost: linear.
    Source: openxla/shardy MPMD, `split_and_prioritize_transfer_independent_computations`.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        """Splits each fragment of which some operands, but not all, come from transfers."""
        for fragment in ir.fragments(f):
            if fragment.split_keep_transferred or fragment.split_drop_transferred:
                continue
            arrived = [isinstance(ir.producer(v), ir.Transfer) for v in fragment.inputs]
            if not any(arrived) or all(arrived):
                continue
            waiting = _values_from([arg for arg, late in zip(fragment.args, arrived) if late], fragment)
            kept = [i for i, value in enumerate(fragment.returned) if value not in waiting]
            early = {op for op in ir.ops(fragment.body) if not _reads(op, waiting)}
            if early or kept:
                halves = split(fragment, early, kept)
                if halves is not None:
                    halves[0].split_keep_transferred = True
                    halves[1].split_drop_transferred = True


def _values_from(values: list[ir.Value], fragment: ir.Fragment) -> set[ir.Value]:
    """The values of a body that depend on some of its arguments, these included."""
    found = set(values)
    for op in ir.ops(fragment.body):
        if _reads(op, found):
            found.update(op.results)
    return found


def _reads(op: ir.Op, values: set[ir.Value]) -> bool:
    return any(v in values for v in ir.read_by(op))
