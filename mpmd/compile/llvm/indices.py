"""Arithmetic on positions and sizes: constants are folded at emission."""

from __future__ import annotations

from mpmd.compile.llvm.arithmetic import Arithmetic
from mpmd.compile.llvm.types import Value, constant

Index = Value | int
"""An `i64`, or a Python integer as a constant one."""


class IndexArithmetic(Arithmetic):
    """The part of `FunctionBuilder` that computes with indices; Python integers are folded."""

    def index(self, value: Index) -> Value:
        """An `i64` value of a Python integer or of a value."""
        return constant(value, "i64") if isinstance(value, int) else value

    def iadd(self, a: Index, b: Index) -> Index:
        """A + b on indices."""
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 or b == 0:
            return b if a == 0 else a
        return self.op(f"add nsw i64 {a}, {b}", "i64")

    def isub(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if b == 0 else self.op(f"sub nsw i64 {a}, {b}", "i64")

    def imul(self, a: Index, b: Index) -> Index:
        """A * b on indices."""
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 0 or b == 0:
            return 0
        if a == 1 or b == 1:
            return b if a == 1 else a
        return self.op(f"mul nsw i64 {a}, {b}", "i64")

    def idiv(self, a: Index, b: Index) -> Index:
        """A // b on indices that are not negative."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        return a if b == 1 else self.op(f"udiv i64 {a}, {b}", "i64")

    def irem(self, a: Index, b: Index) -> Index:
        """A % b on indices that are not negative."""
        if isinstance(a, int) and isinstance(b, int):
            return a % b
        return 0 if b == 1 else self.op(f"urem i64 {a}, {b}", "i64")

    def imin(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return self.select(self.op(f"icmp slt i64 {a}, {b}", "i1"), self.index(a), self.index(b))

    def imax(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return self.select(self.op(f"icmp sgt i64 {a}, {b}", "i1"), self.index(a), self.index(b))

    def floor_to(self, a: Index, multiple: int) -> Index:
        """The largest multiple of `multiple` that is not above `a`."""
        return self.imul(self.idiv(a, multiple), multiple)

    def round_up(self, a: Index, multiple: int) -> Index:
        """The smallest multiple of `multiple` that is not below `a`."""
        return self.floor_to(self.iadd(a, multiple - 1), multiple)
