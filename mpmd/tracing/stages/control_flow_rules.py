"""Rules of equations that hold jaxprs, over stacks: calls, loops, branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpmd.jax_compat import scan_counts
from mpmd.tracing.names import decode
from mpmd.tracing.stages.interpreter import PartwiseInterpreter, with_arrays
from mpmd.tracing.stages.stacked import Stacked, is_stacked


def call(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """A jit that carries a name of ours remains one, over the parts; any other is inlined."""
    closed, name = equation.params["jaxpr"], equation.params["name"]
    if decode(str(name)) is None:
        return of.run(closed.jaxpr, closed.consts, operands)

    def inner(*values: Any) -> list[Any]:
        return of.run(closed.jaxpr, closed.consts, values)

    inner.__name__ = inner.__qualname__ = name
    return list(jax.jit(inner)(*map(with_arrays, operands)))


def inlined(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """The body of a call that differentiation, which is done, takes as one."""
    body = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    return of.run(getattr(body, "jaxpr", body), getattr(body, "consts", ()), operands)


def of_scan(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Stacks that are constant, carried, or scanned along another dim than the stacked one."""
    params, body = equation.params, equation.params["jaxpr"]
    constants, carried = scan_counts(params)
    given = list(map(with_arrays, operands))
    rows = given[constants + carried :]
    if any(isinstance(value, Stacked) and value.dim == 0 for value in rows):
        return None

    def iteration(state: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        inside = [_moved(value, -1) for value in row]
        made = of.run(body.jaxpr, body.consts, [*given[:constants], *state, *inside])
        return made[:carried], [_moved(value, 1) for value in made[carried:]]

    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)), rows)
    state = _settled(of, given[constants : constants + carried], lambda s, row: iteration(s, row)[0], first)

    def step(now: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        after, stacked = iteration(now, row)
        return _like(of, after, now), stacked

    final, stacked = jax.lax.scan(step, state, rows, params["length"], params["reverse"], params["unroll"])
    return [*final, *stacked]


def of_while(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """Stacks that are constant or carried."""
    params = equation.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    given = list(map(with_arrays, operands))

    def after(state: Sequence[Any]) -> list[Any]:
        return of.run(body.jaxpr, body.consts, [*given[ends[0] : ends[1]], *state])

    state = _settled(of, given[ends[1] :], after)
    final = jax.lax.while_loop(
        lambda s: of.run(condition.jaxpr, condition.consts, [*given[: ends[0]], *s])[0],
        lambda s: _like(of, after(s), s),
        state,
    )
    return list(final)


def of_cond(of: PartwiseInterpreter, equation: Any, operands: list[Any]) -> list[Any] | None:
    """A result is in parts if it is in one of the branches."""
    which, *given = map(with_arrays, operands)
    if isinstance(which, Stacked):
        return None

    def branch(closed: Any) -> Callable[..., list[Any]]:
        return lambda *values: of.run(closed.jaxpr, closed.consts, values)

    branches = [branch(closed) for closed in equation.params["branches"]]
    shapes = [jax.eval_shape(function, *given) for function in branches]
    like = [next(filter(is_stacked, values), values[0]) for values in zip(*shapes)]
    alike = [lambda *values, f=function: _like(of, f(*values), like) for function in branches]
    return list(jax.lax.switch(which, alike, *given))


def _settled(
    of: PartwiseInterpreter, state: list[Any], after: Callable[..., list[Any]], *more: Any
) -> list[Any]:
    """The first values of a loop, in parts where an iteration, `after(state, *more)`, returns parts."""
    joined = dict(of.joined)
    while True:
        made = jax.eval_shape(after, state, *more)
        changed = [i for i, value in enumerate(made) if is_stacked(value) and not is_stacked(state[i])]
        of.joined = dict(joined)  # those of the last pass count
        if not changed:
            return state
        state = [of.like(value, made[i]) if i in changed else value for i, value in enumerate(state)]


def _like(of: PartwiseInterpreter, values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    return [of.like(value, other) for value, other in zip(values, like, strict=True)]


def _moved(value: Any, by: int) -> Any:
    """A stack whose dim has another number inside of the loop."""
    return Stacked(value.parts, value.dim + by) if isinstance(value, Stacked) else value
