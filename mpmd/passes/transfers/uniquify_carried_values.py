"""mpmd-uniquify-carried-values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mpmd import ir
from mpmd.passes.bases import FunctionPass

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
    made = ir.rebuild(maker, list(maker.inputs), types + [user.inputs[i].type for user, i in uses])
    ir.replace(maker, list(made.results)[: len(types)])
    for (user, operand), result in zip(uses, list(made.results)[len(types) :], strict=True):
        ir.set_operand(user, operand, result)
