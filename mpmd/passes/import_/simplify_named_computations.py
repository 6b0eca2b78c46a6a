"""mpmd-simplify-named-computations."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dead_ops import erase_dead_ops, is_dead


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
        for barrier in ir.walk(f):
            if barrier.operation.name == "stablehlo.optimization_barrier" and _is_in_computation(barrier):
                _drop_forwarded_operands(barrier)
        changed = True
        while changed:
            changed = False
            for op in reversed(ir.walk(f, ir.NamedComputation)):
                changed |= _simplify(op)
            if changed:
                _erase_dead_around(f)


def _erase_dead_around(f: ir.Func) -> None:
    """Erases pure unused ops outside of computations."""
    for op in reversed(ir.ops(f)):
        if is_dead(op):
            ir.erase(op)


def _is_in_computation(op: ir.Op) -> bool:
    return isinstance(op.operation.parent.opview, ir.NamedComputation)


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


def _simplify(op: ir.NamedComputation) -> bool:
    """One round over one computation; whether it changed."""
    inputs, args, results = list(op.operands), op.args, list(op.results)
    outside = dict(zip(args, inputs))
    _join_equal_operands(inputs, args)
    returned = op.returned
    first: dict[ir.Value, ir.Value] = {}
    dropped: set[int] = set()
    for i, (value, result) in enumerate(zip(returned, results)):
        if value in outside and outside[value].type == result.type:
            ir.replace_uses(result, outside[value])
            dropped.add(i)
        elif value in first:
            ir.replace_uses(result, first[value])
            dropped.add(i)
        else:
            first[value] = result
    dropped |= _unneeded_results(op, dropped, results, returned)
    return _rebuild_without(op, dropped)


def _join_equal_operands(inputs: list[ir.Value], args: list[ir.Value]) -> None:
    seen: dict[ir.Value, ir.Value] = {}
    for value, arg in zip(inputs, args):
        ir.replace_uses(arg, seen.setdefault(value, arg))


def _unneeded_results(
    op: ir.NamedComputation, dropped: set[int], results: list[ir.Value], returned: list[ir.Value]
) -> set[int]:
    """Unused results that may go: pure ones; a last one only with all of a pure computation."""
    unused = [i for i in range(len(results)) if i not in dropped and ir.is_unused(results[i])]
    if len(dropped) + len(unused) == len(results) and ir.is_pure(op):
        return set(unused)
    pure = {i for i in unused if (p := ir.producer(returned[i])) is None or ir.is_pure(p)}
    if pure and len(dropped) + len(pure) == len(results):
        pure.discard(min(pure))
    return pure


def _rebuild_without(op: ir.NamedComputation, dropped: set[int]) -> bool:
    """The computation without some results, and without ops that are then dead; whether that is less."""
    kept = [i for i in range(len(op.results)) if i not in dropped]
    if dropped:
        returned = op.returned
        op.returned = [returned[i] for i in kept]
    dead = any(map(is_dead, ir.ops(op.body)))
    if dead:
        erase_dead_ops(op.body)
    if not ir.ops(op.body) and not kept:
        ir.erase(op)
        return True
    unused = [i for i, arg in enumerate(op.args) if ir.is_unused(arg)]
    if not dropped and not unused:
        return dead
    inputs = [v for i, v in enumerate(op.operands) if i not in set(unused)]
    ir.erase_args(op.body, unused)
    old = [op.results[i] for i in kept]
    made = ir.rebuild(op, inputs, [r.type for r in old])
    for before, after in zip(old, made.results):
        ir.replace_uses(before, after)
    ir.erase(op)
    return True
