"""Queries of the simplifier: constants, shapes, where the pieces of a concatenate begin."""

from __future__ import annotations

import itertools
import re
from typing import Any

from mpmd import ir
from mpmd.passes.structure import constant_text, holds_complex
from mpmd.support.memoisation import memoised

_INTEGER = re.compile(r"(u?)i(\d+)")


class Facts:
    """Facts about ops and values, each computed once.  No op may be erased while it is used."""

    def __init__(self) -> None:
        self._splats: dict[ir.Value, str | None] = {}
        self._offsets: dict[ir.Op, list[int]] = {}

    def splat(self, value: ir.Value) -> str | None:
        """The one element of a constant, or of a constant scalar broadcast, as text; None otherwise."""
        if value not in self._splats:
            self._splats[value] = self._splat(value)
        return self._splats[value]

    def _splat(self, value: ir.Value) -> str | None:
        op = ir.producer(value)
        if op is None:
            return None
        if op.operation.name == "stablehlo.broadcast_in_dim":
            source = op.operands[0]
            return self.splat(source) if source.type.rank == 0 else None
        if op.operation.name != "stablehlo.constant" or not isinstance(value.type, ir.RankedTensorType):
            return None
        if value.type.rank and not holds_complex(op) and not op.attributes["value"].is_splat:
            return None
        match = re.match(r"dense<([^\[\]\"]*)> :", constant_text(op))
        return None if match is None else match[1]

    def integer(self, value: ir.Value) -> int | None:
        """The value of a scalar integer or boolean constant, as a number of its type."""
        if not isinstance(value.type, ir.RankedTensorType) or value.type.rank:
            return None
        kind = integer_kind(value.type)
        text = self.splat(value) if kind is not None else None
        if text is None:
            return None
        return {"true": 1, "false": 0}[text] if text in ("true", "false") else int(text, 0)

    def number(self, value: ir.Value) -> float | None:
        """The decimal number of a splat constant; None if there is none."""
        try:
            return float(self.splat(value) or "")
        except ValueError:
            return None

    def integers(self, values: Any) -> list[int] | None:
        """The values of several scalar integer constants; None unless all are."""
        numbers_of: list[int] = []
        for value in values:
            number = self.integer(value)
            if number is None:
                return None
            numbers_of.append(number)
        return numbers_of

    def offsets(self, op: ir.Op) -> list[int]:
        """Where each operand of a concatenate begins, and where the last one ends."""
        if op not in self._offsets:
            dim = int(op.dimension.value)
            sizes = (v.type.shape[dim] for v in op.operands)
            self._offsets[op] = [0, *itertools.accumulate(sizes)]
        return self._offsets[op]


@memoised()
def integer_kind(kind: ir.Type) -> tuple[bool, int] | None:
    """Whether integers of a tensor type are signed, and their bits; None for other elements."""
    match = _INTEGER.fullmatch(str(kind.element_type))
    if match is None:
        return None
    bits = int(match[2])
    return (not match[1] and bits > 1), bits


def numbers(attribute: ir.Attribute) -> list[int]:
    """The elements of an `array<i64: ...>`."""
    return [int(i) for i in ir.DenseI64ArrayAttr(attribute)]


def array(values: Any) -> ir.Attribute:
    """`array<i64: ...>`."""
    return ir.DenseI64ArrayAttr.get(list(values), ir.context())


def is_constant(value: ir.Value) -> bool:
    """Whether it is in the program."""
    op = ir.producer(value)
    return op is not None and op.operation.name == "stablehlo.constant"


def make(
    name: str,
    operands: list[ir.Value],
    kind: ir.Type,
    before: ir.Op,
    attributes: dict[str, ir.Attribute] | None = None,
) -> ir.Value:
    """The result of a new op right before another one, at its place in the user's code."""
    return ir.create(name, operands, [kind], ir.before(before), attributes, before.location).results[0]


def reshaped(value: ir.Value, kind: ir.Type, before: ir.Op) -> ir.Value:
    """`value` in another shape; itself if it has that shape."""
    return value if value.type == kind else make("stablehlo.reshape", [value], kind, before)
