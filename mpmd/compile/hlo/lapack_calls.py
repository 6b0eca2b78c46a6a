"""The LAPACK calls that JAX writes into programs for CPUs: their options, operands and results.

    custom-call(a), custom_call_target="lapack_spotrf_ffi", backend_config={uplo = 76 : ui8}

Options are character codes: 76 is `L`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError

_TARGET = re.compile(r"lapack_([sdcz])(\w+)_ffi")
_OPTION = re.compile(r"(\w+) = (-?\d+)")
_CHOICES = {"uplo": "LU", "side": "LR", "diag": "NU", "trans_x": "NTC", "mode": "ANOSV"}
_NEEDED = {"trsm": ("uplo", "side", "diag", "trans_x")}
_REAL = {"c64": "f32", "c128": "f64"}
Signature = Callable[[Shape, Sequence[Shape]], list[Shape | None]]
"""The results, from the matrices and all operands; None for those that depend on the options."""


def options_of(instruction: HloInstruction) -> dict[str, str]:
    """The options of a call, as characters.

    Raises:
        HloError: an option has a character that LAPACK does not define for it, or is missing.
    """
    found = {}
    for name, code in _OPTION.findall(instruction.backend_config):
        choices = _CHOICES.get(name)
        if choices is None:
            continue
        known = {ord(c): c for c in choices}
        if int(code) not in known:
            expected = ", ".join(f"{n} ({c})" for n, c in known.items())
            raise HloError(
                f"option {name} of {instruction.custom_call_target} must be one of {expected}, got {code}"
            )
        found[name] = known[int(code)]
    target = _TARGET.fullmatch(instruction.custom_call_target)
    for name in _NEEDED.get(target[2], ()) if target else ():
        if name not in found:
            raise HloError(f"{instruction.custom_call_target} needs the option {name}")
    return found


def check_lapack_call(instruction: HloInstruction) -> None:
    """Options, operands and results of a custom call, if it is one of LAPACK.

    Raises:
        HloError: LAPACK has no such call.
    """
    target = _TARGET.fullmatch(instruction.custom_call_target)
    signature = _SIGNATURES.get(target[2]) if target else None
    if signature is None:
        return
    options_of(instruction)
    name, operands = instruction.custom_call_target, [o.shape.logical for o in instruction.operands]
    if not operands or not operands[0].is_array or operands[0].rank < 2:
        raise HloError(f"{name} takes a matrix, or several in the last two dims, got {operands}")
    expected = signature(operands[0], operands)
    given = instruction.shape.logical
    parts = given.elements if given.is_tuple else (given,)
    if len(parts) != len(expected):
        raise HloError(f"{name} gives {len(expected)} results, got {given}")
    for number, (part, shape) in enumerate(zip(parts, expected)):
        if shape is not None and part is not shape:
            raise HloError(f"result {number} of {name} should be {shape}, but is {part}")


def _info(a: Shape) -> Shape:
    return Shape("s32", a.dims[:-2])


def _smaller(a: Shape) -> tuple[int, ...]:
    return (*a.dims[:-2], min(a.dims[-2:]))


def _system(a: Shape, operands: Sequence[Shape]) -> list[Shape | None]:
    if len(operands) < 2:
        raise HloError("a triangular system takes a matrix and right-hand sides")
    return [operands[1]]


def _eigen(a: Shape, operands: Sequence[Shape]) -> list[Shape | None]:
    return [a, Shape(_REAL.get(a.dtype, a.dtype), a.dims[:-1]), _info(a)]


def _singular(a: Shape, operands: Sequence[Shape]) -> list[Shape | None]:
    return [a, Shape(_REAL.get(a.dtype, a.dtype), _smaller(a)), None, None, _info(a)]


_SIGNATURES: dict[str, Signature] = {
    "potrf": lambda a, operands: [a, _info(a)],
    "trsm": _system,
    "getrf": lambda a, operands: [a, Shape("s32", _smaller(a)), _info(a)],
    "geqrf": lambda a, operands: [a, Shape(a.dtype, _smaller(a))],
    "orgqr": lambda a, operands: [a],
    "ungqr": lambda a, operands: [a],
    "syevd": _eigen,
    "heevd": _eigen,
    "gesdd": _singular,
}
