"""Gathers of weights, hoisted out of the microbatches: once per step and mesh.

A weight that is split where it lies and needed whole where it is used would be gathered by each fragment that
reads it.  Here one fragment gathers it, in the dtype in which it is used, and the others read the result.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.bodies import called_bodies, numbered, put_back, share_bodies
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
from mpmd.sharding.gathers import axes_needed_whole, cast_of
from mpmd.sharding.partial import tensor
from mpmd.sharding.shardings import split_axes

GATHERING = "hoist_gathers"


class HoistGathers(FunctionPass):
    """Gathers a weight once that the fragments of a mesh need whole.

        main(w {sharding = [{"data"}, {}]}, ..):
        f0 = m1["f"] cc=0 (x0, w) { dot x0 w };  f1 = m1["f"] cc=1 (x1, w) { dot x1 w }
        ->
        g = m1[] by=hoist_gathers out_shardings=[[{}, {}]] (w) { w }
        f0 = m1["f"] cc=0 (x0, g) { dot x0 w };  f1 = m1["f"] cc=1 (x1, g) { dot x1 w }

    Rows of `x0` lie over "data", so that each fragment would gather `w` along it, or move rows.  The gather
    comes right before the first of them; the whole weight is freed after the last.  Before Shardy runs, as
    it would let weights that are split decide how activations are.  A weight that is used as bf16 alone is
    cast first, as elements are gathered alike before and after: half of the bytes.

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


_Key = tuple[ir.Value, frozenset[str]]
"""A weight, and the axes along which it is needed whole."""


@dataclasses.dataclass(eq=False)
class _Alike:
    """Fragments with one body that read the same weights.

    Attributes:
        fragments: all of them.
        needed: by position, the weights to gather.
        casts: by position, the types to which the body converts them before it does anything else.
    """

    fragments: Sequence[ir.Fragment]
    needed: dict[int, _Key]
    casts: dict[int, ir.Type]


def _weights(f: ir.Func) -> dict[ir.Value, int]:
    """The arguments that fragments of several microbatches read, or read transferred: value and argument."""
    weights = {}
    for value in (*f.args, *(op.result for op in ir.ops(f.body) if isinstance(op, ir.Transfer))):
        readers = [op for op in ir.users(value) if isinstance(op, ir.Fragment)]
        source = transferred(value)
        if ir.producer(source) is None and len({op.call_counter for op in readers} - {None}) > 1:
            weights[value] = ir.arg_index(source)
    return weights


def _needed(f: ir.Func, weights: Mapping[ir.Value, int], rows: frozenset[str], trial: Trial) -> list[_Alike]:
    """What needs weights whole, given the splits if they are."""
    symbols = ir.symbol_table(ir.module_of(f))
    kinds = []
    for group in kinds_of_work(trial.fragments):
        model: ir.Fragment = ir.clone(group[0], ir.after(group[0]))
        put_back(model, symbols)
        splits, kind = trial.splits(group[-1], model), _Alike(group, {}, {})
        for position, values in enumerate(zip(*(fragment.inputs for fragment in group))):
            value, *others = dict.fromkeys(values)
            # One gather serves a group only if all of its fragments read one weight here.
            if value in weights and not others:
                arg = model.args[position]
                axes = axes_needed_whole(arg, given_split(f, weights[value]), rows, splits)
                if axes:
                    kind.needed[position] = value, axes
                if (cast := cast_of(arg)) is not None:
                    kind.casts[position] = cast.kind
        kinds.append(kind)
        ir.erase(model)
    return kinds


def _hoist(f: ir.Func, weights: Mapping[ir.Value, int], kinds: Sequence[_Alike]) -> None:
    """Inserts the gathers: one fragment for all weights that a fragment needs first."""
    place = {fragment: i for i, fragment in enumerate(ir.fragments(f))}
    uses: dict[_Key, list[tuple[ir.Fragment, _Alike, int]]] = collections.defaultdict(list)
    for kind in kinds:
        for position, key in kind.needed.items():
            uses[key] += [(fragment, kind, position) for fragment in kind.fragments]
    firsts: dict[ir.Fragment, list[_Key]] = {}
    for key, of_key in uses.items():
        # With one reader, the gather in its fragment is once per step already.
        if len(of_key) > 1:
            firsts.setdefault(min((x for x, _, _ in of_key), key=place.__getitem__), []).append(key)
    gathered: dict[_Key, ir.Value] = {}
    for first in sorted(firsts, key=place.__getitem__):
        wanted = [
            _Whole(
                value,
                shardings.of_value(f.args[weights[value]], f),
                axes,
                _common([kind.casts.get(position) for _, kind, position in uses[value, axes]]),
            )
            for value, axes in firsts[first]
        ]
        gathered.update(zip(firsts[first], _gather(first, wanted)))
    for kind in kinds:
        _take(kind, {i: gathered[key] for i, key in kind.needed.items() if key in gathered})


def _common(casts: Sequence[ir.Type | None]) -> ir.Type | None:
    """The type to which all uses of a weight convert it."""
    types = {cast and cast.element_type for cast in casts}
    return casts[0] if len(types) == 1 else None


def _take(kind: _Alike, gathered: Mapping[int, ir.Value]) -> None:
    """Makes the fragments of a kind read gathered weights, some of which are cast."""
    first = kind.fragments[0]
    inputs = list(first.inputs)
    cast = [i for i, value in gathered.items() if value.type.tensor != inputs[i].type.tensor]
    if not cast:
        for fragment in kind.fragments:
            for i, value in gathered.items():
                ir.set_operand(fragment, i, value)
        return
    # A cast that moves out changes the body: once, in a model, from which all fragments of the kind take it.
    model: ir.Fragment = ir.clone(first, ir.after(first))
    shares = bool(called_bodies(model))
    put_back(model, ir.symbol_table(ir.module_of(model)))
    for i in cast:
        model_cast = cast_of(model.args[i])
        assert model_cast is not None
        model_cast.move_out()
        ir.set_operand(model, i, gathered[i])
    if shares:
        (model,) = share_bodies([model], numbered(ir.module_of(model)))
    for fragment in kind.fragments:
        copy: ir.Fragment = ir.clone(model, ir.before(fragment))
        for i, value in enumerate(fragment.inputs):
            ir.set_operand(copy, i, gathered.get(i, value))
        own = dict(fragment.attributes.items())
        for name in dict.fromkeys((*own, *(name for name, _ in copy.attributes.items()))):
            ir.put(copy, name, own.get(name))
        ir.replace(fragment, list(copy.results))
    ir.erase(model)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A weight to be gathered: how it is split, the axes along which it shall not be, and as what type."""

    value: ir.Value
    sharding: shardings.Sharding
    axes: frozenset[str]
    cast: ir.Type | None


def _gather(first: ir.Fragment, wanted: Sequence[_Whole]) -> Sequence[ir.Value]:
    """Weights with other shardings, right before a fragment of their mesh; cast before they are gathered."""

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
        values = list(args)
        for i, (value, whole) in enumerate(zip(args, wanted)):
            if whole.cast is not None:
                kind = tensor(value.type.shape, whole.cast)
                values[i] = ir.create("stablehlo.convert", [value], [kind], inside).results[0]
        return values

    types = []
    for whole in wanted:
        kind = whole.value.type
        narrow = kind.tensor if whole.cast is None else tensor(kind.shape, whole.cast)
        types.append(ir.MeshTensor.get(kind.mesh, narrow, None, kind.memory_kind))
    fragment = ir.make_fragment(
        first.mesh, [x.value for x in wanted], types, ir.before(first), body,
        inferred_by=[GATHERING], location=first.location,
    )  # fmt: skip
    shardings.write(
        fragment, "out_shardings", [without_axes(x.sharding, x.axes, is_closed=True) for x in wanted]
    )
    return list(fragment.results)
