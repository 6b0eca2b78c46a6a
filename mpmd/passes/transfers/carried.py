"""Values that loops and steps carry: each arrives once, and under one name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.support import diagnostics


class ForgetCarriedStarts(FunctionPass):
    """Drops the numbered barriers that kept equal start values apart.

        x, y = m1[] () { c = const 0; p = barrier c {start = 0}; q = barrier c {start = 1}; ret p, q }
        -->
        x, y = m1[] () { c = const 0; ret c, c }

    The numbers differ from stage to stage; without them, identical stages start with one program.

    Requires: no pass that joins equal results comes after it.  Ensures: no `mpmd.start`.  Cost: linear.
    Source: ours.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.walk(f):
            if op.operation.name == "stablehlo.optimization_barrier" and START in op.attributes:
                ir.replace(op, list(op.operands))


Kind = tuple[str, tuple[ir.Origin, ...], bool, bool, bool]


START = "mpmd.start"
"""Number of a barrier that separates a start value."""


class UniquifyCarriedValues(FunctionPass):
    """Gives the first microbatch separate start values for everything that microbatches carry.

        z = m1[] () { c = const 0; ret c }
        a, b = m1["f"(1)] cc=0 (z, z)
        c, d = m1["f"(1)] cc=1 (a, b)
        -->
        x, y = m1[] () { c = const 0; p = barrier c; q = barrier c; ret p, q }
        a, b = m1["f"(1)] cc=0 (x, y)
        c, d = m1["f"(1)] cc=1 (a, b)

    An operand is *carried* if a later microbatch takes it from an earlier one of the same kind, as an
    accumulator.  Later microbatches reuse its memory; the first one can too only if nothing else reads its
    start value, and must if all microbatches are to be one program.  Barriers with a number of their own
    (`mpmd.start`) keep later passes from joining equal start values again.

    Requires: microbatches are fragments.  Ensures: no carried start value that unnamed work makes has
    another use.  Cost: linear.  Source: ours.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """Finds the shared start values, then adds results to the fragments that produce them."""
        siblings: dict[Kind, list[ir.Fragment]] = {}
        for fragment in ir.fragments(f):
            if fragment.is_user and fragment.call_counter is not None:
                siblings.setdefault(_kind(fragment), []).append(fragment)
        shared: dict[ir.Fragment, list[tuple[ir.Fragment, int]]] = {}
        for group in siblings.values():
            first, carried = _first_and_carried(group)
            for position in carried:
                maker = ir.producer(first.inputs[position])
                if isinstance(maker, ir.Fragment) and not maker.is_user:
                    if len(ir.users(first.inputs[position])) > 1:
                        shared.setdefault(maker, []).append((first, position))
        numbers = itertools.count()
        for maker, uses in shared.items():
            _copy_for(maker, uses, numbers)


def _kind(fragment: ir.Fragment) -> Kind:
    return (
        fragment.mesh,
        tuple(fragment.origins),
        fragment.split_keep_transferred,
        fragment.split_drop_transferred,
        fragment.is_remat,
    )


def _first_and_carried(group: list[ir.Fragment]) -> tuple[ir.Fragment, list[int]]:
    """The fragment of the first microbatch, and the positions that others take from their own kind."""
    members = set(group)
    first = min(group, key=lambda fragment: fragment.call_counter)
    carried = {
        i
        for fragment in group
        if fragment != first and len(fragment.inputs) == len(first.inputs)
        for i, value in enumerate(fragment.inputs)
        if ir.producer(value) in members
    }
    return first, sorted(carried)


def _copy_for(maker: ir.Fragment, uses: list[tuple[ir.Fragment, int]], numbers: Iterator[int]) -> None:
    """Returns a copy of a value for each of the uses, which then read it."""
    returned = maker.returned
    copies = []
    for user, operand in uses:
        value = returned[ir.result_index(user.inputs[operand])]
        copies.append(
            ir.create(
                "stablehlo.optimization_barrier", [value], [value.type], ir.at_end(maker.body),
                {START: ir.i64(next(numbers))}, value.location,
            ).results[0]
        )  # fmt: skip
    maker.returned = returned + copies
    types = [r.type for r in maker.results]
    rebuilt = ir.rebuild(maker, list(maker.inputs), types + [user.inputs[i].type for user, i in uses])
    ir.replace(maker, list(rebuilt.results)[: len(types)])
    for (user, operand), result in zip(uses, list(rebuilt.results)[len(types) :], strict=True):
        ir.set_operand(user, operand, result)


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
    fragment = ir.make_fragment(
        mesh,
        inputs,
        [v.type for v, where in copied.items() for _ in where],
        ir.at_end(f.body),
        lambda args, _: [arg for arg, where in zip(args, copied.values()) for _ in where],
        inferred_by=["uniquify"],
        location=f.terminator.location,
    )
    positions = [i for where in copied.values() for i in where]
    for i, result in zip(positions, fragment.results, strict=True):
        ir.set_operand(f.terminator, i, result)
