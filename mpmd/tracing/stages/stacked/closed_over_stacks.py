"""Stacks that a divided scan reads and a loss closes over, such as frozen weights beside their adapters.

No path of the loss's first argument leads to them.  The slices of their rows, one for each stage, are
followed back to the arguments of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from mpmd.jax_compat import inner_jaxprs
from mpmd.tracing.stages.stacked.part_rules import ELEMENTWISE
from mpmd.tracing.stages.stacked.stacked import is_of_rows


def stacked_arguments(jaxpr: Any, divisions: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """The arguments of a step whose rows stages read: number → the lengths of their parts.

    Args:
        jaxpr: of the step, differentiated.
        divisions: the lengths of the parts of each stacked parameter.
    """
    found: dict[int, list[int]] = {}
    for lengths in divisions:
        ends = list(itertools.accumulate(lengths))
        ranges = {(end - length, end) for length, end in zip(lengths, ends)}
        for number in _read_by_rows(jaxpr, ranges, ends[-1], [False] * len(jaxpr.outvars)):
            found.setdefault(number, list(lengths))
    return found


def _read_by_rows(jaxpr: Any, ranges: set[tuple[int, int]], rows: int, wanted: Sequence[bool]) -> set[int]:
    """The inputs of a jaxpr that such slices, or wanted outputs, have the rows of."""
    stacks = {id(v) for v, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}
    for equation in reversed(jaxpr.eqns):
        produced = [id(v) in stacks for v in equation.outvars]
        inner = inner_jaxprs(equation)
        if equation.primitive.name == "slice" and is_of_rows(equation):
            first, end = equation.params["start_indices"][0], equation.params["limit_indices"][0]
            sources = equation.invars if (first, end) in ranges else []
        elif inner:
            sources = []
            for body in inner:
                operands = equation.invars[len(equation.invars) - len(body.invars) :]
                outputs = produced if len(body.outvars) == len(produced) else [False] * len(body.outvars)
                numbers = _read_by_rows(body, ranges, rows, outputs) if operands else set()
                sources += [
                    operands[i] for i in numbers if operands[i].aval.shape == body.invars[i].aval.shape
                ]
        else:
            keeps_rows = equation.primitive.name in (*ELEMENTWISE, "broadcast_in_dim", "reshape")
            sources = equation.invars if keeps_rows and any(produced) else []
        stacks.update(id(v) for v in sources if getattr(v.aval, "shape", ())[:1] == (rows,))
    return {i for i, v in enumerate(jaxpr.invars) if id(v) in stacks}
