"""Propagation by Shardy: every value of a fragment gets a sharding, every communication an operation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.compile.lowering.reader import parse_program
from mpmd.errors import CompileError, IRError
from mpmd.sharding.shards import axes_by_dim, axes_of, axis_size

Spec = Sequence[Sequence[str]]
"""For each dim the names of the axes that shard it."""

_SHARDING = "sdy.sharding"
_MESH = "mesh"
_PROPAGATE = "sdy-propagation-pipeline"
_EXPLICIT = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)


def with_collectives(
    text: str, axes: Mapping[str, int], arguments: Sequence[Spec], results: Sequence[Spec]
) -> ir.Module:
    """A module in which operations agree with the shardings of their operands, and communication is explicit.

    Args:
        text: MLIR of a module with a function `main`.
        axes: the mesh's axes and their sizes, the outermost first.
        arguments: shardings of the arguments of `main`.
        results: shardings of its results.

    Raises:
        CompileError: the module refers to another mesh, or Shardy cannot partition it.
        IRError: the text is not an MLIR module.
    """
    text = _on_one_mesh(text, axes)
    module = parse_program(text)
    with ir.context(), ir.Location.unknown():
        mesh = _mesh_of(module, axes, text)
        main = ir.symbol_table(module)["main"]
        for attribute, specs in (("arg_attrs", arguments), ("res_attrs", results)):
            dicts = ir.attribute_dicts(main, attribute, len(specs))
            for given, spec in zip(dicts, specs, strict=True):
                given[_SHARDING] = _sharding(mesh, spec)
            ir.put_attribute_dicts(main, attribute, dicts)
        _run(_PROPAGATE, module)
        _drop_uneven(module, axes)
        for pipeline in _EXPLICIT:
            _run(pipeline, module)
    return module


def _run(pipeline: str, module: ir.Module) -> None:
    try:
        ir.run_mlir_alone(pipeline, module)
    except IRError as error:
        raise CompileError(f"Shardy cannot partition the fragment: {error}") from error


_WITHOUT_AXES = re.compile(r"^ *sdy\.mesh @([\w.$-]+|\"[^\"]+\") = <\[\]>.*\n", re.M)


def _on_one_mesh(text: str, axes: Mapping[str, int]) -> str:
    """The text without meshes that have no axes: whole values there are whole on the fragment's mesh.

    JAX gives random keys such meshes.
    """
    names = _WITHOUT_AXES.findall(text)
    if not names or not axes:
        return text
    text = _WITHOUT_AXES.sub("", text)
    listed = ", ".join(f'"{name}"={size}' for name, size in axes.items())
    for name in names:
        text = text.replace(f"<@{name}, ", f"<mesh<[{listed}]>, ")
    return text


def _mesh_of(module: ir.Module, axes: Mapping[str, int], text: str) -> str:
    """The name of the fragment's mesh, which is created if missing; meshes of others are removed.

    Raises:
        CompileError: its values are on another mesh.
    """
    wanted = []
    for op in [op for op in module.body.operations if isinstance(op, ir.sdy.MeshOp)]:
        name, mesh = str(op.sym_name.value), ir.sdy.MeshAttr(op.mesh)
        if list(axes_of(mesh).items()) == list(axes.items()) and not mesh.device_ids:
            wanted.append(name)
        elif f"<@{name}," in text:
            raise CompileError(f"the fragment has values on {mesh}; its devices are a mesh of {dict(axes)}")
        else:
            ir.erase(op)
    if wanted:
        return wanted[0]
    attribute = ir.sdy.MeshAttr.get([ir.sdy.MeshAxisAttr.get(name, size) for name, size in axes.items()])
    with ir.at_start(module.body):
        ir.sdy.MeshOp(_MESH, attribute)
    return _MESH


def _sharding(mesh: str, spec: Spec) -> ir.Attribute:
    dims = [
        ir.sdy.DimensionShardingAttr.get([ir.sdy.AxisRefAttr.get(name) for name in names], is_closed=True)
        for names in spec
    ]
    return ir.sdy.TensorShardingAttr.get(mesh, dims)


def _drop_uneven(module: ir.Module, axes: Mapping[str, int]) -> None:
    """Leaves dims whole that their axes do not divide: a reshard follows; uneven parts would need masks."""
    for op in ir.walk(module.operation):
        given = op.attributes.get(_SHARDING) if _SHARDING in op.attributes else None
        if given is None or not ir.sdy.TensorShardingPerValueAttr.isinstance(given):
            continue
        shardings = list(ir.sdy.TensorShardingPerValueAttr(given).shardings)
        even = [_even(s, list(v.type.shape), axes) for s, v in zip(shardings, op.results, strict=True)]
        if even != shardings:
            op.attributes[_SHARDING] = ir.sdy.TensorShardingPerValueAttr.get(even)


def _even(sharding: ir.Attribute, shape: Sequence[int], axes: Mapping[str, int]) -> ir.Attribute:
    whole = ir.sdy.TensorShardingAttr(sharding)
    parts = [math.prod(axis_size(a, dict(axes)) for a in dim) for dim in axes_by_dim(sharding)]
    if all(size % count == 0 for size, count in zip(shape, parts)):
        return sharding
    dims = [
        dim if size % count == 0 else ir.sdy.DimensionShardingAttr.get([], is_closed=True)
        for dim, size, count in zip(whole.dimension_shardings, shape, parts)
    ]
    return ir.sdy.TensorShardingAttr.get(whole.mesh_or_ref, dims)
