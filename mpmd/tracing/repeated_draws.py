"""Finds random numbers of a loss that are equal in all microbatches: one mask of dropout for all of them.

    def loss(params, x): ... jax.random.bernoulli(key, 0.9, x.shape) ...

draws the same bits for each microbatch, since nothing of its key is computed from the microbatch.  With the
whole batch at once, each row has bits of its own.  Bits whose shape does not depend on the number of rows,
such as noise added to weights, are equal for all rows of a whole batch, too: they are right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpmd.jax_compat import inner_jaxprs, places_of, scan_counts
from mpmd.support.user_code import users_place


@dataclasses.dataclass(frozen=True)
class RepeatedDraw:
    """Random numbers from a key that no batch is a part of.

    Attributes:
        shape: of the numbers.
        place: where the loss draws them, `file:line (function)`, or "".
    """

    shape: tuple[int, ...]
    place: str


def repeated_draws(jaxpr: Any, batches: int) -> list[RepeatedDraw]:
    """The draws from keys that are not computed from a batch, in program order.

    Draws are not found in calls whose operands are not the inputs of the called jaxpr.

    Args:
        jaxpr: of one microbatch.
        batches: how many inputs are batches, the last ones; JAX puts closed-over values before them.

    Cost: linear in the equations; bodies of loops are visited again while more of their carry varies.
    """
    found: list[RepeatedDraw] = []
    given = [False] * (len(jaxpr.invars) - batches) + [True] * batches
    _visit(jaxpr, given, "", found)
    return found


def _visit(jaxpr: Any, given: Sequence[bool], place: str, found: list[RepeatedDraw]) -> list[bool]:
    """Whether each result of a jaxpr varies with the batches, as each input does or not; adds its draws."""
    varies = dict(zip(jaxpr.invars, given, strict=True))

    def of(value: Any) -> bool:
        return not hasattr(value, "val") and varies.get(value, False)

    for equation in jaxpr.eqns:
        operands = [of(value) for value in equation.invars]
        results = _results(equation, operands, users_place(places_of(equation)) or place, found)
        varies.update(zip(equation.outvars, results, strict=True))
    return [of(value) for value in jaxpr.outvars]


def _results(equation: Any, operands: list[bool], place: str, found: list[RepeatedDraw]) -> list[bool]:
    name, inner = equation.primitive.name, inner_jaxprs(equation)
    if name in ("random_bits", "random_gamma") and not operands[0]:
        found.append(RepeatedDraw(tuple(equation.outvars[0].aval.shape), place))
    elif name == "cond":
        branches = [_visit(branch, operands[1:], place, found) for branch in inner]
        return [operands[0] or any(of_one) for of_one in zip(*branches, strict=True)]
    elif name == "while":
        body, constants = equation.params["body_jaxpr"].jaxpr, equation.params["cond_nconsts"]
        carried = constants + equation.params["body_nconsts"]
        return _loop(body, operands[constants:carried], operands[carried:], [], place, found)
    elif name == "scan":
        constants, carried = scan_counts(equation.params)
        carry, rows = operands[constants : constants + carried], operands[constants + carried :]
        return _loop(inner[0], operands[:constants], carry, rows, place, found)
    elif inner and len(inner[0].invars) == len(operands):
        return _visit(inner[0], operands, place, found)
    return [any(operands)] * len(equation.outvars)


def _loop(
    body: Any,
    constants: list[bool],
    carry: list[bool],
    rows: list[bool],
    place: str,
    found: list[RepeatedDraw],
) -> list[bool]:
    while True:
        draws: list[RepeatedDraw] = []
        results = _visit(body, [*constants, *carry, *rows], place, draws)
        later = [before or after for before, after in zip(carry, results)]
        if later == carry:
            found += draws
            return [*carry, *results[len(carry) :]]
        carry = later
