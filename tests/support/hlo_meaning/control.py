"""Semantics of calls, loops, branches, tuples and asynchronous pairs.

Devices run in lockstep: a loop continues for those whose condition holds, a branch runs for those that take
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.evaluator.values import Rule, Value
from mpmd.compile.hlo.instruction import HloInstruction
from tests.support.hlo_meaning.collectives import GroupRule, Rows

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning


class Token:
    """The value of a token: nothing but an order."""

    def __repr__(self) -> str:
        return "token"


TOKEN_VALUE = Token()


def _call(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    return engine.run_together(instruction.to_apply, rows, devices)


def _while(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    states = [row[0] for row in rows]
    running = list(range(len(rows)))
    while True:
        active = [devices[k] for k in running]
        again = engine.run_together(instruction.while_condition, [(states[k],) for k in running], active)
        running = [k for k, goes_on in zip(running, again) if bool(goes_on)]
        if not running:
            return states
        after = engine.run_together(
            instruction.while_body, [(states[k],) for k in running], [devices[k] for k in running]
        )
        for k, state in zip(running, after):
            states[k] = state


def _conditional(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    """A boolean chooses the first branch if true; a number outside the branches chooses the last."""
    count = len(instruction.called)
    chosen = []
    for row in rows:
        if row[0].dtype == np.bool_:
            chosen.append(0 if bool(row[0]) else 1)
        else:
            index = int(row[0])
            chosen.append(index if 0 <= index < count else count - 1)
    out: list[Value] = [None] * len(rows)
    for branch in sorted(set(chosen)):
        members = [k for k, c in enumerate(chosen) if c == branch]
        arguments = [(rows[k][branch + 1],) for k in members]
        results = engine.run_together(instruction.called[branch], arguments, [devices[k] for k in members])
        for k, result in zip(members, results):
            out[k] = result
    return out


def _async_start(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    results = engine.run_together(instruction.to_apply, rows, devices)
    rest = instruction.shape.elements[2:]
    contexts = tuple(np.zeros(s.dims, s.numpy_dtype) if s.is_array else TOKEN_VALUE for s in rest)
    return [(tuple(row), result, *contexts) for row, result in zip(rows, results)]


CONTROL_RULES: dict[str, GroupRule] = {
    "async-start": _async_start,
    "call": _call,
    "conditional": _conditional,
    "fusion": _call,
    "while": _while,
}


def _first(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    return operands[0]


def _token(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    return TOKEN_VALUE


def _copy_start(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    contexts = tuple(np.zeros(s.dims, s.numpy_dtype) for s in instruction.shape.elements[2:])
    return (operands[0], operands[0], *contexts)


def _copy_done(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    return operands[0][0]


def _async_done(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    return operands[0][1]


RULES: dict[str, Rule] = {
    "add-dependency": _first,
    "after-all": _token,
    "async-done": _async_done,
    "async-update": _first,
    "copy-done": _copy_done,
    "copy-start": _copy_start,
    "opt-barrier": _first,
}
