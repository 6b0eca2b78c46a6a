"""Bodies of fragments: comparison, and conversion to functions."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence

from mpmd import ir
from mpmd.passes.constants import attributes_of


def inner_types(fragment: ir.Fragment) -> Hashable:
    """The argument and result types of its body."""
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
    found: list[Hashable] = []
    _number(body, {}, found)
    return tuple(found)


def _number(block: ir.Block, number: dict[ir.Value, int], found: list[Hashable]) -> None:
    for arg in block.arguments:
        number[arg] = len(number)
    for op in block.operations:
        operation = op.operation
        found.append(operation.name)
        found.extend(attributes_of(op))
        found.extend(number.get(v, v) for v in operation.operands)
        for result in operation.results:
            number[result] = len(number)
            found.append(result.type)
        for region in operation.regions:
            for inner in region:
                _number(inner, number, found)


def outline(fragment: ir.Fragment, name: str) -> ir.Func:
    """A function with the body of a fragment, at the end of the module; the fragment keeps no body."""
    kind = ir.FunctionType.get([a.type for a in fragment.args], [v.type for v in fragment.returned])
    attributes = {"sym_name": ir.StringAttr.get(name), "function_type": ir.TypeAttr.get(kind)}
    end = ir.InsertionPoint(ir.module_of(fragment).body)
    made: ir.Func = ir.create("func.func", [], [], end, attributes, fragment.location, regions=1)
    old = fragment.terminator
    ir.create("func.return", fragment.returned, [], ir.before(old), location=old.location)
    ir.erase(old)
    ir.take_bodies(fragment, made)
    return made
