"""A whole step over parts of stacks: every stacked argument becomes one argument per stage.

The jaxpr of the step, with backward pass and optimizer, is interpreted over values that are arrays or
`Stacked`.  Each primitive has a rule, by which it computes part by part.  The rules of calls, loops and
branches, which hold jaxprs, are here.  Without a rule the parts are joined, which a warning reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from mpmd.jax_compat import as_of, place_of, rebind, scan_counts
from mpmd.tracing.names import decode
from mpmd.tracing.stages.stacked.stacked import Stacked, in_parts, is_stacked

Rule = Callable[["PartwiseInterpreter", Any, list[Any]], list[Any] | None]
"""(interpreter, equation, operands) → results; None if it cannot be computed part by part."""


class Zeros:
    """A part that is known to be zero, of the gradient of a slice; no operation computes it."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), dtype


class PartwiseInterpreter:
    """Evaluates jaxprs over arrays and `Stacked`.

    Attributes:
        rules: by the name of the primitive.
        from_arrays: primitives whose rules may create stacks, of operands that are not.
        divisions: the lengths of the parts of each stack of the step.
        joined: what could not be computed part by part: a text for each equation.
    """

    def __init__(
        self, rules: Mapping[str, Rule], from_arrays: Collection[str], divisions: Sequence[Sequence[int]]
    ) -> None:
        self.rules, self.from_arrays = rules, from_arrays
        self.divisions = [tuple(lengths) for lengths in divisions]
        self.joined: dict[str, None] = {}
        self._broadcasts: dict[int, tuple[Any, Any, Any]] = {}  # id → the value, its equation, its operand
        self._whole: dict[int, tuple[Stacked, Any]] = {}
        self._place = ""  # of the equation around those that are evaluated

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr; stacks in them have arrays as parts."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        outside, self._whole = self._whole, {}
        for equation in jaxpr.eqns:
            results = self.evaluate(equation, [read(atom) for atom in equation.invars])
            env.update(zip(equation.outvars, results, strict=True))
        self._whole = outside
        return [with_arrays(read(atom)) for atom in jaxpr.outvars]

    def evaluate(self, equation: Any, operands: list[Any]) -> list[Any]:
        """The results of an equation: by its rule, or of joined operands."""
        rule = self.rules.get(equation.primitive.name)
        has_stacks = any(isinstance(value, Stacked) for value in operands)
        if rule is not None and (has_stacks or equation.primitive.name in self.from_arrays):
            around, self._place = self._place, place_of(equation) or self._place
            with as_of(equation):
                results = rule(self, equation, operands)
            self._place = around
            if results is not None:
                return results
        if not has_stacks:
            results = rebind(equation, operands)
            if equation.primitive.name == "broadcast_in_dim":
                self._broadcasts[id(results[0])] = results[0], equation, operands[0]
            return results
        self._note_join(equation, operands)
        return rebind(equation, [self.joined_value(value) for value in operands])

    def joined_value(self, value: Any) -> Any:
        """A stack as one array, joined once in a jaxpr."""
        if not isinstance(value, Stacked):
            return value
        if id(value) not in self._whole:
            self._whole[id(value)] = value, with_arrays(value).whole()
        return self._whole[id(value)][1]

    def part(self, value: Any, like: Stacked, number: int) -> Any:
        """The part of an operand of an elementwise operation that belongs to a part of a stack."""
        if isinstance(value, Stacked):
            return value.parts[number]
        if not jnp.shape(value) or jnp.shape(value)[like.dim] == 1:
            return value
        broadcast = self._broadcasts.get(id(value))
        if broadcast is not None and like.dim not in broadcast[1].params["broadcast_dimensions"]:
            shape = list(jnp.shape(value))
            shape[like.dim] = like.lengths[number]
            return jax.lax.broadcast_in_dim(broadcast[2], shape, broadcast[1].params["broadcast_dimensions"])
        return in_parts(value, like.lengths, like.dim).parts[number]

    def like(self, value: Any, like: Any) -> Any:
        """A value in parts if another one is, and in one array if that is."""
        if isinstance(like, Stacked):
            if isinstance(value, Stacked) and (value.dim, value.lengths) == (like.dim, like.lengths):
                return value
            whole = self.joined_value(value)
            return Stacked([array(self.part(whole, like, k)) for k in range(len(like.parts))], like.dim)
        return self.joined_value(value)

    def _note_join(self, equation: Any, operands: Sequence[Any]) -> None:
        stack = next(value for value in operands if isinstance(value, Stacked))
        place = place_of(equation) or self._place
        sizes = ",".join(map(str, stack.shape))
        self.joined[
            f"{equation.primitive.name} cannot be computed in parts: the {len(stack.parts)} parts of a stack "
            f"{stack.dtype}[{sizes}] are joined on one mesh" + (f" ({place})" if place else "")
        ] = None


def array(part: Any) -> Any:
    return jnp.zeros(part.shape, part.dtype) if isinstance(part, Zeros) else part


def with_arrays(value: Any) -> Any:
    """A value whose parts, if it is a stack, are arrays."""
    return Stacked(list(map(array, value.parts)), value.dim) if isinstance(value, Stacked) else value


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
        results = of.run(body.jaxpr, body.consts, [*given[:constants], *state, *inside])
        return results[:carried], [_moved(value, 1) for value in results[carried:]]

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
        shapes = jax.eval_shape(after, state, *more)
        changed = [i for i, value in enumerate(shapes) if is_stacked(value) and not is_stacked(state[i])]
        of.joined = dict(joined)  # those of the last pass count
        if not changed:
            return state
        state = [of.like(value, shapes[i]) if i in changed else value for i, value in enumerate(state)]


def _like(of: PartwiseInterpreter, values: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    return [of.like(value, other) for value, other in zip(values, like, strict=True)]


def _moved(value: Any, by: int) -> Any:
    """A stack whose dim has another number inside of the loop."""
    return Stacked(value.parts, value.dim + by) if isinstance(value, Stacked) else value
