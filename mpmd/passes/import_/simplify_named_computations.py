"""mpmd-simplify-named-computations."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dead_ops import erase_dead_ops
from mpmd.passes.fragments.simplifying import simplify


class SimplifyNamedComputations(FunctionPass):
    """Removes from named computations forwarded, unneeded and duplicate values.

        x, y, z = comp "f" (a, b) { p, q = barrier a b; s = add p p; ret s, s, q }; w = add x y; return w, z
        -->  x = comp "f" (a) { p = barrier a; s = add p p; ret s }; w = add x x; return w, b

    Values that a computation forwards would otherwise be tied to its mesh.

    Requires: nothing.  Ensures: no equal operands or results, no result that is an argument, no unused pure
    result, no unused operand.  Cost: linear, times the length of the longest chain of computations that only
    pass values on.  Source: openxla/shardy MPMD, `simplify_named_computations`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Simplifies the computations, last first, until none changes any more.

        A dead op still uses its operands, be it around a computation or in one.
        """
        erase_dead_ops(f.body)
        for computation in ir.walk(f, ir.NamedComputation):
            for op in ir.ops(computation.body):
                if op.operation.name == "stablehlo.optimization_barrier":
                    _drop_forwarded_operands(op)
        again = True
        while again:
            again = False
            for op in reversed(ir.walk(f, ir.NamedComputation)):
                again |= simplify(op)
            for op in reversed(ir.ops(f)):
                if ir.is_trivially_dead(op):
                    ir.erase(op)
                    again = True


def _drop_forwarded_operands(barrier: ir.Op) -> None:
    """Removes values that a barrier forwards from an argument of the computation to its results."""
    kept: list[tuple[ir.Value, ir.Value]] = []
    dropped: list[tuple[ir.Value, ir.Value]] = []
    for operand, result in zip(barrier.operands, barrier.results):
        users = ir.users(result)
        is_dropped = ir.producer(operand) is None and len(users) == 1 and isinstance(users[0], ir.Return)
        (dropped if is_dropped else kept).append((operand, result))
    if not dropped:
        return
    for operand, result in dropped:
        ir.replace_uses(result, operand)
    if kept:
        made = ir.rebuild(barrier, [v for v, _ in kept], [r.type for _, r in kept])
        for (_, old), new in zip(kept, made.results):
            ir.replace_uses(old, new)
    ir.erase(barrier)
