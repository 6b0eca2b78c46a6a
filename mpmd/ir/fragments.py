"""Making and shrinking fragments and transfers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.ir import OpView as Op
from jax.extend.mlir.ir import Value

from mpmd.ir import edit
from mpmd.ir.context import context
from mpmd.ir.ops import Fragment, Transfer, attribute_dicts, put_attribute_dicts
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


def drop(fragment: Fragment, results: Collection[int] = (), inputs: Collection[int] = ()) -> Fragment:
    """The fragment without some unused results and inputs; attributes per operand or result follow."""
    if not results and not inputs:
        return fragment
    kept_results = [i for i in range(len(fragment.results)) if i not in results]
    kept_inputs = [i for i in range(len(fragment.inputs)) if i not in inputs]
    if results:
        returned = fragment.returned
        fragment.returned = [returned[i] for i in kept_results]
    edit.erase_args(fragment.body, inputs)
    old_results = [fragment.results[i] for i in kept_results]
    made = edit.rebuild(fragment, [fragment.inputs[i] for i in kept_inputs], [r.type for r in old_results])
    filter_attributes(made, kept_inputs, kept_results)
    for old, new in zip(old_results, made.results):
        edit.replace_uses(old, new)
    edit.erase(fragment)
    return made


def filter_attributes(op: Op, kept_inputs: Sequence[int], kept_results: Sequence[int]) -> None:
    """Keeps the entries at the given old positions of every attribute that has one entry per value."""
    for name, kept in (("arg_attrs", kept_inputs), ("res_attrs", kept_results)):
        if name in op.attributes:
            dicts = attribute_dicts(op, name, 0)
            put_attribute_dicts(op, name, [dicts[i] for i in kept])
    for name, kept in (("in_shardings", kept_inputs), ("out_shardings", kept_results)):
        if name in op.attributes:
            shardings = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
            with context():
                op.attributes[name] = sdy.TensorShardingPerValueAttr.get([shardings[i] for i in kept])
