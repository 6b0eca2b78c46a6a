"""The mesh under which a step is traced: with automatic axes, or explicit ones where the step needs them.

JAX compares the mesh of the context with each mesh that a step passes to `jax.shard_map`, with its kind of
device and its types of axes, and takes axis names in `jax.reshard` only where axes are explicit.  The same
model is written for any of these, so each is tried before the step is refused.  Types of explicit axes exist
while a step is traced; `tracing.expand` removes them, and Shardy shards the step as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpmd.api.prepare import axes_of_dims, spec_problems
from mpmd.errors import PlacementError
from mpmd.jax_compat import explicit_sharding, refuses_mesh
from mpmd.support.source import raised_at

R = TypeVar("R")


def under_fitting_mesh(
    mesh: AbstractMesh, trace: Callable[[AbstractMesh], R], explicit: Sequence[str] = ()
) -> R:
    """What `trace` returns under the first mesh that the step it traces accepts.

    Args:
        mesh: of all axes of the step, which are automatic.
        trace: is called with the mesh of the context, and traces the step anew.
        explicit: the axes that are made explicit, if the step needs some; all of them by default.

    Raises:
        PlacementError: the step needs a mesh with other axes, or several meshes at a time.
    """
    refused: list[Exception] = []
    for context in _meshes(mesh, explicit):
        try:
            with jax.sharding.use_abstract_mesh(context):
                return trace(context)
        except (TypeError, ValueError) as error:
            if not refuses_mesh(error):
                raise
            refused.append(error)
    raise PlacementError(_refusal(refused[0], mesh)) from refused[0]


def _meshes(mesh: AbstractMesh, explicit: Sequence[str]) -> Iterator[AbstractMesh]:
    """A mesh with automatic and explicit axes, with and without a kind of device."""
    types = dict.fromkeys(explicit or mesh.axis_names, AxisType.Explicit)
    for of_type in (mesh, mesh.update_axis_types(types)):
        yield of_type
        yield AbstractMesh(of_type.axis_sizes, of_type.axis_names, of_type.axis_types)


def _refusal(refused: Exception, mesh: AbstractMesh) -> str:
    reason = str(refused).partition("This error occurs")[0].strip()
    place, axes = raised_at(refused), ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return (
        f"the step needs another mesh than its topology has{f', at {place}' if place else ''}\n  {reason}\n"
        f"  the axes of the topology are {axes}: leave mesh= of jax.shard_map out, or give all calls the "
        "same mesh of the topology; jax.reshard and out_sharding= take a jax.P over these axes"
    )


def explicit_axes(mesh: AbstractMesh) -> list[str]:
    return [str(a) for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Explicit]


def typed(
    structs: Sequence[Any], given: Sequence[Any], specs: Sequence[Any], mesh: AbstractMesh
) -> list[Any]:
    """Shapes and dtypes of arguments, with shardings over the explicit axes of the context.

    Args:
        structs: a `jax.ShapeDtypeStruct` of each leaf.
        given: the leaf: an array may have a type of its own.
        specs: for each leaf the `PartitionSpec` or `NamedSharding` of `in_shardings`, or None.
        mesh: of the context.
    """
    return [
        _typed(s, g if spec is None else spec, mesh) for s, g, spec in zip(structs, given, specs, strict=True)
    ]


def _typed(struct: Any, source: Any, mesh: AbstractMesh) -> Any:
    """A sharding that does not fit is left out; `mark_shardings` reports it."""
    known, spec = explicit_axes(mesh), source
    if not isinstance(spec, (PartitionSpec, NamedSharding)):
        spec = explicit_sharding(source)
    if not known or spec is None or spec_problems(spec, struct.shape, dict(mesh.shape)):
        return struct
    dims = [tuple(a for a in names if a in known) for names in axes_of_dims(spec, len(struct.shape))]
    return struct.update(sharding=NamedSharding(mesh, PartitionSpec(*[names or None for names in dims])))
