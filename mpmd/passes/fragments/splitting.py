"""Fragments divided in two: what each part needs, and the values that pass between them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.structure import attributes_of


def inner_types(fragment: ir.Fragment) -> Hashable:
    return tuple(v.type for v in (*fragment.args, *fragment.returned))


def body_keys(
    fragments: Sequence[ir.Fragment], signature: Callable[[ir.Fragment], Hashable] = inner_types
) -> list[Hashable]:
    """For each fragment a key, equal for those of one signature whose bodies do the same.

    The signature must determine the types of the body's arguments.  Bodies are compared only if it is equal.
    """
    signatures = [signature(fragment) for fragment in fragments]
    count = collections.Counter(signatures)
    return [
        (signature, _body_key(fragment.body) if count[signature] > 1 else None)
        for fragment, signature in zip(fragments, signatures)
    ]


def _body_key(body: ir.Block) -> Hashable:
    """The text of a block's ops, with numbers for values; locations do not count."""
    parts: list[Hashable] = []
    _number(body, {}, parts)
    return tuple(parts)


def _number(block: ir.Block, number: dict[ir.Value, int], parts: list[Hashable]) -> None:
    for arg in block.arguments:
        number[arg] = len(number)
    for op in block.operations:
        operation = op.operation
        parts.append(operation.name)
        parts.extend(attributes_of(op))
        parts.extend(number.get(v, v) for v in operation.operands)
        for result in operation.results:
            number[result] = len(number)
            parts.append(result.type)
        for region in operation.regions:
            for inner in region:
                _number(inner, number, parts)


def outline(fragment: ir.Fragment, name: str) -> ir.Func:
    """A function with the body of a fragment, at the end of the module; the fragment keeps no body."""
    kind = ir.FunctionType.get([a.type for a in fragment.args], [v.type for v in fragment.returned])
    attributes = {"sym_name": ir.StringAttr.get(name), "function_type": ir.TypeAttr.get(kind)}
    end = ir.InsertionPoint(ir.module_of(fragment).body)
    function: ir.Func = ir.create("func.func", [], [], end, attributes, fragment.location, regions=1)
    old = fragment.terminator
    ir.create("func.return", fragment.returned, [], ir.before(old), location=old.location)
    ir.erase(old)
    ir.take_bodies(fragment, function)
    return function


def split(
    fragment: ir.Fragment, in_first: set[ir.Op], first_results: Sequence[int]
) -> tuple[ir.Fragment, ir.Fragment] | None:
    """Two fragments for one: the ops `in_first` and some results, then the rest.

    None if a token would pass from one to the other: an order of effects is kept within a fragment alone.

    The second half has what its results and its ops with effects need.  Values of the first that it reads,
    the
    *residuals*, become results of the first and operands of the second.  Ops without operands that the
    second needs and that are not `in_first` are in the second.  Both keep all operands of the original,
    and all attributes but those with one entry per operand or result.
    """
    rest = [i for i in range(len(fragment.results)) if i not in set(first_results)]
    effects = [op for op in ir.ops(fragment.body) if op not in in_first and not ir.is_side_effect_free(op)]
    wanted = [v for op in effects for v in ir.read_by(op)] + [fragment.returned[i] for i in rest]
    residuals, reached = _going_up(wanted, in_first)
    if any(map(ir.is_token, residuals)):
        return None
    in_second = reached | set(effects)
    second = ir.clone(fragment, ir.after(fragment))
    twin = dict(zip(_inner_values(fragment), _inner_values(second)))
    second_ops = {t for op, t in zip(ir.ops(fragment.body), ir.ops(second.body)) if op in in_second}

    def part_of(
        part: ir.Fragment, kept: Sequence[int], inputs: Sequence[ir.Value], returned: Sequence[ir.Value]
    ) -> ir.Fragment:
        types = [fragment.results[i].type for i in kept]
        old = part.returned
        part.returned = [old[i] for i in kept] + list(returned)
        half: ir.Fragment = ir.rebuild(
            part, [*part.inputs, *inputs], types + [ir.MeshTensor.get(part.mesh, v.type) for v in returned]
        )
        for name in ("arg_attrs", "res_attrs", "in_shardings", "out_shardings"):
            ir.put(half, name, None)
        for i, result in zip(kept, half.results):
            ir.replace_uses(fragment.results[i], result)
        return half

    first = part_of(fragment, list(first_results), [], residuals)
    for v in residuals:
        ir.replace_uses(twin[v], ir.append_arg(second.body, like=v))
    rest_of = part_of(second, rest, list(first.results)[len(first_results) :], [])
    _keep_only(first, in_first)
    _keep_only(rest_of, second_ops)
    ir.erase(second)
    ir.erase(fragment)
    return first, rest_of


def _keep_only(fragment: ir.Fragment, wanted: set[ir.Op]) -> None:
    for op in reversed(ir.ops(fragment)):
        if op not in wanted:
            ir.erase(op)


def _going_up(values: Iterable[ir.Value], boundary: set[ir.Op]) -> tuple[list[ir.Value], set[ir.Op]]:
    """From `values`: the first values met that arguments or ops of `boundary` make, and the ops between.

    Depth first, last pushed first.
    """
    captured: dict[ir.Value, None] = {}
    reached: set[ir.Op] = set()
    seen: set[ir.Value] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        op = ir.producer(value)
        if op is None or op in boundary:
            captured[value] = None
        else:
            reached.add(op)
            todo += ir.read_by(op)
    return list(captured), reached


def ops_flowing_to(values: Iterable[ir.Value]) -> set[ir.Op]:
    """The ops of a body by which the values are computed, directly or not."""
    return _going_up(values, set())[1]


def _inner_values(fragment: ir.Fragment) -> list[ir.Value]:
    return fragment.args + [r for op in ir.ops(fragment) for r in op.results]
