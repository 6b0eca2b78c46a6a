"""What a module computes, on one device: meshes, fragments, transfers and microbatches are looked through.

The module is turned into one plain function, which StableHLO's reference interpreter evaluates.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir as mlir
from jax.extend.mlir.dialects import stablehlo

from mpmd import ir

_SAME = ("sdy.sharding_constraint", "sdy.reshard")
_ORDERS = ("stablehlo.create_token", "stablehlo.after_all")
_MOVES = (ir.Transfer, ir.Assign, ir.Unassign, ir.NamedTensor, ir.Broadcast)
_REDUCE = {"add": "add", "max": "maximum", "min": "minimum", "mul": "multiply", "or": "or", "and": "and"}


Effects = collections.Counter[str]
"""How often each custom call with effects is done, by its target."""


def evaluate(
    module: mlir.Module, arguments: Sequence[np.ndarray], effects: Effects | None = None
) -> list[np.ndarray]:
    """The results of the entry point; custom calls with effects, which add 1000 here, are counted."""
    flat = flattened(module, effects)
    narrow = _with_wide_results(flat)
    with ir.context():
        given = [mlir.DenseElementsAttr.get(a) for a in arguments]
        found = [np.array(mlir.DenseElementsAttr(r)) for r in stablehlo.eval_module(flat, given)]
    return [a.astype(jnp.bfloat16) if i in narrow else a for i, a in enumerate(found)]


def _with_wide_results(flat: mlir.Module) -> set[int]:
    """Returns bfloat16, of which the bindings make no arrays, as float32; which results those are."""
    main = ir.funcs(flat)[0]
    returned = main.returned
    narrow = {i for i, value in enumerate(returned) if "bf16" in str(value.type)}
    with ir.context(), mlir.Location.unknown():
        for i in narrow:
            kind = mlir.RankedTensorType.get(returned[i].type.shape, mlir.F32Type.get())
            returned[i] = ir.create("stablehlo.convert", [returned[i]], [kind], ir.at_end(main.body)).result
        main.returned = returned
        ir.return_types_changed(main)
    return narrow


def argument_shapes(module: mlir.Module) -> list[tuple[int, ...]]:
    """The shapes of the entry point's arguments."""
    return [tuple(_plain(arg.type).shape) for arg in entry_of(module).args]


def entry_of(module: mlir.Module) -> ir.Func:
    """The function that is public and distributed."""
    return next(f for f in ir.funcs(module) if f.is_public and f.is_distributed)


def flattened(module: mlir.Module, effects: Effects | None = None) -> mlir.Module:
    """A module with one function, of plain StableHLO; effects are counted."""
    entry = entry_of(module)
    types = ", ".join(f"%a{i}: {_plain(a.type)}" for i, a in enumerate(entry.args))
    flat = ir.parse(f"func.func @main({types}) {{ return }}")
    main = ir.funcs(flat)[0]
    with ir.context(), mlir.Location.unknown():
        results = _Copier(ir.symbol_table(module), ir.at_end(main.body), effects).run(entry, main.args)
        main.returned = results
        ir.return_types_changed(main)
    for op in ir.walk(main):
        if op.operation.name in _SAME:  # in the branch of a conditional, or in a loop
            ir.replace(op, list(op.operands))
            continue
        if isinstance(op, ir.NamedComputation):
            ir.replace(op, ir.move_body(op, list(op.operands), op))
            continue
        ir.put(op, "sdy.sharding", None)
        if op.operation.name == "stablehlo.scatter":
            _copy_inputs(op)
    flat.operation.verify()
    return flat


def _copy_inputs(scatter: Any) -> None:
    """Gives a scatter copies of what it updates: the interpreter updates the operands themselves."""
    for i in range(len(scatter.results)):
        value = scatter.operands[i]
        copy = ir.create("stablehlo.reshape", [value], [value.type], ir.before(scatter)).result
        ir.set_operand(scatter, i, copy)


def _plain(kind: Any) -> Any:
    return kind.tensor if isinstance(kind, ir.MeshTensor) else kind


class _Copier:
    """Copies bodies to one place, callees and fragments included."""

    def __init__(self, symbols: dict[str, ir.Func], where: Any, effects: Effects | None = None) -> None:
        self.symbols = symbols
        self.where = where
        self.effects: Effects = collections.Counter() if effects is None else effects

    def run(self, body: Any, inputs: Sequence[Any]) -> list[Any]:
        """The results of an op's body for these inputs."""
        values = dict(zip(body.args, inputs))
        for op in ir.ops(body):
            made = self.results(op, [values[v] for v in op.operands if v in values], values)
            values.update(zip(op.results, made))
        return [values[v] for v in body.returned]

    def results(self, op: Any, inputs: list[Any], values: dict[Any, Any]) -> list[Any]:
        """Values for the results of one op."""
        if isinstance(op, _MOVES) or op.operation.name in _SAME:
            return inputs
        if isinstance(op, (ir.Fragment, ir.NamedComputation)):
            return self.run(op, inputs)
        if isinstance(op, (ir.Call, ir.FragmentCall)):
            return self.run(self.symbols[op.callee_name], inputs)
        if isinstance(op, ir.FuncCall):
            return self.run(self.symbols[op.callee.value], inputs)
        if isinstance(op, ir.For):
            return self.loop(op, inputs)
        if isinstance(op, ir.Reduce):
            return [self.reduced(op.kind, inputs)]
        if op.operation.name == "stablehlo.custom_call" and "has_side_effect" in op.attributes:
            return self.effect(op, inputs)
        if op.operation.name in _ORDERS:
            # The interpreter knows no tokens; here they order nothing, so that any value may stand for one.
            kind = ir.Type.parse("tensor<i1>", ir.context())
            value = {"value": ir.Attribute.parse("dense<false> : tensor<i1>", ir.context())}
            return [ir.create("stablehlo.constant", [], [kind], self.where, value).result]
        if op.operation.name == "sdy.constant":
            attribute = {"value": op.attributes["value"]}
            return [ir.create("stablehlo.constant", [], [op.results[0].type], self.where, attribute).result]
        return list(ir.clone_with(op, values, self.where).results)

    def effect(self, op: Any, inputs: Sequence[Any]) -> list[Any]:
        """Counts an effect; its results."""
        self.effects[mlir.StringAttr(op.attributes["call_target_name"]).value] += 1
        made = []
        for i, result in enumerate(op.results):
            kind = _plain(result.type)
            number = {"value": mlir.Attribute.parse(f"dense<1000> : {kind}", ir.context())}
            more = ir.create("stablehlo.constant", [], [kind], self.where, number).result
            given = inputs[i] if i < len(inputs) else more
            made.append(ir.create("stablehlo.add", [given, more], [kind], self.where).result)
        return made

    def loop(self, op: ir.For, carried: list[Any]) -> list[Any]:
        """Iteration after iteration."""
        kind = _plain(op.args[-1].type)
        for i in range(op.trip_count):
            value = {"value": mlir.Attribute.parse(f"dense<{i}> : {kind}", ir.context())}
            index = ir.create("stablehlo.constant", [], [kind], self.where, value).result
            carried = self.run(op, [*carried, index])
        return carried

    def reduced(self, kind: str, inputs: list[Any]) -> Any:
        """One value for several."""
        total, *rest = inputs
        for value in rest:
            total = ir.create(f"stablehlo.{_REDUCE[kind]}", [total, value], [total.type], self.where).result
        return total
