"""Changes of fragments: moved, merged with others of their mesh, and freed of dead ops, results and operands.

Moves that undo each other leave the text as it was, and do not count as an edit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from mpmd import ir
from mpmd.errors import IRError
from mpmd.passes.fragments.dependencies import keep_control_edges
from mpmd.passes.structure import attributes_of


def block_users(x: ir.Op) -> list[ir.Op]:
    """The ops beside `x` that use its results, in themselves or in their regions; newest use first."""
    return [op_around(user, x.operation.block) for user in ir.users(x)]


def op_around(user: ir.Op, block: ir.Block) -> ir.Op:
    """The op of a block that is an op, or contains it in its regions."""
    operation = user.operation
    while operation.block != block:
        operation = operation.parent
    return operation.opview


def in_block_order(some: Iterable[Any]) -> list[Any]:
    """Ops of one block, first one first."""
    return sorted(some, key=functools.cmp_to_key(lambda a, b: -1 if ir.comes_before(a, b) else 1))


@contextlib.contextmanager
def moving(f: ir.Func) -> Iterator[None]:
    """Around moves of a function's ops: they do not count as edits if the text is unchanged afterwards."""
    since, before = ir.edits(), _reading(f)
    yield
    if ir.edits() != since and _reading(f) == before:
        ir.forget_edits(since)


def _reading(f: ir.Func) -> list[Any]:
    """Equal for one function before and after moves that change nothing in its text."""
    number: dict[ir.Value, int] = {arg: i for i, arg in enumerate(f.args)}
    lines: list[Any] = []
    for op in [*ir.ops(f), f.terminator]:
        has_body = len(op.operation.regions) > 0
        what = op if has_body else (op.operation.name, *(r.type for r in op.results), *attributes_of(op))
        lines.append((what, [number.get(v) for v in (ir.read_by(op) if has_body else op.operands)]))
        number.update(zip(op.results, itertools.count(len(number))))
    return lines


def merge(*group: ir.Fragment) -> ir.Fragment:
    """Merges fragments, in that order, into one at the position of the last.

    Operands: every value that one of them reads and none defines, once.  Results: those of earlier
    members used outside of the group, then all of the last.  Origins and stage are united, as are the
    control edges to others; every other attribute is dropped.  The ops of the others move into the body of
    the last: merging bottom-up, they are the small ones.  If two are merged, and the first has one input
    and one result with one use, the operand list of the second is unchanged, except for the input of the
    first instead of its result.

    The caller ensures that users of the others come after the last one.

    Raises:
        IRError: they are on different meshes, or have different stages.

    Source: openxla/shardy MPMD, `MergeFragments`.
    """
    *others, last = group
    stage = _common_stage(group)
    origins = list(dict.fromkeys(origin for fragment in group for origin in fragment.origins))
    members = set(group)
    results = [r for f in others for r in f.results if any(user not in members for user in ir.users(r))]
    if len(others) == 1 and _is_link(others[0], last):
        inputs, inside = _spliced(others[0], last)
    else:
        inputs, inside = _joined(others, last)
    if results:
        last.returned = [inside[r] for r in results] + last.returned
    results += last.results
    merged = ir.rebuild(
        last, inputs, [r.type for r in results], ("mesh_name", "origin"),
        ir.Location.fused([group[0].location, last.location], context=ir.context()),
    )  # fmt: skip
    merged.origins, merged.stage = origins, stage
    keep_control_edges(group, merged)
    for old, new in zip(results, merged.results, strict=True):
        ir.replace_uses(old, new)
    for fragment in reversed(group):
        ir.erase(fragment)
    return merged


def _common_stage(group: Sequence[ir.Fragment]) -> int | None:
    stages = {fragment.stage for fragment in group} - {None}
    if len({fragment.mesh for fragment in group}) > 1 or len(stages) > 1:
        what = " and ".join(f"mesh {fragment.mesh}, stage {fragment.stage}" for fragment in group)
        raise IRError(f"cannot merge fragments of {what} at {group[-1].location}")
    return stages.pop() if stages else None


def _joined(
    others: Sequence[ir.Fragment], last: ir.Fragment
) -> tuple[list[ir.Value], dict[ir.Value, ir.Value]]:
    """Moves the ops of the others to the front of the body of the last; operands, and their values inside."""
    joined_results = {r for fragment in others for r in fragment.results}
    every = [*others, last]
    like = {value: arg for fragment in reversed(every) for value, arg in zip(fragment.inputs, fragment.args)}
    inputs = [
        v for v in dict.fromkeys(v for fragment in every for v in fragment.inputs) if v not in joined_results
    ]
    old_args = ir.change_args(last.body, [like[v] for v in inputs])
    inside = dict(zip(inputs, last.args))
    front = last.body.operations[0]
    for fragment in others:
        returned = ir.move_body(fragment, [inside[v] for v in fragment.inputs], front)
        inside |= dict(zip(fragment.results, returned))
    for value, arg in zip(last.inputs, old_args):
        ir.replace_uses(arg, inside[value])
    return inputs, inside


def _is_link(first: ir.Fragment, second: ir.Fragment) -> bool:
    """Whether the first has one input and one result, with one use, by the second."""
    if len(first.inputs) != 1 or len(first.results) != 1:
        return False
    return ir.users(first) == [second]


def _spliced(first: ir.Fragment, second: ir.Fragment) -> tuple[list[ir.Value], dict[ir.Value, ir.Value]]:
    """As `_joined`, but the second's argument for the first's result takes the first's input."""
    result, source = first.results[0], first.args[0]
    inputs = list(second.inputs)
    position = inputs.index(result)
    inputs[position] = first.inputs[0]
    arg = second.args[position]
    returned = first.returned[0]
    front = second.body.operations[0]
    if arg.type != source.type:
        # An argument's type can be changed in place once nothing uses it any more.
        ir.replace_uses(arg, returned)
        ir.set_type(arg, source.type)
        ir.move_body(first, [arg], front)
        return inputs, {result: returned}
    if returned == source:
        return inputs, {result: arg}
    uses = ir.uses(arg)
    ir.move_body(first, [arg], front)
    for user, number in uses:
        ir.set_operand(user, number, returned)
    return inputs, {result: returned}


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
    rebuilt: Op = ir.rebuild(
        fragment, [fragment.operands[i] for i in kept_inputs], [r.type for r in old_results]
    )
    filter_attributes(rebuilt, kept_inputs, kept_results)
    for old, new in zip(old_results, rebuilt.results):
        ir.replace_uses(old, new)
    ir.erase(fragment)
    return rebuilt


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
