"""Making fragments and transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.ir import Value

from mpmd.ir import edit
from mpmd.ir.context import context
from mpmd.ir.ops import Fragment, Transfer
from mpmd.ir.types import MeshTensor, Origin, string_array


def make_fragment(
    mesh: str,
    inputs: Sequence[Value],
    types: Sequence[ir.Type],
    where: ir.InsertionPoint,
    body: Callable[[list[Value], ir.InsertionPoint], Sequence[Value]],
    origins: Sequence[Origin] = (),
    inferred_by: Sequence[str] = (),
    location: ir.Location | None = None,
) -> Fragment:
    """A fragment whose ops are made by `body(args, insertion point)`, which gives what it returns."""
    location = location or ir.Location.unknown(context())
    attributes = {
        "mesh_name": ir.StringAttr.get(mesh, context()),
        "origin": ir.ArrayAttr.get([o.attribute() for o in origins], context()),
    }
    if inferred_by:
        attributes["mpmd.inferred_by"] = string_array(inferred_by)
    made = edit.create("mpmd.fragment", inputs, types, where, attributes, location, regions=1)
    block = made.regions[0].blocks.append(
        *(_inner_type(v.type) for v in inputs), arg_locs=[location] * len(inputs)
    )
    returned = body(list(block.arguments), ir.InsertionPoint(block))
    edit.create("mpmd.return", returned, [], ir.InsertionPoint(block), location=location)
    return made


def _inner_type(kind: ir.Type) -> ir.Type:
    return kind.tensor if isinstance(kind, MeshTensor) else kind


def make_transfer(
    value: Value, kind: ir.Type, where: ir.InsertionPoint, location: ir.Location | None = None
) -> Transfer:
    """A transfer of `value` to the mesh, memory and sharding of `kind`."""
    return edit.create("mpmd.transfer", [value], [kind], where, location=location or value.location)
