"""How values would be split if only some arguments were: a propagation in a copy of the program."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.calls.bodies import put_back_bodies
from mpmd.passes.fragments.splitting import body_keys
from mpmd.passes.propagation.propagate_shardings import NUMBER, REPRESENTATIVES, without_copies
from mpmd.passes.verify import propagation_problem
from mpmd.sharding import shardings
from mpmd.sharding.inside import PROPAGATE, number_ops, splits_inside
from mpmd.sharding.shardings import Split, axes_of, sdy_meshes, split_axes, split_of
from mpmd.support import diagnostics

Layout = tuple[list[ir.Type], list[ir.Type]]
"""The types of a fragment's operands and results, with their shardings."""


class Trial:
    """How the values of a function would be split if some axes split none of its arguments and results.

    Args:
        f: the function; it does not change, nor does its module.
        without: the axes.
        but_in: the arguments that they split as given.
    """

    def __init__(self, f: ir.Func, without: frozenset[str], but_in: Iterable[int]) -> None:
        self._models: dict[ir.Fragment, ir.Fragment] = {}
        self._module = ir.clone(ir.module_of(f))
        copy = ir.symbol_table(self._module)[f.symbol]
        _drop_axes(copy, without, set(but_in))
        # Shardy propagates over some fragments of each kind; `numbers` has the one that represents each op.
        numbers = without_copies(copy, REPRESENTATIVES)
        put_back_bodies(self._module)
        if problem := propagation_problem(self._module):
            diagnostics.warning(
                "gradients are reduced in each microbatch and weights gathered where they are used: how the "
                f"step is split cannot be tried out\n  {problem}",
                f.location,
            )
            return
        for fragment in ir.fragments(copy):
            number_ops(fragment)
        ir.run_mlir(PROPAGATE, self._module)
        models = {
            int(ir.IntegerAttr(op.attributes[NUMBER]).value): op
            for op in ir.fragments(ir.symbol_table(self._module)[f.symbol])
            if NUMBER in op.attributes
        }
        for op, number in zip(ir.ops(f), numbers, strict=True):
            if isinstance(op, ir.Fragment) and number in models:
                self._models[op] = models[number]

    @property
    def fragments(self) -> list[ir.Fragment]:
        return list(self._models)

    def layout(self, fragment: ir.Fragment) -> Layout:
        model = self._models[fragment]
        return (
            _with_shardings(fragment.inputs, shardings.read(model, "in_shardings")),
            _with_shardings(fragment.results, shardings.read(model, "out_shardings")),
        )

    def splits(self, fragment: ir.Fragment, body: ir.Fragment) -> dict[ir.Value, Split]:
        """The splits of the values in a body that is a fragment's, without calls."""
        return splits_inside(self._models[fragment], body, self.layout(fragment)[0])


def _drop_axes(f: ir.Func, axes: frozenset[str], but_in: set[int]) -> None:
    """Takes axes from the shardings of a function's arguments, but some, and results."""
    for attribute, values in (("arg_attrs", f.args), ("res_attrs", f.returned)):
        dicts = ir.attribute_dicts(f, attribute, len(values))
        for i, of_value in enumerate(dicts):
            given = of_value.get(shardings.ARGUMENT)
            if given is not None and (attribute == "res_attrs" or i not in but_in):
                of_value[shardings.ARGUMENT] = without_axes(given, axes, is_closed=False)
        ir.put_attribute_dicts(f, attribute, dicts)


def _with_shardings(values: Sequence[ir.Value], per_value: Sequence[shardings.Sharding]) -> list[ir.Type]:
    """The types of values of which all have shardings, or none has."""
    types = [value.type for value in values]
    return [
        ir.MeshTensor.get(kind.mesh, kind.tensor, sharding, kind.memory_kind)
        for kind, sharding in zip(types, per_value or [None] * len(types), strict=True)
    ]


def without_axes(sharding: shardings.Sharding, axes: frozenset[str], is_closed: bool) -> shardings.Sharding:
    """A sharding along none of some axes."""
    old = ir.sdy.TensorShardingAttr(sharding)
    dims = [
        ir.sdy.DimensionShardingAttr.get(
            [
                axis
                for axis in ir.sdy.DimensionShardingAttr(dim).axes
                if ir.sdy.AxisRefAttr(axis).name not in axes
            ],
            is_closed,
        )
        for dim in old.dimension_shardings
    ]
    return ir.sdy.TensorShardingAttr.get(old.mesh_or_ref, dims)


def given_split(f: ir.Func, position: int) -> Split:
    kind = f.args[position].type
    sharding = f.arg_attribute(position, shardings.ARGUMENT)
    return split_of(sharding, len(kind.shape)) if isinstance(kind, ir.MeshTensor) else ()


def kinds_of_work(fragments: Iterable[ir.Fragment]) -> list[list[ir.Fragment]]:
    """Named work of microbatches in kinds: fragments of one kind have one body and read the same weights."""
    some = [x for x in fragments if x.is_user and x.call_counter is not None]
    microbatches = collections.defaultdict[ir.Value, set[int | None]](set)
    for fragment in some:
        for value in fragment.inputs:
            microbatches[value].add(fragment.call_counter)

    def is_weight(value: ir.Value) -> bool:
        return _is_from_outside(value) and len(microbatches[value]) > 1

    def signature(fragment: ir.Fragment) -> Hashable:
        own = tuple(v if is_weight(v) else v.type for v in fragment.inputs)
        return (fragment.mesh, own, tuple(v.type for v in fragment.results))

    kinds: dict[Hashable, list[ir.Fragment]] = {}
    for fragment, key in zip(some, body_keys(some, signature)):
        kinds.setdefault(key, []).append(fragment)
    return list(kinds.values())


def rows(groups: Iterable[Sequence[ir.Fragment]]) -> list[tuple[ir.Fragment, int]]:
    """The operands that microbatches take from outside, each its own: rows of the batch."""
    places = []
    for group in groups:
        for position, operands in enumerate(zip(*(fragment.inputs for fragment in group))):
            if len(set(operands)) > 1 and all(map(_is_from_outside, operands)):
                places += [(fragment, position) for fragment in group]
    return places


def _is_from_outside(value: ir.Value) -> bool:
    op = ir.producer(transferred(value))
    return not isinstance(op, ir.Fragment) or op.call_counter is None


def transferred(value: ir.Value) -> ir.Value:
    """The value that a transfer, or several, take from another mesh."""
    while isinstance(op := ir.producer(value), ir.Transfer):
        value = op.tensor
    return value


def arguments_of_rows(f: ir.Func) -> set[int]:
    """The arguments that rows of the batch are computed from."""
    todo = [fragment.inputs[position] for fragment, position in rows(kinds_of_work(ir.fragments(f)))]
    seen = set[ir.Value]()
    while todo:
        value = todo.pop()
        op = ir.producer(value)
        if value not in seen and op is not None:
            todo += ir.read_by(op)
        seen.add(value)
    return {ir.arg_index(value) for value in seen if ir.producer(value) is None}


def axes_of_rows(f: ir.Func) -> frozenset[str]:
    """The axes along which the user splits arguments that rows are computed from."""
    return frozenset().union(*(split_axes(given_split(f, i)) for i in arguments_of_rows(f)))


def is_one_mesh(f: ir.Func) -> bool:
    """Whether all meshes have the axes of the one that shardings name, which propagation uses."""
    meshes = list(_meshes_with_axes(f).values())
    return len(meshes) == 1 and all(axes_of(mesh) == axes_of(meshes[0]) for mesh in f.topology.values())


def mesh_of_shardings(f: ir.Func) -> str:
    """How shardings refer to their mesh, if all meshes are one."""
    (name,) = _meshes_with_axes(f)
    return str(ir.FlatSymbolRefAttr.get(name, ir.context()))


def _meshes_with_axes(f: ir.Func) -> dict[str, ir.sdy.MeshAttr]:
    return {name: mesh for name, mesh in sdy_meshes(ir.module_of(f)).items() if axes_of(mesh)}
