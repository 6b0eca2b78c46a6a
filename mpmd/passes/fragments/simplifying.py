"""A fragment or named computation without forwarded, unneeded and duplicate values."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.calls.shared_bodies import narrow_calls
from mpmd.passes.fragments.editing import drop, erase_dead_ops


def simplify(fragment: ir.Fragment | ir.NamedComputation) -> bool:
    """One round over one fragment or named computation; whether one of its results was replaced."""
    first_arg: dict[ir.Value, ir.Value] = {}
    for value, arg in zip(fragment.operands, fragment.args):
        ir.replace_uses(arg, first_arg.setdefault(value, arg))
    outside = dict(zip(fragment.args, fragment.operands))
    returned, results = fragment.returned, list(fragment.results)
    first_result: dict[tuple[ir.Value, ir.Type], ir.Value] = {}
    gone: set[int] = set()
    for i, (value, result) in enumerate(zip(returned, results)):
        if value in outside and outside[value].type == result.type:
            same = outside[value]
        else:
            same = first_result.setdefault((value, result.type), result)
        if same != result:
            ir.replace_uses(result, same)
            gone.add(i)
    replaced = bool(gone)
    gone |= _unneeded(fragment, gone)
    fragment = drop(fragment, results=gone)
    erase_dead_ops(fragment.body)
    narrow_calls(fragment)
    fragment = drop(fragment, inputs={i for i, arg in enumerate(fragment.args) if ir.is_unused(arg)})
    if not len(fragment.results) and not ir.ops(fragment.body):
        ir.erase(fragment)
    return replaced


def _unneeded(fragment: ir.Fragment | ir.NamedComputation, gone: set[int]) -> set[int]:
    """Unused results that may go: those of pure ops; the last one only with all of a pure computation."""
    results, returned = list(fragment.results), fragment.returned
    unused = [i for i in range(len(results)) if i not in gone and ir.is_unused(results[i])]
    if len(gone) + len(unused) == len(results) and ir.is_side_effect_free(fragment):
        return set(unused)
    pure = {i for i in unused if (op := ir.producer(returned[i])) is None or ir.is_side_effect_free(op)}
    if pure and len(gone) + len(pure) == len(results):
        pure.discard(min(pure))
    return pure
