"""How values would be split if only some arguments were: a propagation in a copy of the program."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.fragments.bodies import body_keys
from mpmd.passes.propagation import shardings
from mpmd.passes.propagation.convert_sdy_shardings_to_mpmd_types import ConvertSdyShardingsToMpmdTypes
from mpmd.passes.propagation.propagate_shardings import PropagateShardings
from mpmd.sharding.inside import Split, split_axes, split_of
from mpmd.sharding.shards import axes_of, sdy_meshes
from mpmd.support import diagnostics

_NUMBER = "mpmd.trial_number"

Layout = tuple[list[ir.Type], list[ir.Type]]
"""The types of a fragment's operands and results, with their shardings."""


def layouts(
    module: ir.Module, f: ir.Func, without: frozenset[str], but_in: Iterable[int]
) -> dict[ir.Fragment, Layout]:
    """The layouts of the fragments of a function, if some axes split none of its arguments and results.

    Args:
        module: the function's; it does not change.
        f: the function.
        without: the axes.
        but_in: the arguments that they split as given.
    """
    fragments = ir.fragments(f)
    for number, fragment in enumerate(fragments):
        ir.put(fragment, _NUMBER, ir.i64(number))
    trial = ir.clone(module)
    for fragment in fragments:
        ir.put(fragment, _NUMBER, None)
    copy = ir.symbol_table(trial)[f.symbol]
    kept = set(but_in)
    for attribute, values in (("arg_attrs", copy.args), ("res_attrs", copy.returned)):
        dicts = ir.attribute_dicts(copy, attribute, len(values))
        for i, of_value in enumerate(dicts):
            given = of_value.get(shardings.ARGUMENT)
            if given is not None and (attribute == "res_attrs" or i not in kept):
                of_value[shardings.ARGUMENT] = without_axes(given, without, is_closed=False)
        ir.put_attribute_dicts(copy, attribute, dicts)
    with diagnostics.apart() as reports:
        PropagateShardings(share=True).run(trial)
        ConvertSdyShardingsToMpmdTypes().run(trial)  # transfers may reshard: no pass extracts that here
    if errors := reports.of(diagnostics.Severity.ERROR):
        diagnostics.warning(
            "gradients are reduced in each microbatch and weights gathered where they are used: how the step "
            f"is split cannot be tried out\n  {errors[0].message}",
            f.location,
        )
        return {}
    found = {}
    for fragment in ir.fragments(ir.symbol_table(trial)[f.symbol]):
        if _NUMBER in fragment.attributes:
            number = int(ir.IntegerAttr(fragment.attributes[_NUMBER]).value)
            types = [v.type for v in fragment.inputs], [v.type for v in fragment.results]
            found[fragments[number]] = types
    return found


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
    """How the user splits an argument."""
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
        return ir.producer(value) is None and len(microbatches[value]) > 1

    def signature(fragment: ir.Fragment) -> Hashable:
        own = tuple(v if is_weight(v) else v.type for v in fragment.inputs)
        return (fragment.mesh, own, tuple(v.type for v in fragment.results))

    found: dict[Hashable, list[ir.Fragment]] = {}
    for fragment, key in zip(some, body_keys(some, signature)):
        found.setdefault(key, []).append(fragment)
    return list(found.values())


def rows(groups: Iterable[Sequence[ir.Fragment]]) -> list[tuple[ir.Fragment, int]]:
    """The operands that microbatches take from outside, each its own: rows of the batch."""
    found = []
    for group in groups:
        for position, operands in enumerate(zip(*(fragment.inputs for fragment in group))):
            if len(set(operands)) > 1 and all(map(_is_from_outside, operands)):
                found += [(fragment, position) for fragment in group]
    return found


def _is_from_outside(value: ir.Value) -> bool:
    """Whether no microbatch computes a value."""
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        op = ir.producer(op.tensor)
    return not isinstance(op, ir.Fragment) or op.call_counter is None


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
    meshes = [mesh for mesh in sdy_meshes(ir.module_of(f)).values() if axes_of(mesh)]
    return len(meshes) == 1 and all(axes_of(mesh) == axes_of(meshes[0]) for mesh in f.topology.values())
