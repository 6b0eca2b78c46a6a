"""Loops over microbatches, unrolled: every call of an iteration gets the number of its microbatch."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.structure import splat
from mpmd.support import diagnostics

_COUNTER = "unroll_counter"


class UnrollForLoops(FunctionPass):
    """Unrolls loops completely.

        l = for 2 (a, i) {                   c0 = const 0 uc=0
          x = call body(a, i); ret x }       x = call body(a, c0) uc=0
                                      -->    c1 = const 1 uc=1
                                             y = call body(x, c1) uc=1

    Each unrolled op has an `unroll_counter`, which counts the iterations of all loops of the
    function in one; the constants count those of their own loop.

    Requires: the unroll factor of a loop is its number of iterations; loops are not nested (errors).
    Ensures: no loop is left.  Cost: linear in the unrolled ops.
    Source: openxla/shardy MPMD, `unroll_for_loops`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """One loop after the other."""
        loops = ir.ops(f, ir.For)
        problems = [problem for loop in loops if (problem := _problem(loop)) is not None]
        for message, where in problems:
            diagnostics.error(message, where.location)
        if problems:
            return
        offset = 0
        for loop in loops:
            count = loop.trip_count
            _unroll(loop, offset)
            offset += count


def _problem(loop: ir.For) -> tuple[str, ir.For] | None:
    """Why a loop cannot be unrolled, and the loop that is the cause."""
    inner = next(iter(ir.ops(loop, ir.For)), None)
    if inner is not None:
        return (
            "Nested fori loops aren't supported: a loop over microbatches is directly inside of another "
            "one.  Make them one loop, or write the inner one with jax.lax.scan",
            inner,
        )
    factor = loop.unroll_factor
    if factor is None or int(factor.value) != loop.trip_count:
        got = "none" if factor is None else int(factor.value)
        return (
            f"a loop of {loop.trip_count} iterations has the unroll factor {got}: loops over microbatches "
            f"are unrolled completely; give it unroll_factor = {loop.trip_count}",
            loop,
        )
    index = loop.args[-1].type
    if not isinstance(index, ir.RankedTensorType):
        return f"the index of a loop is a {index}; loops are unrolled before values have meshes", loop
    return None


def _unroll(loop: ir.For, offset: int) -> None:
    *carried_args, index = loop.args
    carried = list(loop.operands)[: len(carried_args)]
    for i in range(loop.trip_count):
        number = ir.IntegerAttr.get(ir.IntegerType.get_unsigned(32, ir.context()), offset + i)
        constant = splat(str(i), index.type, loop)
        values = dict(zip(carried_args, carried)) | {index: constant}
        copies, carried = ir.clone_body(loop.body, values, ir.before(loop))
        for op in (ir.producer(constant), *copies):
            ir.put(op, _COUNTER, number)
    ir.replace(loop, carried)


class FromUnrollToCallCounter(FunctionPass):
    """Turns the iteration of an unrolled loop into the microbatch of the calls in it.

        x = call body(a) uc=5    -->    x = call body(a) cc=5

    Only calls; other ops keep their `unroll_counter`.

    Requires: nothing.  Ensures: no call has an `unroll_counter`.  Cost: linear.
    Source: openxla/shardy MPMD, `from_unroll_to_call_counter`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        for call in ir.walk(f, ir.Call):
            if call.unroll_counter is not None:
                call.call_counter, call.unroll_counter = call.unroll_counter, None
