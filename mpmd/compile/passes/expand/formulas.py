"""Formulas over arrays with operators: `(x * x + 1.0).sqrt()` appends three operations."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import TrackingBuilder


class Number:
    """An array of real numbers, or of truths, in a formula.

    Attributes:
        build: where operations go.
        value: the array.
    """

    __slots__ = ("build", "value")

    def __init__(self, build: TrackingBuilder, value: HloInstruction) -> None:
        self.build = build
        self.value = value

    @property
    def dtype(self) -> str:
        """Its element type."""
        return self.value.shape.dtype

    def full(self, number: float) -> Number:
        """The same number everywhere."""
        return Number(self.build, self.build.full(number, self.dtype, self.value.shape.dims))

    def to(self, dtype: str) -> Number:
        """Other elements."""
        return Number(self.build, self.build.convert(self.value, dtype))

    def _apply(self, opcode: str, *others: Number | float) -> Number:
        operands = [o if isinstance(o, Number) else self.full(o) for o in others]
        return Number(self.build, self.build.add(opcode, self.value, *(o.value for o in operands)))

    def __add__(self, other: Number | float) -> Number:
        return self._apply("add", other)

    def __sub__(self, other: Number | float) -> Number:
        return self._apply("subtract", other)

    def __mul__(self, other: Number | float) -> Number:
        return self._apply("multiply", other)

    def __truediv__(self, other: Number | float) -> Number:
        return self._apply("divide", other)

    def __radd__(self, other: float) -> Number:
        return self.full(other) + self

    def __rsub__(self, other: float) -> Number:
        return self.full(other) - self

    def __rmul__(self, other: float) -> Number:
        return self.full(other) * self

    def __rtruediv__(self, other: float) -> Number:
        return self.full(other) / self

    def __neg__(self) -> Number:
        return self._apply("negate")

    def __and__(self, other: Number) -> Number:
        return self._apply("and", other)

    def __or__(self, other: Number) -> Number:
        return self._apply("or", other)

    def is_(self, direction: str, other: Number | float) -> Number:
        """A comparison: EQ, NE, LT, LE, GT, GE."""
        wanted = other if isinstance(other, Number) else self.full(other)
        return Number(self.build, self.build.compare(self.value, wanted.value, direction))

    def choose(self, then: Number, otherwise: Number) -> Number:
        """Where this is true `then`, else `otherwise`."""
        return Number(self.build, self.build.select(self.value, then.value, otherwise.value))

    def of(self, function: str) -> Number:
        """An operation of one operand, by its opcode."""
        return self._apply(function)

    def with_(self, function: str, other: Number | float) -> Number:
        """An operation of two operands, by its opcode."""
        return self._apply(function, other)

    def sqrt(self) -> Number:
        """The square root."""
        return self._apply("sqrt")

    def abs(self) -> Number:
        """The magnitude."""
        return self._apply("abs")

    def with_sign_of(self, other: Number) -> Number:
        """This magnitude with another's sign, that of zeros too."""
        bits = self.value.shape.info.bits
        kind, shape = f"u{bits}", self.value.shape.with_dtype(f"u{bits}")
        a, b = (self.build.add("bitcast-convert", v.value, shape=shape) for v in (self, other))
        top = self.build.full(1 << (bits - 1), kind, shape.dims)
        rest = self.build.full((1 << (bits - 1)) - 1, kind, shape.dims)
        sign, magnitude = self.build.add("and", b, top), self.build.add("and", a, rest)
        joined = self.build.add("or", magnitude, sign)
        return Number(self.build, self.build.add("bitcast-convert", joined, shape=self.value.shape))
