"""Passes that divide fragments, so that what others wait for comes first."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.splitting import ops_flowing_to, split
from mpmd.support.passes import passes_in


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
        """Splits each fragment some of whose operands, but not all, come from transfers."""
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
    reached = set(values)
    for op in ir.ops(fragment.body):
        if _reads(op, reached):
            reached.update(op.results)
    return reached


def _reads(op: ir.Op, values: set[ir.Value]) -> bool:
    return any(v in values for v in ir.read_by(op))


class SplitBwdFragments(FunctionPass):
    """Splits backward fragments, so that results for other meshes are computed first.

        dw, dx = m2["f"(1)] (w, g) {                       dx, s = m2["f"(1)] keep (w, g) {
          s = neg g; a = mul s w; b = tanh s; ret b, a }     s = neg g; a = mul s w; ret a, s }
        t = transfer dx to m1                        -->   dw = m2["f"(1)] drop (s) { b = tanh s; ret b }
                                                           t = transfer dx to m1

    The first half computes the transferred results, the second the rest from residuals of the first.  (The
    second still has all operands; canonicalize and fragment-dce drop those that it does not need.)

    With `between_stages` only other microbatch work counts as waiting: a stage of the same mesh does, without
    a transfer; a value that is sent to the end of the step, as a sum over the microbatches may be, does not.

    Requires: shardings are not propagated; no transfers that stay on a mesh.  Ensures: nothing to split is
    left.  Cost: linear.  Source: openxla/shardy MPMD, `split_bwd_fragments`; after "Zero Bubble Pipeline
    Parallelism" (Qi et al., 2023).

    Attributes:
        between_stages: only work of microbatches counts as waiting, also on the same mesh.
    """

    runs_on = "any"

    between_stages: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Splits each backward fragment some of whose results, but not all, are waited for elsewhere."""
        for fragment in ir.fragments(f):
            if not fragment.is_backward or fragment.split_keep_transferred or fragment.split_drop_transferred:
                continue
            sent = [
                i for i, result in enumerate(fragment.results) if self._is_waited_for(result, fragment.stage)
            ]
            if not 0 < len(sent) < len(fragment.results):
                continue
            needed = ops_flowing_to([fragment.returned[i] for i in sent])
            if len(needed) < len(ir.ops(fragment.body)):
                halves = split(fragment, needed, sent)
                if halves is not None:
                    halves[0].split_keep_transferred = True
                    halves[1].split_drop_transferred = True

    def _is_waited_for(self, value: ir.Value, stage: int | None) -> bool:
        """Whether a value is transferred, or used by backward work of another stage of the mesh."""
        for user in ir.users(value):
            if isinstance(user, ir.Transfer):
                readers = [op for op in ir.users(user) if isinstance(op, ir.Fragment)]
                if not self.between_stages or any(op.call_counter is not None for op in readers):
                    return True
            elif (
                self.between_stages
                and isinstance(user, ir.Fragment)
                and user.is_backward
                and user.stage not in (None, stage)
            ):
                return True
        return False


PASSES = passes_in(__name__)
