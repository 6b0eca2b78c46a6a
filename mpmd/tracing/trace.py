"""From a JAX function to a module in our dialect, with names, loops and the user's source lines.

`live_names` are the names on which results depend: an assignment needs no others.

Types of explicit axes are dropped.  JAX lowers them to a sharding constraint behind every operation:

    %1 = dot_general %a, %b            -->  %1 = dot_general %a, %b
    %2 = sharding_constraint %1 {"x"}       ...
    %3 = sharding_constraint %2 {"y"}       %3 = sharding_constraint %1 {"y"}      of `jax.reshard`

Constraints that `jax.reshard` and `jax.lax.with_sharding_constraint` require stay, so that Shardy chooses all
other shardings, and reductions and gathers move as in a step with automatic axes.  An axis over which a value
is unreduced says when to reduce it, and does not change the value: the constraint goes, and the partitioner
decides.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun

from mpmd import ir
from mpmd.errors import PlacementError
from mpmd.jax_compat import inner_jaxprs, lower_with_memories, struct_of, without_dead_code
from mpmd.passes.export.offload import ADVISORY
from mpmd.support.user_code import frames_of
from mpmd.tracing.expand import Expansion
from mpmd.tracing.names import decode

_KINDS = ("comp", "tensor")


def names_in(jaxpr: Any) -> set[str]:
    """The names of computations and tensors that a jaxpr runs, at any depth."""
    return {name for _, name in names_run_by(jaxpr.eqns)}


def names_run_by(equations: Iterable[Any]) -> set[tuple[str, str]]:
    """The kinds, `comp` or `tensor`, and the names that equations run, at any depth."""
    names: set[tuple[str, str]] = set()
    todo, seen = list(equations), set[int]()
    while todo:
        equation = todo.pop()
        if _never_runs(equation):
            continue
        kind, name = decode(str(equation.params.get("name", ""))) or ("", "")
        if kind in _KINDS:
            names.add((kind, name))
        for jaxpr in inner_jaxprs(equation):
            if id(jaxpr) not in seen:  # JAX shares the jaxprs of functions that are called several times
                seen.add(id(jaxpr))
                todo += jaxpr.eqns
    return names


def _never_runs(equation: Any) -> bool:
    """Whether an equation is a loop of no iterations."""
    params = equation.params
    if equation.primitive.name == "scan":
        return bool(params["length"] == 0)
    if equation.primitive.name != "while":
        return False
    condition, constants = params["cond_jaxpr"], params["cond_nconsts"]
    given = [*equation.invars[:constants], *equation.invars[constants + params["body_nconsts"] :]]
    operands = dict(zip(condition.jaxpr.invars, given, strict=True))
    needed = without_dead_code(condition.jaxpr)
    if not all(isinstance(operands[v], Literal) for v in needed.invars):
        return False
    with jax.ensure_compile_time_eval():
        goes_on = jaxpr_as_fun(condition.replace(jaxpr=needed))(*[operands[v].val for v in needed.invars])
        return not goes_on[0]


def live_names(jaxpr: Any) -> set[str]:
    """The names that the results or the effects of a jaxpr depend on."""
    return names_in(without_dead_code(jaxpr))


def lower(traced: jax.stages.Traced, platform: str) -> jax.stages.Lowered:
    """A step as StableHLO, with all its arguments.

    JAX leaves out dead code only together with unused arguments, and it may hold what cannot be lowered: the
    forward derivative of a `jax.custom_vjp`, an operation of the user's without a rule for the platform.
    """
    try:
        return lower_with_memories(traced, platform, ADVISORY)
    except (TypeError, RuntimeError):
        live = without_dead_code(traced.jaxpr.jaxpr, keep_inputs=True)
        if _equations(live) == _equations(traced.jaxpr.jaxpr):
            raise
    closed, results = traced.jaxpr.replace(jaxpr=live), jax.tree.structure(traced.out_info)

    def step(*arguments: Any) -> Any:
        return jax.tree.unflatten(results, jaxpr_as_fun(closed)(*arguments))

    shapes = [struct_of(v.aval) for v in live.invars]
    return lower_with_memories(jax.jit(step, keep_unused=True).trace(*shapes), platform, ADVISORY)


def _equations(jaxpr: Any) -> int:
    inside = (inner for equation in jaxpr.eqns for inner in inner_jaxprs(equation))
    return len(jaxpr.eqns) + sum(map(_equations, inside))


_REQUIRED_BY = ("device_put", "reshard", "sharding_constraint")
"""Primitives that take a sharding from the user, and change nothing else."""

_SHARDING = "sdy.sharding"


def remove_sharding_types(module: ir.Module) -> None:
    """Removes the constraints of types from a module that JAX lowered with explicit axes.

    Raises:
        PlacementError: a `jax.shard_map` takes or returns terms of a sum over devices.
    """
    with ir.context(), ir.Location.unknown():
        for op in ir.walk(module, ir.sdy.ShardingConstraintOp):
            if not _is_required(op):
                ir.replace(op, [op.input])
        for region in ir.walk(module, ir.sdy.ManualComputationOp):
            _check_reduced(region)
        main = ir.symbol_table(module)["main"]
        for row, count in (("arg_attrs", len(main.args)), ("res_attrs", len(main.returned))):
            dicts = ir.attribute_dicts(main, row, count)
            for attributes in dicts:
                attributes.pop(_SHARDING, None)
            ir.put_attribute_dicts(main, row, dicts)


def _check_reduced(region: ir.Op) -> None:
    """Refuses a `jax.shard_map` that takes or returns terms of a sum over devices.

    Raises:
        PlacementError: it does.
    """
    for row in ("in_shardings", "out_shardings"):
        for sharding in ir.sdy.TensorShardingPerValueAttr(region.attributes[row]).shardings:
            unreduced = ir.sdy.TensorShardingAttr(sharding).unreduced_axes
            axes = [str(ir.sdy.AxisRefAttr(axis).name) for axis in unreduced]
            if axes:
                frames = frames_of(region)
                raise PlacementError(
                    f"a value is unreduced over {', '.join(axes)} in the {row[:-10]}_specs of jax.shard_map"
                    + (f", {frames[0]}" if frames else "")
                    + f"\n  devices add their terms within it: jax.lax.psum(value, {axes[0]!r}), and specs "
                    "without unreduced; gradients are reduced once in a step in any case"
                )


def _is_required(op: ir.Op) -> bool:
    """Whether a constraint is of a primitive of the user's: its name ends the path in the location."""
    path = re.match(r'loc\("([^"]*)"', str(op.location))
    primitive = path[1].rpartition("/")[2] if path else ""
    sharding = ir.sdy.TensorShardingAttr(op.sharding)
    return primitive in _REQUIRED_BY and bool(op.input.type.shape) and not sharding.unreduced_axes


def to_module(lowered: jax.stages.Lowered, topology: ir.TopologyAttr, *, explicit: bool = False) -> ir.Module:
    """The module of a lowered step, its names and loops in our dialect.

    Args:
        lowered: by JAX.
        topology: of the step.
        explicit: whether it was traced with explicit axes.

    Requires: `lowered` was lowered with `keep_unused=True`.
    """
    code = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(code)
    module = ir.parse(code.getvalue())
    if explicit:
        remove_sharding_types(module)
    expand(module, topology)
    return module


def expand(module: ir.Module, topology: ir.TopologyAttr) -> None:
    with ir.context(), ir.Location.unknown():
        Expansion(module, topology).run()
