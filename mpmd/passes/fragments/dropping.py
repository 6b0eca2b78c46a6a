"""Dead ops, and fragments that lose results and operands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from mpmd import ir


def erase_dead_ops(body: ir.Block) -> None:
    """Erases dead ops from a body and from the regions in it."""
    for op in reversed(ir.ops(body)):
        if ir.is_trivially_dead(op):
            ir.erase(op)
            continue
        regions = op.operation.regions
        if len(regions):
            for region in regions:
                for block in region:
                    erase_dead_ops(block)


Op = TypeVar("Op", ir.Fragment, ir.NamedComputation)


def drop(fragment: Op, results: Collection[int] = (), inputs: Collection[int] = ()) -> Op:
    """The fragment without some unused results and inputs; attributes per operand or result follow."""
    if not results and not inputs:
        return fragment
    kept_results = [i for i in range(len(fragment.results)) if i not in results]
    kept_inputs = [i for i in range(len(fragment.operands)) if i not in inputs]
    if results:
        returned = fragment.returned
        fragment.returned = [returned[i] for i in kept_results]
    ir.erase_args(fragment.body, inputs)
    old_results = [fragment.results[i] for i in kept_results]
    made: Op = ir.rebuild(
        fragment, [fragment.operands[i] for i in kept_inputs], [r.type for r in old_results]
    )
    filter_attributes(made, kept_inputs, kept_results)
    for old, new in zip(old_results, made.results):
        ir.replace_uses(old, new)
    ir.erase(fragment)
    return made


def filter_attributes(op: ir.Op, kept_inputs: Sequence[int], kept_results: Sequence[int]) -> None:
    """Keeps the entries at the given old positions of every attribute that has one entry per value."""
    for name, kept in (("arg_attrs", kept_inputs), ("res_attrs", kept_results)):
        if name in op.attributes:
            dicts = ir.attribute_dicts(op, name, 0)
            ir.put_attribute_dicts(op, name, [dicts[i] for i in kept])
    for name, kept in (("in_shardings", kept_inputs), ("out_shardings", kept_results)):
        if name in op.attributes:
            shardings = ir.sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
            left = [shardings[i] for i in kept]
            ir.put(op, name, ir.sdy.TensorShardingPerValueAttr.get(left, ir.context()))
