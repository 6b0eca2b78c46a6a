"""Finds losses that divide by a count of their own rows: the mean of microbatches is then not the batch's.

    (losses * mask).sum() / mask.sum()

of each microbatch, and the mean of these, is the mean of the whole batch only if `mask.sum()` is equal in
all: elsewhere tokens of microbatches with few of them weigh more.  A divisor is found in the jaxpr of the
loss where it is a scalar sum of batches alone, perhaps with constants, and the loss is linear in the
quotient.  All else may be meant: a count that is closed over or given, a divisor of each row, a deviation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpmd.jax_compat import inner_jaxprs, place_of


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a value is computed from.

    Attributes:
        batch, others: whether from a batch; whether from parameters and what else is closed over.
        is_count: whether it is a scalar sum of batches alone, perhaps with constants, or repeated over dims.
    """

    batch: bool = False
    others: bool = False
    is_count: bool = False


_CONSTANT, _BATCH, _OTHER = _Origin(), _Origin(batch=True), _Origin(others=True)
_KEEPS_COUNT = {"convert_element_type", "max", "min", "add", "sub", "mul", "clamp", "select_n", "copy"}
_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
_LINEAR = {"neg", "convert_element_type", "reduce_sum", "copy", *_SHAPES}
_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}


def own_divisor(jaxpr: Any, batches: int) -> str | None:
    """Where the first result is divided by a count of the batches: `file:line (function)`; None if nowhere.

    Args:
        jaxpr: of one microbatch.
        batches: how many inputs are batches, the last ones; JAX puts closed-over values before them.

    Cost: linear in the equations, those in calls included.
    """
    inputs = dict.fromkeys(jaxpr.invars[len(jaxpr.invars) - batches :], _BATCH)
    waiting = [(_Scope(jaxpr, inputs, None), jaxpr.outvars[0])]
    seen: set[tuple[_Scope, Any]] = set()
    while waiting:
        scope, value = waiting.pop()
        if hasattr(value, "val") or (scope, value) in seen:
            continue
        seen.add((scope, value))
        place, more = scope.linear_in(value)
        if place is not None:
            return place
        waiting += more
    return None


class _Scope:
    """A jaxpr with the origins of its values, and the equations that compute them.

    Args:
        jaxpr: the jaxpr.
        inputs: the origins of its inputs.
        caller: the scope and the equation that call it.
    """

    def __init__(self, jaxpr: Any, inputs: dict[Any, _Origin], caller: tuple[_Scope, Any] | None) -> None:
        self._jaxpr, self._caller = jaxpr, caller
        self._origins, self._made_by = dict(inputs), dict[Any, Any]()
        self._inner: dict[int, _Scope] = {}
        for equation in jaxpr.eqns:
            self._made_by.update(dict.fromkeys(equation.outvars, equation))
            self._origins.update(zip(equation.outvars, self._of(equation), strict=True))

    def _origin(self, value: Any) -> _Origin:
        return _CONSTANT if hasattr(value, "val") else self._origins.get(value, _OTHER)

    def _of(self, equation: Any) -> list[_Origin]:
        """The origins of the results of an equation."""
        given = [self._origin(value) for value in equation.invars]
        called = _called(equation)
        if called is not None:
            inner = _Scope(called, dict(zip(called.invars, given, strict=True)), (self, equation))
            self._inner[id(equation)] = inner
            return [inner._origin(value) for value in called.outvars]
        batch, others = any(of.batch for of in given), any(of.others for of in given)
        name = equation.primitive.name
        counts = batch and not others
        if name == "reduce_sum":
            counts &= equation.outvars[0].aval.shape == ()
        elif name in _SHAPES:
            counts &= given[0].is_count
        elif name in _KEEPS_COUNT:
            counts &= all(of.is_count or not of.batch for of in given[name == "select_n" :])
        else:
            counts = False
        return [_Origin(batch, others, counts)] * len(equation.outvars)

    def linear_in(self, value: Any) -> tuple[str | None, list[tuple[_Scope, Any]]]:
        """The place, if a value is divided by a count; and what it is linear in, each with its scope."""
        equation = self._made_by.get(value)
        if equation is None:
            if self._caller is None or value not in self._jaxpr.invars:
                return None, []
            scope, call = self._caller
            return None, [(scope, call.invars[self._jaxpr.invars.index(value)])]
        name, operands = equation.primitive.name, equation.invars
        inner = self._inner.get(id(equation))
        if inner is not None:
            return None, [(inner, inner._jaxpr.outvars[equation.outvars.index(value)])]
        if name == "div":
            above, below = operands
            place = place_of(equation) if self._origin(below).is_count else None
            return place, [(self, above)]
        if name == "mul":
            return self._linear_in_product(operands)
        followed = operands if name in ("add", "sub") else operands[:1] if name in _LINEAR else []
        return None, [(self, operand) for operand in followed]

    def _linear_in_product(self, factors: Sequence[Any]) -> tuple[str | None, list[tuple[_Scope, Any]]]:
        """A factor is followed if the other one is not of the batch: that may correct the mean."""
        followed: list[tuple[_Scope, Any]] = []
        for factor, other in (factors, reversed(factors)):
            if self._is_inverse(factor) and self._origin(other).others:
                return place_of(self._made_by[factor]), []
            if not self._origin(other).batch:
                followed.append((self, factor))
        return None, followed

    def _is_inverse(self, value: Any) -> bool:
        """Whether it is a constant divided by a count."""
        equation = None if hasattr(value, "val") else self._made_by.get(value)
        if equation is None or equation.primitive.name != "div":
            return False
        above, below = map(self._origin, equation.invars)
        return below.is_count and not above.batch


def _called(equation: Any) -> Any:
    """The jaxpr of an equation that does nothing but call it; None for all others."""
    if equation.primitive.name not in _CALLS:
        return None
    (called, *_) = inner_jaxprs(equation) or [None]
    return called if called is not None and len(called.invars) == len(equation.invars) else None
