"""Finds losses that divide by a count of their own rows: the mean of microbatches is then not the batch's.

    (losses * mask).sum() / mask.sum()

of each microbatch, and the mean of these, is the mean of the whole batch only if `mask.sum()` is equal in
all: elsewhere tokens of microbatches with few of them weigh more.  A divisor is found in the jaxpr of the
loss where it is a scalar sum of batches alone, perhaps with constants, and the loss is linear in the
quotient.  All else may be meant: a count that is closed over or given, a divisor of each row, a deviation.
"""

from __future__ import annotations

import dataclasses
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
    """
    inputs = dict.fromkeys(jaxpr.invars[len(jaxpr.invars) - batches :], _BATCH)
    return _Scope(jaxpr, inputs).divisor(jaxpr.outvars[0])


class _Scope:
    """A jaxpr with the origins of its values, and the equations that compute them."""

    def __init__(self, jaxpr: Any, inputs: dict[Any, _Origin]) -> None:
        self._origins, self._made_by = dict(inputs), dict[Any, Any]()
        self._inner: dict[int, _Scope] = {}
        for equation in jaxpr.eqns:
            self._made_by.update(dict.fromkeys(equation.outvars, equation))
            self._origins.update(zip(equation.outvars, self._of(equation), strict=True))
        self.results = [self._origin(value) for value in jaxpr.outvars]
        self.jaxpr = jaxpr

    def _origin(self, value: Any) -> _Origin:
        return _CONSTANT if hasattr(value, "val") else self._origins.get(value, _OTHER)

    def _of(self, equation: Any) -> list[_Origin]:
        """The origins of the results of an equation."""
        given = [self._origin(value) for value in equation.invars]
        called = _called(equation)
        if called is not None:
            inner = _Scope(called, dict(zip(called.invars, given, strict=True)))
            self._inner[id(equation)] = inner
            return inner.results
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

    def divisor(self, value: Any) -> str | None:
        """The place of a division by a count in which a value is linear."""
        equation = self._made_by.get(value) if not hasattr(value, "val") else None
        if equation is None:
            return None
        name, operands = equation.primitive.name, equation.invars
        inner = self._inner.get(id(equation))
        if inner is not None:
            result = inner.jaxpr.outvars[equation.outvars.index(value)]
            if result in inner.jaxpr.invars:
                return self.divisor(operands[inner.jaxpr.invars.index(result)])
            return inner.divisor(result)
        if name == "div":
            return place_of(equation) if self._origin(operands[1]).is_count else self.divisor(operands[0])
        if name in ("add", "sub"):
            return self.divisor(operands[0]) or self.divisor(operands[1])
        if name == "mul":
            return self._divisor_of_product(*operands)
        return self.divisor(operands[0]) if name in _LINEAR else None

    def _divisor_of_product(self, a: Any, b: Any) -> str | None:
        """One factor is divided, and the other one not of the batch: it may correct the mean."""
        for factor, other in ((a, b), (b, a)):
            if not self._origin(other).batch or self._is_inverse(other):
                found = self.divisor(factor)
                if found is not None:
                    return found
            if self._is_inverse(factor) and self._origin(other).others:
                return place_of(self._made_by[factor])
        return None

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
