"""mpmd-insert-nameless-clone-of-negligible-ops."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


class InsertNamelessCloneOfNegligibleOps(FunctionPass):
    """Clones constants that a named computation returns, for all uses but the program's results.

        x = comp "f" () { c = const 1; ret c }       x = comp "f" () { c = const 1; ret c }
        y = add a x                             -->  d = const 1
                                                     y = add a d

    Otherwise the users of the constant would be tied to the mesh of the computation.  A constant that the
    function returns keeps the mesh that its name gives it.  Computations in computations come first.

    Requires: nothing.  Ensures: the computation is unchanged; results, and clones, may be unused.
    Cost: linear.
    Source: openxla/shardy MPMD, `insert_nameless_clones_of_negligible_ops`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        terminator = f.terminator
        for computation in reversed(ir.walk(f, ir.NamedComputation)):
            where = ir.after(computation)
            for result, returned in zip(computation.results, computation.returned):
                source = ir.producer(returned)
                if source is None or not is_negligible(source):
                    continue
                copy = ir.clone(source, where)
                used = [(use.owner, use.operand_number) for use in result.uses if use.owner != terminator]
                for owner, number in used:
                    ir.set_operand(owner, number, copy.results[0])


def is_negligible(op: ir.Op) -> bool:
    """Whether it is free to copy: it has no operands and one result."""
    is_small = len(op.operands) == 0 and len(op.results) == 1 and not len(op.operation.regions)
    return is_small and ir.is_duplicable(op)
