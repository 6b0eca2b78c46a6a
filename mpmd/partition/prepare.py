"""Additions of the user's configuration to a traced module: donation and shardings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr

from mpmd import ir
from mpmd.config.config import did_you_mean
from mpmd.config.topology import Topology
from mpmd.errors import ConfigError, collect
from mpmd.partition.tree_differences import first_difference
from mpmd.passes.fragments.editing import in_block_order

_MESH = "mesh"
_BATCH_MARK = "mpmd.microbatches"


def mark_donated(module: ir.Module, donated: Iterable[int]) -> None:
    """Marks arguments of `@main` as donated; JAX's pairs of arguments and results are dropped."""
    main = ir.symbol_table(module)["main"]
    donor = {"jax.buffer_donor": ir.BoolAttr.get(True)}
    of_args = ir.attribute_dicts(main, "arg_attrs", len(main.args))
    for i, of_arg in enumerate(of_args):
        for name in ("tf.aliasing_output", "jax.buffer_donor"):
            of_arg.pop(name, None)
        of_arg.update(donor if i in donated else {})
    ir.put_attribute_dicts(main, "arg_attrs", of_args)


def mark_shardings(
    module: ir.Module,
    inputs: Sequence[Any],
    results: Sequence[Any],
    axes: dict[str, int],
    paths: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Writes the user's shardings on the arguments and results of `@main`.

    Args:
        module: with or without an `sdy.mesh`.
        inputs: for each flat argument a `PartitionSpec`, a `NamedSharding` or None.
        results: likewise for each flat result.
        axes: the axes of the meshes and their sizes.
        paths: pytree path of each argument, and of each result.

    Raises:
        ConfigError: a spec names an axis that no mesh has, or splits a dim unevenly.
    """
    if not any(spec is not None for spec in (*inputs, *results)):
        return
    main = ir.symbol_table(module)["main"]
    mesh = _mesh_of(module, axes)
    problems: list[str] = []
    for names, specs, values, row in (
        ([f"argument {path}" for path in paths[0]], inputs, main.args, "arg_attrs"),
        (paths[1], results, main.returned, "res_attrs"),
    ):
        dicts = ir.attribute_dicts(main, row, len(values))
        for i, (spec, value) in enumerate(zip(specs, values, strict=True)):
            of_spec = spec_problems(spec, value.type.shape, axes)
            problems += [f"{names[i]}: {problem}" for problem in of_spec]
            if spec is not None and not of_spec:
                dicts[i]["sdy.sharding"] = _attribute(mesh, axes_of_dims(spec, len(value.type.shape)))
        ir.put_attribute_dicts(main, row, dicts)
    if problems:
        raise collect(ConfigError, problems, "the shardings cannot be used:")
    for arg, spec in zip(main.args, inputs):
        if spec is not None:
            _shard_within_microbatches(arg, axes_of_dims(spec, len(arg.type.shape)), axes, mesh)


def erase_batch_marks(module: ir.Module) -> None:
    """Removes the marks of how batches are split into microbatches."""
    for op in ir.walk(module, ir.stablehlo.ReshapeOp):
        ir.put(op, _BATCH_MARK, None)


def _shard_within_microbatches(
    arg: ir.Value, dims: list[tuple[str, ...]], axes: dict[str, int], mesh: str
) -> None:
    """Splits every microbatch of a sharded batch over the devices that the batch is split over.

    Without it, propagation shards the dim that counts the microbatches: one device then holds all rows of
    a microbatch, and every device computes all of it.
    """
    for op in ir.users(arg):
        if op.operation.name in ("stablehlo.slice", "stablehlo.convert"):
            _shard_within_microbatches(op.result, dims, axes, mesh)
        if _BATCH_MARK not in op.attributes:
            continue
        batch = ir.IntegerAttr(op.attributes[_BATCH_MARK]).value
        rows, devices = op.result.type.shape[batch + 1], math.prod(axes[name] for name in dims[batch])
        readers = ir.users(op.result)
        if devices > 1 and rows % devices == 0 and readers:
            sharding = {"sharding": _attribute(mesh, [*dims[:batch], (), *dims[batch:]])}
            kind, where = op.result.type, ir.before(in_block_order(readers)[0])
            constraint = ir.create(
                "sdy.sharding_constraint", [op.result], [kind], where, sharding, op.location
            )
            for reader in readers:
                ir.replace_uses_in(op.result, constraint.result, reader)


def _mesh_of(module: ir.Module, axes: dict[str, int]) -> str:
    """The name of a mesh with such axes: a mesh in the module, or else a new one.

    The module may have other meshes from JAX, such as one without axes for random keys.
    """
    sizes = ", ".join(f'"{name}"={size}' for name, size in axes.items())
    wanted = ir.Attribute.parse(f"#sdy.mesh<[{sizes}]>")
    meshes = {
        ir.StringAttr(op.attributes["sym_name"]).value: op.attributes["mesh"]
        for op in module.body.operations
        if op.operation.name == "sdy.mesh"
    }
    for name, mesh in meshes.items():
        if mesh == wanted:
            return str(name)
    name = next(n for i in range(len(meshes) + 1) if (n := f"{_MESH}_{i}" if i else _MESH) not in meshes)
    attributes = {"sym_name": ir.StringAttr.get(name), "mesh": wanted}
    ir.create("sdy.mesh", [], [], ir.at_start(module.body), attributes)
    return name


def spec_problems(spec: Any, shape: Sequence[int], axes: dict[str, int]) -> list[str]:
    """Why a value of some shape cannot be sharded so."""
    if spec is None:
        return []
    if unread := _unread(spec):
        return [unread]
    dims = axes_of_dims(spec, len(shape))
    if len(dims) > len(shape):
        return [f"{spec} is for {len(dims)} dims, but it has {len(shape)}"]
    names = [name for of_dim in dims for name in of_dim]
    problems = [f"{spec} names an unknown axis {n!r}{did_you_mean(n, axes)}" for n in names if n not in axes]
    problems += [f"{spec} names axis {n!r} twice" for n in dict.fromkeys(names) if names.count(n) > 1]
    parts = [math.prod(axes.get(name, 1) for name in of_dim) for of_dim in dims]
    return problems + [
        f"dim {i} of size {size} cannot be split into {count} equal parts, as {spec} requires"
        for i, (size, count) in enumerate(zip(shape, parts))
        if size % count
    ]


def _unread(spec: Any) -> str:
    """Why a sharding cannot be read; "" if it can."""
    if not isinstance(spec, (PartitionSpec, NamedSharding)):
        return f"{spec!r} is neither a jax.sharding.PartitionSpec nor a NamedSharding"
    spec = spec.spec if isinstance(spec, NamedSharding) else spec
    if spec.unreduced or spec.reduced:
        return f"{spec}: arguments and results of a step are whole sums; leave unreduced and reduced out"
    for entry in spec:
        names = entry if isinstance(entry, tuple) else (entry,)
        if entry is not None and not all(isinstance(name, str) for name in names):
            return f"{spec} has {entry!r} for a dim; name axes of the meshes, or None"
    return ""


def place_of_sharding(sharding: Any, topology: Topology) -> str | None:
    """The mesh, with its memory if that is not the default, whose devices a `NamedSharding` is over.

    None for any other sharding, and where meshes share these devices.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    devices = list(sharding.mesh.devices.flat)
    names = [name for name, mesh in topology.items() if list(mesh.devices.flat) == devices]
    if len(names) != 1:
        return None
    return names[0] + ("#pinned_host" if sharding.memory_kind == "pinned_host" else "")


def axes_of_dims(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """For each dim the axes that a `PartitionSpec` or `NamedSharding` names."""
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    entries = [*spec, *[None] * (rank - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _attribute(mesh: str, dims: Sequence[Sequence[str]]) -> ir.Attribute:
    text = ", ".join("{" + ", ".join(f'"{name}"' for name in names) + "}" for names in dims)
    return ir.Attribute.parse(f"#sdy.sharding<@{mesh}, [{text}]>")


def for_arguments(prefix: Any) -> Any:
    """A prefix of the arguments as one of `(positional, keywords)`."""
    if prefix is None or isinstance(prefix, (str, PartitionSpec, Sharding)):
        return prefix  # for all of them
    return (tuple(prefix) if isinstance(prefix, (tuple, list)) else (prefix,), None)


def flat_prefix(prefix: Any, tree: Any, what: str) -> list[Any]:
    """The leaves of a pytree prefix spread over a tree; None stands for None everywhere below.

    Raises:
        ConfigError: it is not a prefix of the tree.
    """
    if prefix is None:
        return [None] * tree.num_leaves

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, (str, PartitionSpec, NamedSharding))

    full = jax.tree.unflatten(tree, range(tree.num_leaves))
    per_leaf: list[Any] = [None] * tree.num_leaves
    try:
        flat, structure = jax.tree.flatten(prefix, is_leaf=is_leaf)
        subtrees = structure.flatten_up_to(full)
    except (ValueError, TypeError, KeyError):
        path, got, expected = first_difference(structure, tree, prefix=True)
        target = "arguments" if what.startswith("in") else "results"
        where = keystr(path[1:] if what.startswith("in") else path)  # of (positional, keywords)
        raise ConfigError(
            f"{what} is not a pytree prefix of the {target}\n  {what}{where} is {got}, and the {target} have "
            f"{expected} there\n  a prefix has the same entries, or one entry for a whole subtree"
        ) from None
    for leaf, subtree in zip(flat, subtrees):
        for number in jax.tree.leaves(subtree):
            per_leaf[number] = leaf
    return per_leaf
