"""What of a traced step its results depend on, and the names in it."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun

from mpmd.jax_compat import inner_jaxprs, struct_of, without_dead_code
from mpmd.tracing.names import decode

_KINDS = ("comp", "tensor")


def names_in(jaxpr: Any) -> set[str]:
    """The names of computations and tensors that a jaxpr runs, at any depth."""
    found: set[str] = set()
    todo, seen = [jaxpr], set[int]()
    while todo:
        current = todo.pop()
        if id(current) in seen:  # JAX shares the jaxprs of functions that are called several times
            continue
        seen.add(id(current))
        for equation in current.eqns:
            if _never_runs(equation):
                continue
            kind, name = decode(str(equation.params.get("name", ""))) or ("", "")
            if kind in _KINDS:
                found.add(name)
            todo += inner_jaxprs(equation)
    return found


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
        return traced.lower(lowering_platforms=(platform,))
    except (TypeError, RuntimeError):
        live = without_dead_code(traced.jaxpr.jaxpr, keep_inputs=True)
        if _equations(live) == _equations(traced.jaxpr.jaxpr):
            raise
    closed, results = traced.jaxpr.replace(jaxpr=live), jax.tree.structure(traced.out_info)

    def step(*arguments: Any) -> Any:
        return jax.tree.unflatten(results, jaxpr_as_fun(closed)(*arguments))

    shapes = [struct_of(v.aval) for v in live.invars]
    return jax.jit(step, keep_unused=True).trace(*shapes).lower(lowering_platforms=(platform,))


def _equations(jaxpr: Any) -> int:
    inside = (inner for equation in jaxpr.eqns for inner in inner_jaxprs(equation))
    return len(jaxpr.eqns) + sum(map(_equations, inside))
