"""mpmd-recompute-cheap-residuals."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.block_order import in_block_order

_NAMES = """
    abs add and broadcast_in_dim clamp compare constant convert divide iota maximum minimum multiply negate
    not or reshape rsqrt select sign slice sqrt subtract transpose xor
"""
CHEAP = frozenset("stablehlo." + name for name in _NAMES.split())


@dataclasses.dataclass(frozen=True)
class RecomputeCheapResiduals(FunctionPass):
    """Computes in a backward fragment what its forward fragment would keep for it at no gain.

        y, t = m1["f"] (w, x) { t = transpose w; y = dot x t; ret y, t }
        g = m1["f"(1)] (t, d) { z = dot d t; ret z }
        -->
        y, t = m1["f"] (w, x) { t = transpose w; y = dot x t; ret y, t }
        g = m1["f"(1)] (t, d, w) { s = transpose w; z = dot d s; ret z }

    A residual is recomputed if cheap ops (data movement and arithmetic that a compiler fuses into its use)
    give it from values that the backward fragment has or can have without keeping anything longer: its own
    operands, and arguments of the function.  `t` and its operand are left unused; fragment-dce removes them.
    Fewer bytes then wait between forward and backward of each microbatch.

    Requires: fragments in program order.  Ensures: same values.  Cost: linear times `max_ops`.  Source: ours.
    """

    name: ClassVar[str] = "mpmd-recompute-cheap-residuals"
    runs_on: ClassVar[Literal["mpmd"]] = "mpmd"
    max_ops: int = 24

    def rewrite_function(self, f: ir.Func) -> None:
        """Looks at each backward fragment of the function."""
        for fragment in ir.fragments(f):
            if fragment.is_backward:
                self._rewrite_fragment(fragment)

    def _rewrite_fragment(self, fragment: ir.Fragment) -> None:
        have = {
            value
            for value in fragment.inputs
            if not isinstance(producer := ir.producer(value), ir.Fragment)
            or not _is_forward_of(producer, fragment)
        }
        plans = []
        for position, value, maker in _residuals(fragment):
            plan = self._plan(maker, value, have)
            if plan is None:
                have.add(value)
            else:
                plans.append((position, maker, plan))
        if plans:
            _recompute(fragment, plans)

    def _plan(self, maker: ir.Fragment, value: ir.Value, have: set[ir.Value]) -> list[ir.Op] | None:
        """The ops of `maker` that make `value` from values at hand, in order; None if there is no such plan.

        A value that is itself among the forward fragment's arguments needs no ops: it is left alone.
        """
        outer = dict(zip(maker.args, maker.inputs))
        at_hand = {inner: r for inner, r in zip(maker.returned, maker.results) if r in have}
        needed: dict[ir.Op, None] = {}
        todo = [maker.returned[ir.result_index(value)]]
        while todo:
            inner = todo.pop()
            if inner in at_hand or (inner in outer and _is_free(outer[inner], have)):
                continue
            op = ir.producer(inner)
            if op is None or op.operation.name not in CHEAP or len(op.operation.regions):
                return None
            needed[op] = None
            if len(needed) > self.max_ops:
                return None
            todo += op.operands
        return in_block_order(needed) or None


def _residuals(fragment: ir.Fragment) -> list[tuple[int, ir.Value, ir.Fragment]]:
    """The operands that its forward fragments make, in the order in which they are computed."""
    found = []
    places: dict[ir.Fragment, dict[ir.Op, int]] = {}
    for position, value in enumerate(fragment.inputs):
        maker = ir.producer(value)
        if isinstance(maker, ir.Fragment) and _is_forward_of(maker, fragment):
            if maker not in places:
                places[maker] = {op: i for i, op in enumerate(ir.ops(maker.body))}
            op = ir.producer(maker.returned[ir.result_index(value)])
            place = -1 if op is None else places[maker][op]
            found.append((place, position, value, maker))
    return [(position, value, maker) for _, position, value, maker in sorted(found, key=lambda f: f[:2])]


def _is_forward_of(maker: ir.Fragment, fragment: ir.Fragment) -> bool:
    same = maker.mesh == fragment.mesh and maker.call_counter == fragment.call_counter
    return same and maker.is_forward


def _is_free(value: ir.Value, have: set[ir.Value]) -> bool:
    """Whether the backward fragment can read a value without keeping it alive for longer."""
    return value in have or ir.producer(value) is None


def _recompute(fragment: ir.Fragment, plans: list[tuple[int, ir.Fragment, list[ir.Op]]]) -> None:
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
            for operand in op.operands:
                if operand not in values and operand in outer:
                    values[operand] = _inside(outer[operand], inputs, inside, fragment)
            ir.clone_with(op, values, where)
        target = maker.returned[ir.result_index(inputs[position])]
        ir.replace_uses(fragment.args[position], values[target])
    made = ir.rebuild(fragment, inputs, [r.type for r in fragment.results])
    for name in ("arg_attrs", "in_shardings"):
        ir.put(made, name, None)
    for old, new in zip(fragment.results, made.results):
        ir.replace_uses(old, new)
    ir.erase(fragment)


def _inside(
    value: ir.Value, inputs: list[ir.Value], inside: dict[ir.Value, ir.Value], fragment: ir.Fragment
) -> ir.Value:
    if value not in inside:
        inputs.append(value)
        inside[value] = ir.append_arg(fragment.body, like=value, kind=value.type.tensor)
    return inside[value]
