"""Residuals of a forward fragment for its backward fragment, and how to recompute them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd import ir
from mpmd.passes.fragments.editing import in_block_order


class Maker:
    """A forward fragment: its returned values, operands by argument, and results by value."""

    def __init__(self, fragment: ir.Fragment) -> None:
        self.returned = fragment.returned
        self.outer = dict(zip(fragment.args, fragment.inputs))
        self.results: dict[ir.Value, list[ir.Value]] = {}
        for inner, result in zip(self.returned, fragment.results):
            self.results.setdefault(inner, []).append(result)


Residual = tuple[int, ir.Value, ir.Fragment]
"""Its position among the operands of a backward fragment, itself, and the forward fragment."""


def given(fragment: ir.Fragment, residuals: Sequence[Residual]) -> set[ir.Value]:
    """The operands of a backward fragment but for its residuals."""
    return set(fragment.inputs) - {value for _, value, _ in residuals}


def residuals_of(fragment: ir.Fragment) -> list[Residual]:
    """The operands that its forward fragments make, in the order in which they are computed."""
    residuals = []
    of_maker: dict[ir.Fragment, tuple[list[ir.Value], dict[ir.Op, int]] | None] = {}
    for position, value in enumerate(fragment.inputs):
        maker = ir.producer(value)
        if not isinstance(maker, ir.Fragment):
            continue
        if maker not in of_maker:
            places = {op: i for i, op in enumerate(ir.ops(maker.body))}
            of_maker[maker] = (maker.returned, places) if is_forward_of(maker, fragment) else None
        known = of_maker[maker]
        if known is not None:
            returned, places = known
            op = ir.producer(returned[ir.result_index(value)])
            residuals.append((-1 if op is None else places[op], position, value, maker))
    return [(position, value, maker) for _, position, value, maker in sorted(residuals, key=lambda f: f[:2])]


def is_forward_of(maker: ir.Fragment, fragment: ir.Fragment) -> bool:
    """Whether a fragment is the forward one of a backward fragment."""
    same = maker.mesh == fragment.mesh and maker.call_counter == fragment.call_counter
    return same and maker.is_forward


def is_free(value: ir.Value, have: set[ir.Value]) -> bool:
    """Whether the backward fragment can read a value without a longer live range."""
    return value in have or ir.producer(value) is None


def ops_to_remake(
    maker: Maker, value: ir.Value, have: set[ir.Value], accepts: Callable[[ir.Op], bool], most: int
) -> list[ir.Op] | None:
    """The ops of a forward fragment that compute a residual from available values, in order.

    Args:
        maker: the forward fragment.
        value: its result; one that is among its own arguments needs no ops.
        have: values that the backward fragment reads anyway.
        accepts: whether an op may be computed again.
        most: ops that may be.

    Returns:
        None if there are no such ops.
    """
    needed: dict[ir.Op, None] = {}
    todo = [maker.returned[ir.result_index(value)]]
    while todo:
        inner = todo.pop()
        if any(result in have for result in maker.results.get(inner, ())):
            continue
        if inner in maker.outer and is_free(maker.outer[inner], have):
            continue
        op = ir.producer(inner)
        if op is None or not accepts(op):
            return None
        if op in needed:
            continue
        needed[op] = None
        if len(needed) > most:
            return None
        todo += ir.read_by(op)
    return in_block_order(needed)


def recompute(fragment: ir.Fragment, plans: list[tuple[int, ir.Fragment, list[ir.Op]]]) -> None:
    """Make a backward fragment recompute residuals itself.

    Args:
        fragment: the backward fragment; it is replaced.
        plans: for each residual its position among the operands, its forward fragment, and the ops of that
            that compute it, in order.  The operand itself is left unused.
    """
    inputs = list(fragment.inputs)
    inside = dict(zip(inputs, fragment.args))
    replaced = {inputs[position] for position, _, _ in plans}
    outer_of: dict[ir.Fragment, dict[ir.Value, ir.Value]] = {}
    for position, maker, plan in plans:
        if maker not in outer_of:
            kept = (
                (v, r) for v, r in zip(maker.returned, maker.results) if r in inside and r not in replaced
            )
            outer_of[maker] = {**dict(zip(maker.args, maker.inputs)), **dict(kept)}
        outer = outer_of[maker]
        values: dict[ir.Value, ir.Value] = {}
        where = ir.at_start(fragment.body)
        for op in plan:
            for operand in ir.read_by(op):
                if operand not in values and operand in outer:
                    values[operand] = _inside(outer[operand], inputs, inside, fragment)
            ir.clone_with(op, values, where)
        target = maker.returned[ir.result_index(inputs[position])]
        ir.replace_uses(fragment.args[position], values[target])
    rebuilt = ir.rebuild(fragment, inputs, [r.type for r in fragment.results])
    for name in ("arg_attrs", "in_shardings"):
        ir.put(rebuilt, name, None)
    ir.replace(fragment, list(rebuilt.results))


def _inside(
    value: ir.Value, inputs: list[ir.Value], inside: dict[ir.Value, ir.Value], fragment: ir.Fragment
) -> ir.Value:
    if value not in inside:
        inputs.append(value)
        inside[value] = ir.append_arg(fragment.body, like=value, kind=value.type.tensor)
    return inside[value]
