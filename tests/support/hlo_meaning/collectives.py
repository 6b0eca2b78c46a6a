"""Semantics of collectives: every device's operands in, every device's value out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.collective_groups import collective_groups, permute_pairs
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES, dtype_of
from mpmd.compile.hlo.evaluator.elementwise import combine
from mpmd.compile.hlo.evaluator.values import Array, Value, exact, narrow, simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning


Rows = Sequence[Sequence[Value]]
GroupRule = Callable[[HloInstruction, Rows, list[int], "Meaning"], list[Value]]
"""(instruction, operands of each device, the devices, evaluator) → value of each device."""


def _members(instruction: HloInstruction, devices: list[int], engine: Meaning) -> list[list[int]]:
    """Groups as positions in `devices`.

    Raises:
        HloError: only some members of a group are here: the devices took different branches.
    """
    place = {device: k for k, device in enumerate(devices)}
    out = []
    for group in collective_groups(instruction, engine.replicas, engine.partitions):
        there = [device for device in group if device in place]
        if there and len(there) < len(group):
            missing = sorted(set(group) - set(there))
            raise HloError(
                f"{instruction.name}: devices {there} wait for {missing}, which took another branch"
            )
        if there:
            out.append([place[device] for device in group])
    return out


def _pack(instruction: HloInstruction, values: Sequence[Array]) -> Value:
    return tuple(values) if len(values) > 1 or instruction.shape.is_tuple else values[0]


def _join(computation: HloComputation, parts: Sequence[Array], engine: Meaning) -> Array:
    """The reduction of one array per member, in the members' order."""
    opcode, dtype = simple_opcode(computation), dtype_of(parts[0])
    if opcode in ("add", "multiply") and DTYPES[dtype].kind in ("float", "complex"):
        total = exact(parts[0], dtype)
        for part in parts[1:]:
            total = total + exact(part, dtype) if opcode == "add" else total * exact(part, dtype)
        return narrow(total, dtype)
    total = parts[0]
    for part in parts[1:]:
        if opcode is not None:
            total = combine(opcode, total, part, dtype)
        else:
            total = engine.apply(computation, [total, part], total.shape)
    return total


def _all_reduce(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    out: list[Value] = [None] * len(rows)
    for group in _members(instruction, devices, engine):
        joined = [
            _join(instruction.to_apply, [rows[k][i] for k in group], engine) for i in range(len(rows[0]))
        ]
        for k in group:
            out[k] = _pack(instruction, joined)
    return out


def _all_gather(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    out: list[Value] = [None] * len(rows)
    axis = instruction.dimensions[0]
    for group in _members(instruction, devices, engine):
        joined = [np.concatenate([rows[k][i] for k in group], axis) for i in range(len(rows[0]))]
        for k in group:
            out[k] = tuple(joined) if len(joined) > 1 else joined[0]
    return out


def _reduce_scatter(
    instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning
) -> list[Value]:
    out: list[Value] = [None] * len(rows)
    axis = instruction.dimensions[0]
    for group in _members(instruction, devices, engine):
        joined = [
            _join(instruction.to_apply, [rows[k][i] for k in group], engine) for i in range(len(rows[0]))
        ]
        parts = [np.split(j, len(group), axis) for j in joined]
        for position, k in enumerate(group):
            out[k] = _pack(instruction, [p[position] for p in parts])
    return out


def _all_to_all(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    """Member i sends part j to member j, which stores it at position i."""
    out: list[Value] = [None] * len(rows)
    for group in _members(instruction, devices, engine):
        for position, k in enumerate(group):
            if instruction.dimensions:
                axis = instruction.dimensions[0]
                received = [np.split(rows[sender][0], len(group), axis)[position] for sender in group]
                out[k] = _pack(instruction, [np.concatenate(received, axis)])
            else:
                out[k] = tuple(rows[sender][position] for sender in group)
    return out


def _broadcast(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    """The first member's value; zeros on devices in no group."""
    out = [_pack(instruction, [np.zeros_like(v) for v in row]) for row in rows]
    for group in _members(instruction, devices, engine):
        for k in group:
            out[k] = _pack(instruction, rows[group[0]])
    return out


def _permute(instruction: HloInstruction, rows: Rows, devices: list[int], engine: Meaning) -> list[Value]:
    """The source's value; zeros on devices that are nobody's target."""
    place = {device: k for k, device in enumerate(devices)}
    out = [_pack(instruction, [np.zeros_like(v) for v in row]) for row in rows]
    for source, target in permute_pairs(instruction, engine.replicas, engine.partitions):
        if (source in place) != (target in place):
            raise HloError(f"{instruction.name}: of devices {source} and {target} one took another branch")
        if target in place:
            out[place[target]] = _pack(instruction, rows[place[source]])
    return out


GROUP_RULES: dict[str, GroupRule] = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "collective-broadcast": _broadcast,
    "collective-permute": _permute,
    "reduce-scatter": _reduce_scatter,
}
