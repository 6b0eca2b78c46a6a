"""mpmd-hoist-gathers."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.shared_bodies import put_back
from mpmd.passes.propagation.trial import (
    Trial,
    arguments_of_rows,
    axes_of_rows,
    given_split,
    is_one_mesh,
    kinds_of_work,
    transferred,
    without_axes,
)
from mpmd.sharding import shardings
from mpmd.sharding.gathers import axes_needed_whole
from mpmd.sharding.splits import split_axes

NAME = "hoist_gathers"


class HoistGathers(FunctionPass):
    """Gathers a weight once that the fragments of a mesh need whole.

        main(w {sharding = [{"data"}, {}]}, ..):
        f0 = m1["f"] cc=0 (x0, w) { dot x0 w };  f1 = m1["f"] cc=1 (x1, w) { dot x1 w }
        ->
        g = m1[] by=hoist_gathers out_shardings=[[{}, {}]] (w) { w }
        f0 = m1["f"] cc=0 (x0, g) { dot x0 w };  f1 = m1["f"] cc=1 (x1, g) { dot x1 w }

    Rows of `x0` lie over "data", so that each fragment would gather `w` along it, or move rows.  The gather
    comes right before the first of them; the whole weight is freed after the last.  Before Shardy runs, as
    it would let weights that are split decide how activations are.

    Requires: shardings are attributes of arguments; microbatches are numbered.
    Ensures: an argument, or one transferred, is read whole along an axis only by fragments whose every use
        needs it so, if only rows were split along it.
    Cost: one more propagation, if weights and rows are split along one axis.
    Source: ours; torchtitan schedules it as UNSHARD.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Propagates in a copy whose weights are whole, and looks there at how they are used."""
        weights, rows = _weights(f), axes_of_rows(f)
        if is_one_mesh(f) and any(rows & split_axes(given_split(f, w)) for w in weights.values()):
            before = ir.edits()
            trial = Trial(f, rows, arguments_of_rows(f))
            needed = _needed(f, weights, rows, trial)
            ir.forget_edits(before)  # of copies
            _hoist(f, weights, needed)


_Uses = dict[tuple[ir.Value, frozenset[str]], list[tuple[ir.Fragment, int]]]
"""For a weight and the axes along which it is needed whole: the operands that it is."""


def _weights(f: ir.Func) -> dict[ir.Value, int]:
    """The arguments that fragments of several microbatches read, or read transferred: value and argument."""
    found = {}
    for value in (*f.args, *(op.result for op in ir.ops(f.body) if isinstance(op, ir.Transfer))):
        readers = [op for op in ir.users(value) if isinstance(op, ir.Fragment)]
        source = transferred(value)
        if ir.producer(source) is None and len({op.call_counter for op in readers} - {None}) > 1:
            found[value] = ir.arg_index(source)
    return found


def _needed(f: ir.Func, weights: Mapping[ir.Value, int], rows: frozenset[str], trial: Trial) -> _Uses:
    """What needs weights whole, given the splits if they are."""
    symbols = ir.symbol_table(ir.module_of(f))
    needed: _Uses = collections.defaultdict(list)
    for group in kinds_of_work(trial.fragments):
        model: ir.Fragment = ir.clone(group[0], ir.after(group[0]))
        put_back(model, symbols)
        splits = trial.splits(group[-1], model)
        for position, values in enumerate(zip(*(fragment.inputs for fragment in group))):
            for fragment, value in zip(group, values):
                if value in weights:
                    split = given_split(f, weights[value])
                    axes = axes_needed_whole(model.args[position], split, rows, splits)
                    if axes:
                        needed[value, axes].append((fragment, position))
        ir.erase(model)
    return needed


def _hoist(f: ir.Func, weights: Mapping[ir.Value, int], needed: _Uses) -> None:
    """Inserts the gathers: one fragment for all weights that a fragment needs first."""
    place = {fragment: i for i, fragment in enumerate(ir.fragments(f))}
    firsts: dict[ir.Fragment, list[tuple[ir.Value, frozenset[str]]]] = {}
    for key, uses in needed.items():
        if len(uses) > 1:
            firsts.setdefault(min((x for x, _ in uses), key=place.__getitem__), []).append(key)
    for first in sorted(firsts, key=place.__getitem__):
        whole = [
            without_axes(shardings.of_value(f.args[weights[value]], f), axes, is_closed=True)
            for value, axes in firsts[first]
        ]
        gathered = _gather(first, [value for value, _ in firsts[first]], whole)
        for key, value in zip(firsts[first], gathered):
            for fragment, position in needed[key]:
                ir.set_operand(fragment, position, value)


def _gather(
    first: ir.Fragment, values: Sequence[ir.Value], whole: Sequence[shardings.Sharding]
) -> Sequence[ir.Value]:
    """Weights with other shardings, right before a fragment of their mesh."""
    made = ir.make_fragment(
        first.mesh, values, [v.type for v in values], ir.before(first), lambda args, _: args,
        inferred_by=[NAME], location=first.location,
    )  # fmt: skip
    shardings.write(made, "out_shardings", whole)
    return list(made.results)
