"""mpmd-hoist-gathers."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.shared_bodies import put_back
from mpmd.passes.fragments.bodies import body_keys
from mpmd.passes.propagation import shardings
from mpmd.passes.propagation.convert_sdy_shardings_to_mpmd_types import ConvertSdyShardingsToMpmdTypes
from mpmd.passes.propagation.propagate_shardings import PropagateShardings
from mpmd.sharding.gathers import axes_needed_whole
from mpmd.sharding.inside import Split, split_axes, split_of, splits_inside

NAME = "hoist_gathers"
_NUMBER = "mpmd.hoist_number"


class HoistGathers(ModulePass):
    """Gathers a weight once that the fragments of a mesh need whole.

        main(w {sharding = [{"data"}, {}]}, ..):
        f0 = m1["f"] cc=0 (x0, w) { dot x0 w };  f1 = m1["f"] cc=1 (x1, w) { dot x1 w }
        ->
        g = m1[] by=hoist_gathers out_shardings=[[{}, {}]] (w) { w }
        f0 = m1["f"] cc=0 (x0, g) { dot x0 w };  f1 = m1["f"] cc=1 (x1, g) { dot x1 w }

    Rows of `x0` lie over "data", so that each fragment would gather `w` along it, or move rows.  The gather comes
    right before the first of them; the whole weight is freed after the last.  Before Shardy runs, as it would
    let weights that are split decide how activations are.

    Requires: shardings are attributes of arguments; microbatches are numbered.
    Ensures: an argument is read whole along an axis only by fragments of which every use needs it so, if
        only rows were split along it.
    Cost: one more propagation, if weights and rows are split along one axis.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Propagates in a copy whose weights are whole, and looks there at how they are used."""
        functions = [f for f in ir.funcs(module) if f.is_mpmd and not f.is_external]
        for f in functions if len(functions) == 1 else []:
            weights, rows = _weights(f), _arguments_of_rows(f)
            axes = frozenset().union(*(split_axes(_given(f, w)) for w in weights))
            if not axes or not _splits_more(f, axes, rows):
                continue
            for number, fragment in enumerate(ir.fragments(f)):
                ir.put(fragment, _NUMBER, ir.i64(number))
            needed = _needed(module, f, weights, rows)
            for fragment in ir.fragments(f):
                ir.put(fragment, _NUMBER, None)
            _hoist(f, needed)


_Uses = dict[tuple[int, frozenset[str]], list[tuple[int, int]]]
"""For an argument and the axes along which it is needed whole: its uses, by fragment and operand."""


def _weights(f: ir.Func) -> list[int]:
    """The arguments that fragments of several microbatches read."""
    found = []
    for i, arg in enumerate(f.args):
        counters = {
            op.call_counter for op in ir.users(arg) if isinstance(op, ir.Fragment) and op.call_counter is not None
        }
        if len(counters) > 1:
            found.append(i)
    return found


def _given(f: ir.Func, position: int) -> Split:
    """How the user splits an argument."""
    kind = f.args[position].type
    sharding = f.arg_attribute(position, shardings.ARGUMENT)
    return split_of(sharding, len(kind.shape)) if isinstance(kind, ir.MeshTensor) else ()


def _splits_more(f: ir.Func, axes: frozenset[str], rows: Iterable[int]) -> bool:
    """Whether some of the axes split rows of the batch, or are mentioned in a fragment."""
    if any(axes & split_axes(_given(f, i)) for i in rows):
        return True
    texts = (str(attribute) for _, _, attribute in shardings.inside(f))
    return any(f'"{axis}"' in text for text in texts for axis in axes)


def _needed(module: ir.Module, f: ir.Func, weights: Sequence[int], of_rows: set[int]) -> _Uses:
    """What needs weights whole, by a propagation in which only rows of the batch are split."""
    trial = ir.clone(module)
    (copy,) = (g for g in ir.funcs(trial) if g.symbol == f.symbol)
    for attribute, values in (("arg_attrs", copy.args), ("res_attrs", copy.returned)):
        dicts = ir.attribute_dicts(copy, attribute, len(values))
        for i, of_value in enumerate(dicts):
            if attribute == "res_attrs" or i not in of_rows:
                of_value.pop(shardings.ARGUMENT, None)
        ir.put_attribute_dicts(copy, attribute, dicts)
    PropagateShardings(share=True).run(trial)
    ConvertSdyShardingsToMpmdTypes().run(trial)
    (copy,) = (g for g in ir.funcs(trial) if g.symbol == f.symbol)
    given = {copy.args[i]: (i, _given(f, i)) for i in weights}
    groups = _groups(x for x in ir.fragments(copy) if _NUMBER in x.attributes)
    rows = _axes_of_rows(groups)
    symbols = ir.symbol_table(trial)
    found: _Uses = collections.defaultdict(list)
    for group in groups:
        axes = rows.get(group[0].mesh, frozenset())
        model: ir.Fragment = ir.clone(group[0], ir.after(group[0]))
        put_back(model, symbols)
        splits = splits_inside(model)
        for position, (arg, value) in enumerate(zip(model.args, model.inputs)):
            if value in given:
                weight, split = given[value]
                whole = axes_needed_whole(arg, split, axes, splits)
                for fragment in group if whole else ():
                    number = int(ir.IntegerAttr(fragment.attributes[_NUMBER]).value)
                    found[weight, whole].append((number, position))
        ir.erase(model)
    return found


def _groups(fragments: Iterable[ir.Fragment]) -> list[list[ir.Fragment]]:
    """Named work of microbatches in kinds, each of which has one body and reads the same arguments."""

    def signature(fragment: ir.Fragment) -> Hashable:
        own = tuple(v if ir.producer(v) is None else v.type for v in fragment.inputs)
        return (fragment.mesh, own, tuple(v.type for v in fragment.results))

    some = [x for x in fragments if x.is_user and x.call_counter is not None]
    found: dict[Hashable, list[ir.Fragment]] = {}
    for fragment, key in zip(some, body_keys(some, signature)):
        found.setdefault(key, []).append(fragment)
    return list(found.values())


def _rows(groups: Iterable[Sequence[ir.Fragment]]) -> dict[ir.Value, str]:
    """What microbatches take from outside, each its own: rows of the batch; and the mesh that reads it."""
    found: dict[ir.Value, str] = {}
    for group in groups:
        for operands in zip(*(fragment.inputs for fragment in group)):
            if len(set(operands)) > 1 and all(map(_is_from_outside, operands)):
                found.update(dict.fromkeys(operands, group[0].mesh))
    return found


def _is_from_outside(value: ir.Value) -> bool:
    """Whether no microbatch computes a value."""
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        op = ir.producer(op.tensor)
    return not isinstance(op, ir.Fragment) or op.call_counter is None


def _arguments_of_rows(f: ir.Func) -> set[int]:
    """The arguments of which the rows of the batch are computed."""
    todo, seen = list(_rows(_groups(ir.fragments(f)))), set[ir.Value]()
    while todo:
        value = todo.pop()
        op = ir.producer(value)
        if value not in seen and op is not None:
            todo += ir.read_by(op)
        seen.add(value)
    return {ir.arg_index(value) for value in seen if ir.producer(value) is None}


def _axes_of_rows(groups: Iterable[Sequence[ir.Fragment]]) -> dict[str, frozenset[str]]:
    """For each mesh the axes that split the rows of the batch."""
    found: dict[str, frozenset[str]] = {}
    for value, mesh in _rows(groups).items():
        if isinstance(value.type, ir.MeshTensor):
            found[mesh] = found.get(mesh, frozenset()) | split_axes(split_of(value.type.sharding, 0))
    return found


def _hoist(f: ir.Func, needed: _Uses) -> None:
    """Inserts the gathers: one fragment for all weights that a fragment needs first."""
    fragments = ir.fragments(f)
    firsts: dict[int, list[tuple[int, frozenset[str]]]] = {}
    for key, uses in needed.items():
        if len(uses) > 1:
            firsts.setdefault(min(uses)[0], []).append(key)
    for first, keys in sorted(firsts.items()):
        weights = [f.args[weight] for weight, _ in keys]
        made = ir.make_fragment(
            fragments[first].mesh, weights, [w.type for w in weights], ir.before(fragments[first]),
            lambda args, _: args, inferred_by=[NAME], location=fragments[first].location,
        )  # fmt: skip
        whole = [_without(shardings.of_value(f.args[weight], f), axes) for weight, axes in keys]
        shardings.write(made, "out_shardings", whole)
        for key, value in zip(keys, made.results):
            for number, position in needed[key]:
                ir.set_operand(fragments[number], position, value)


def _without(sharding: shardings.Sharding, axes: frozenset[str]) -> shardings.Sharding:
    """A closed sharding, along none of the axes."""
    old = ir.sdy.TensorShardingAttr(sharding)
    dims = [
        ir.sdy.DimensionShardingAttr.get(
            [axis for axis in ir.sdy.DimensionShardingAttr(dim).axes if ir.sdy.AxisRefAttr(axis).name not in axes],
            is_closed=True,
        )
        for dim in old.dimension_shardings
    ]
    return ir.sdy.TensorShardingAttr.get(old.mesh_or_ref, dims)
