"""How the values inside of a fragment are split, by Shardy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpmd import ir
from mpmd.sharding.shardings import Split, split_of

_SHARDING = "sdy.sharding"
_NUMBER = "mpmd.number"
PROPAGATE = (
    "sdy-import-pipeline,sdy-user-priority-propagate,func.func(sdy-sink-func-data-flow-edges),"
    "func.func(sdy-sink-data-flow-edges),sdy-close-shardings"
)


def number_ops(fragment: ir.Op) -> None:
    """Numbers the ops in a body, which then are known after Shardy has added others."""
    for number, op in enumerate(ir.walk(fragment)):
        ir.put(op, _NUMBER, ir.i64(number))


def splits_inside(propagated: ir.Op, body: ir.Fragment, operands: Sequence[ir.Type]) -> dict[ir.Value, Split]:
    """The splits of the values in the body of a fragment; a value that is whole may be missing.

    Args:
        propagated: a copy of it whose ops were numbered, after Shardy.
        body: the fragment.
        operands: the types of its operands, with their shardings.
    """
    by_number: dict[int, list[Split]] = {}
    for op in ir.walk(propagated):
        if _NUMBER in op.attributes and _SHARDING in op.attributes:
            by_number[int(ir.IntegerAttr(op.attributes[_NUMBER]).value)] = _splits_of(op)
    splits: dict[ir.Value, Split] = {}
    for arg, kind in zip(body.args, operands):
        if isinstance(kind, ir.MeshTensor):
            splits[arg] = split_of(kind.sharding, len(kind.shape))
    for number, op in enumerate(ir.walk(body)):
        of_results = by_number.get(number, [])
        splits.update(zip(op.results, of_results))
        if op.operation.name == "stablehlo.while":
            for region in op.operation.regions:
                splits.update(zip(region.blocks[0].arguments, of_results))
    return splits


def _splits_of(op: ir.Op) -> list[Split]:
    attribute = op.attributes[_SHARDING]
    if ir.sdy.TensorShardingPerValueAttr.isinstance(attribute):
        shardings = list(ir.sdy.TensorShardingPerValueAttr(attribute).shardings)
    else:
        shardings = [attribute]
    return [split_of(s, 0) for s in shardings]


def splits_of_copy(
    splits: Mapping[ir.Value, Split], fragment: ir.Fragment, copy: ir.Fragment
) -> dict[ir.Value, Split]:
    """The splits of the values in the body of a copy."""
    by_op = {}
    for old, new in zip([fragment, *ir.walk(fragment)], [copy, *ir.walk(copy)], strict=True):
        pairs = list(zip(old.results, new.results))
        for one, other in zip(old.operation.regions, new.operation.regions):
            for block, own in zip(one.blocks, other.blocks):
                pairs += zip(block.arguments, own.arguments)
        by_op.update({own: splits[value] for value, own in pairs if value in splits})
    return by_op


def splits_of_typed(fragment: ir.Fragment) -> dict[ir.Value, Split]:
    """The splits of the values in a body that calls no function, from the types of operands and results."""
    operands, results = ([v.type for v in values] for values in (fragment.inputs, fragment.results))
    given = [kind.sharding for kind in (*operands, *results) if isinstance(kind, ir.MeshTensor)]
    known = next((sharding for sharding in given if sharding is not None), None)
    if known is None:
        return {}
    mesh = ir.sdy.TensorShardingAttr(known).mesh_or_ref
    program = _program_of(fragment, mesh, operands, results)
    ir.run_mlir(PROPAGATE, program)
    return splits_inside(program.operation.opview, fragment, operands)


def _program_of(
    fragment: ir.Fragment, mesh: Any, operands: Sequence[ir.Type], results: Sequence[ir.Type]
) -> ir.Module:
    """A module whose `main` is the body, with shardings of arguments and results; ops are numbered."""
    module = ir.parse("func.func public @main() {\n  return\n}")
    for op in ir.module_of(fragment).body.operations:
        if isinstance(op, ir.sdy.MeshOp):
            ir.clone(op, ir.at_start(module.body))
    (main,) = ir.funcs(module)
    inside = {
        arg: ir.append_arg(main.body, like=value, kind=arg.type)
        for arg, value in zip(fragment.args, fragment.inputs)
    }
    _, main.returned = ir.clone_body(fragment.body, inside, ir.at_end(main.body))
    ir.return_types_changed(main)
    for attribute, kinds in (("arg_attrs", operands), ("res_attrs", results)):
        ir.put_attribute_dicts(main, attribute, [_attribute(kind, mesh) for kind in kinds])
    number_ops(main)
    return module


def _attribute(kind: ir.Type, mesh: Any) -> dict[str, ir.Attribute]:
    if not isinstance(kind, ir.MeshTensor):
        return {}
    dims = [ir.sdy.DimensionShardingAttr.get([], is_closed=True)] * len(kind.shape)
    whole = ir.sdy.TensorShardingAttr.get(mesh, dims)
    return {_SHARDING: whole if kind.sharding is None else kind.sharding}
