"""mpmd-hoist-gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.calls.shared_bodies import put_back
from mpmd.passes.fragments.bodies import body_keys
from mpmd.sharding.gathers import axes_needed_whole
from mpmd.sharding.inside import Split, split_axes, split_of, splits_inside
from mpmd.sharding.reduction import sharding_of, without

NAME = "hoist_gathers"


class HoistGathers(FunctionPass):
    """Gathers a value once that several fragments need whole.

        f0 = m1["f"] cc=0 (x0, w<[{"data"}, {}]>) { dot x0 w };  f1 = m1["f"] cc=1 (x1, w<..>) { dot x1 w }
        ->
        g = m1[] by=hoist_gathers (w) { w }: <[{}, {}]>
        f0 = m1["f"] cc=0 (x0, g) { dot x0 w };  f1 = m1["f"] cc=1 (x1, g) { dot x1 w }

    Rows of `x0` lie over "data", so that each fragment would gather `w` along it.  The gather comes right before
    the first of them; the whole value is freed after the last.

    Requires: shardings are part of types.
    Ensures: a value is read whole along an axis only by fragments of which every use needs it so.
    Cost: Shardy's propagation once for each distinct body.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Finds the readers of each value, and gives them the gathered one."""
        uses = _uses(f)
        readers: dict[tuple[ir.Value, frozenset[str]], list[tuple[ir.Fragment, int]]] = {}
        for use in uses:
            readers.setdefault((use.value, use.axes), []).append((use.fragment, use.position))
        gathers: dict[ir.Fragment, list[tuple[ir.Value, ir.MeshTensor]]] = {}
        sites: dict[tuple[ir.Value, frozenset[str]], tuple[ir.Fragment, int]] = {}
        for (value, axes), found in readers.items():
            if len(found) < 2:
                continue
            first = found[0][0]
            wanted = gathers.setdefault(first, [])
            sites[value, axes] = first, len(wanted)
            wanted.append((value, _whole_along(value.type, axes)))
        made = {first: _gather(first, wanted) for first, wanted in gathers.items()}
        for key, (first, number) in sites.items():
            for fragment, position in readers[key]:
                ir.set_operand(fragment, position, made[first].results[number])


@dataclasses.dataclass(frozen=True)
class _Use:
    """A fragment that gathers one of its operands along some axes."""

    value: ir.Value
    axes: frozenset[str]
    fragment: ir.Fragment
    position: int


def _uses(f: ir.Func) -> list[_Use]:
    """In the order of the program: what microbatches gather."""
    some = [x for x in ir.fragments(f) if x.is_user and x.call_counter is not None]
    groups: dict[Hashable, list[ir.Fragment]] = {}
    for fragment, key in zip(some, body_keys(some, _signature)):
        groups.setdefault(key, []).append(fragment)
    rows = _axes_of_rows(groups.values())
    symbols = ir.symbol_table(ir.module_of(f))
    found: dict[ir.Fragment, list[_Use]] = {}
    for group in groups.values():
        axes = rows.get(group[0].mesh, frozenset())
        weights = {
            position: axes
            for position in _shared(group)
            if axes & split_axes(_split(group[0].inputs[position]))
        }
        if not weights:
            continue
        model: ir.Fragment = ir.clone(group[0], ir.after(group[0]))
        put_back(model, symbols)
        splits = splits_inside(model, weights)
        for position in weights:
            needed = axes_needed_whole(model.args[position], _split(model.inputs[position]), axes, splits)
            for fragment in group if needed else ():
                found.setdefault(fragment, []).append(
                    _Use(fragment.inputs[position], needed, fragment, position)
                )
        ir.erase(model)
    return [use for fragment in some for use in found.get(fragment, ())]


def _signature(fragment: ir.Fragment) -> Hashable:
    return (fragment.mesh, *(v.type for v in (*fragment.inputs, *fragment.results)))


def _shared(group: Sequence[ir.Fragment]) -> list[int]:
    """The operands that are one value in all microbatches: weights."""
    operands = [list(fragment.inputs) for fragment in group]
    if len(group) < 2:
        return []
    return [p for p, value in enumerate(operands[0]) if all(other[p] == value for other in operands)]


def _axes_of_rows(groups: Iterable[Sequence[ir.Fragment]]) -> dict[str, frozenset[str]]:
    """For each mesh the axes that split what microbatches take from outside, each its own: rows of the batch."""
    found: dict[str, frozenset[str]] = {}
    for group in groups:
        shared = set(_shared(group))
        for operands in zip(*(fragment.inputs for fragment in group)):
            if len(group) > 1 and all(map(_is_from_outside, operands)):
                position = list(group[0].inputs).index(operands[0])
                if position not in shared:
                    axes = split_axes(_split(operands[0]))
                    found[group[0].mesh] = found.get(group[0].mesh, frozenset()) | axes
    return found


def _is_from_outside(value: ir.Value) -> bool:
    """Whether no microbatch computes a value."""
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        op = ir.producer(op.tensor)
    return not isinstance(op, ir.Fragment) or op.call_counter is None


def _split(value: ir.Value) -> Split:
    kind = value.type
    return split_of(kind.sharding, len(kind.shape)) if isinstance(kind, ir.MeshTensor) else ()


def _whole_along(kind: ir.MeshTensor, axes: frozenset[str]) -> ir.MeshTensor:
    mesh = str(ir.sdy.TensorShardingAttr(kind.sharding).mesh_or_ref)
    split = without(split_of(kind.sharding, len(kind.shape)), tuple(axes))
    sharding = sharding_of(split, mesh) if any(split) else None
    return ir.MeshTensor.get(kind.mesh, kind.tensor, sharding, kind.memory_kind)


def _gather(first: ir.Fragment, wanted: list[tuple[ir.Value, ir.MeshTensor]]) -> ir.Fragment:
    values, kinds = [v for v, _ in wanted], [kind for _, kind in wanted]
    return ir.make_fragment(
        first.mesh, values, kinds, ir.before(first), lambda args, _: args,
        inferred_by=[NAME], location=first.location,
    )  # fmt: skip
