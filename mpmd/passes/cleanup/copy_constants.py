"""Passes that copy constants, and what costs no more, to where they are used."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.cleanup.recompute import CHEAP


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
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        value = op.tensor
        op = ir.producer(value)
    return op.returned[ir.result_index(value)] if isinstance(op, ir.Fragment) else None


class CopyCheapConstants(FunctionPass):
    """Recomputes cheap functions of constants in unnamed work outside of microbatches.

        z = m1[] () { c = const 0; b = broadcast c; ret b }
        f = m1["f"] cc=0 (z)
        u = m1[] (f, z) { s = add f z; ret s }
        -->
        z = m1[] () { c = const 0; b = broadcast c; ret b }
        f = m1["f"] cc=0 (z)
        u = m1[] (f, z) { c = const 0; b = broadcast c; s = add f b; ret s }

    The value need then not be kept, or sent, until it is used.  Its operand is left unused; fragment-dce
    removes it.  Fragments of microbatches are left alone, so that they stay equal.

    Requires: fragments in program order.  Ensures: same values.  Cost: linear times `max_ops`.
    Source: ours, after `copy_constants` of openxla/shardy MPMD.

    Attributes:
        max_ops: operations that one value may take.
    """

    runs_on = "entry"
    max_ops: int = 8

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.is_user or fragment.call_counter is not None:
                continue
            first = fragment.body.operations[0]
            for value, arg in zip(fragment.inputs, fragment.args):
                source = value_inside(value)
                ops = [] if source is None else self._plan(source)
                if source is not None and ops:
                    values: dict[ir.Value, ir.Value] = {}
                    for op in ops:
                        ir.clone_with(op, values, ir.before(first))
                    ir.replace_uses(arg, values[source])

    def _plan(self, source: ir.Value) -> list[ir.Op]:
        """The cheap ops that compute a value from nothing, producers first; none if there is no such plan."""
        found: dict[ir.Op, None] = {}
        todo = [source]
        while todo:
            op = ir.producer(todo.pop())
            if op is None or op.operation.name not in CHEAP or len(op.operation.regions):
                return []
            found.pop(op, None)
            found[op] = None
            if len(found) > self.max_ops:
                return []
            todo += op.operands
        return list(reversed(found))
