"""mpmd-uniquify-function-inputs-outputs."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics


class UniquifyFunctionInputsOutputs(FunctionPass):
    """Gives every result of a function a value of its own, which is not an argument.

        f = m1["f"] (a) { x = add a a; ret x }
        return f, a, f
        -->
        f = m1["f"] (a) { x = add a a; ret x }
        p, q, r = m1[] by=uniquify (f, a) { ret f, f, a }
        return p, r, q

    Attributes:
        use_transfer_instead_of_fragment: copy by identity transfers, one for each argument and
            for each further occurrence of a value, so that propagation can shard each result by itself.
            Otherwise by one inferred fragment per mesh, which merge-inferred-fragments then puts into the
            producing fragments where it can.

    Requires: every returned value is a mesh tensor (error).  Ensures: no result is an argument or another
    result; canonicalize would undo it.  Cost: linear.
    Source: openxla/shardy MPMD, `uniquify_function_inputs_outputs`.
    """

    runs_on = "mpmd"
    use_transfer_instead_of_fragment: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Copies arguments and repeated results, before the return."""
        strangers = [i for i, v in enumerate(f.returned) if not isinstance(v.type, ir.MeshTensor)]
        for i in strangers:
            diagnostics.error(
                f"result {i} of @{f.symbol} is a {f.returned[i].type}, on no mesh; every result needs a mesh "
                "before it can have a buffer of its own: assign it to one",
                f.returned[i].location,
            )
        if strangers:
            return
        if self.use_transfer_instead_of_fragment:
            _copy_by_transfers(f)
        else:
            _copy_by_fragments(f)


def _copy_by_transfers(f: ir.Func) -> None:
    seen: set[ir.Value] = set()
    for i, value in enumerate(f.returned):
        if ir.producer(value) is None or value in seen:
            copy = ir.make_transfer(value, value.type, ir.at_end(f.body))
            ir.set_operand(f.terminator, i, copy.result)
        seen.add(value)


def _copy_by_fragments(f: ir.Func) -> None:
    """One fragment per mesh returns each value as often as the function does."""
    places: dict[str, dict[ir.Value, list[int]]] = {}
    for i, value in enumerate(f.returned):
        places.setdefault(value.type.mesh, {}).setdefault(value, []).append(i)
    for mesh, at in places.items():
        copied = {v: where for v, where in at.items() if len(where) > 1 or ir.producer(v) is None}
        if copied:
            _copy_on_mesh(f, mesh, copied)


def _copy_on_mesh(f: ir.Func, mesh: str, copied: dict[ir.Value, list[int]]) -> None:
    inputs = list(copied)
    made = ir.make_fragment(
        mesh,
        inputs,
        [v.type for v, where in copied.items() for _ in where],
        ir.at_end(f.body),
        lambda args, _: [arg for arg, where in zip(args, copied.values()) for _ in where],
        inferred_by=["uniquify"],
        location=f.terminator.location,
    )
    positions = [i for where in copied.values() for i in where]
    for i, result in zip(positions, made.results, strict=True):
        ir.set_operand(f.terminator, i, result)
