"""Queries of rules about values: constants, splats, sizes, single users."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import SIMPLE, identity_of, simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction

_SPLAT_LIMIT = 1024


def literal_of(value: HloInstruction) -> np.ndarray | None:
    """The array of a constant; None for everything else."""
    literal = value.literal
    return literal if isinstance(literal, np.ndarray) else None


def splat(value: HloInstruction) -> Any:
    """The NumPy scalar that all elements of a value equal, bit for bit; None if that is not evident."""
    while value.opcode in ("broadcast", "reshape", "bitcast", "copy", "transpose"):
        value = value.operands[0]
        if not value.shape.is_array:
            return None
    literal = literal_of(value)
    if literal is None or not 0 < literal.size <= _SPLAT_LIMIT:
        return None
    flat = literal.reshape(-1)
    first = flat[0]
    if flat.size == 1:
        return first
    data = np.ascontiguousarray(flat).tobytes()
    return first if data == data[: flat.itemsize] * flat.size else None


def integer(value: HloInstruction) -> int | None:
    """The integer of a scalar or splat of integers."""
    found = splat(value)
    if found is None or not (value.shape.info.is_integral or value.shape.dtype == "pred"):
        return None
    return int(found)


def is_splat(value: HloInstruction, number: float) -> bool:
    """True if all elements equal `number`; both zeros equal 0."""
    found = splat(value)
    return found is not None and bool(found == number)


def is_negative_zero(value: HloInstruction) -> bool:
    """True if all elements are -0.0."""
    if value.shape.info.kind != "float":
        return False
    found = splat(value)
    return found is not None and bool(found == 0) and bool(np.signbit(np.float64(found)))


def is_number(value: HloInstruction) -> bool:
    """True for floats and complex numbers: arithmetic rounds, and NaN exists."""
    return value.shape.info.kind in ("float", "complex")


def only_user(value: HloInstruction) -> HloInstruction | None:
    """The one instruction that reads a value which is not the result of its computation."""
    if len(value.users) != 1 or value.is_root:
        return None
    return next(iter(value.users))


def reducer(computation: HloComputation) -> str | None:
    """The opcode of a computation `(a, b) -> opcode(a, b)` on scalars."""
    return simple_opcode(computation)


def is_identity(opcode: str, value: HloInstruction) -> bool:
    """True if combining with `value` changes nothing (but the sign of a zero, for add)."""
    found = splat(value)
    if found is None or opcode not in SIMPLE:
        return False
    return bool(found == identity_of(opcode, value.shape.dtype))


def inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    out = [0] * len(permutation)
    for i, p in enumerate(permutation):
        out[p] = i
    return tuple(out)


def is_trivial(value: HloInstruction) -> bool:
    """True for an array without elements."""
    return value.shape.is_array and 0 in value.shape.dims
