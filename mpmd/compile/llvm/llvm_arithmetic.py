"""Arithmetic on typed values, the same for scalars and for every lane of a vector.

Arithmetic on positions and sizes: constants are folded at emission.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from mpmd.compile.llvm.llvm_types import (
    Value,
    constant,
    element_of,
    integer_type,
    is_float,
    lanes_of,
    suffix,
    vector,
    with_element,
)


class Arithmetic(ABC):
    """The arithmetic half of `FunctionBuilder`.

    Every floating-point instruction rounds: none has a fast-math flag, and LLVM joins no product with a sum.
    Whether it could join them depends on who else uses the product, so a value that two loops compute would
    be two numbers.  Where rounding once is part of a definition, `fma` says so.
    """

    @abstractmethod
    def op(self, text: str, type_: str) -> Value:
        """Write one instruction with a result of the given type."""

    @abstractmethod
    def intrinsic(self, name: str, result: str, *arguments: Value) -> Value:
        """Call an intrinsic or outside function by its full name."""

    # -- two operands, integers or floats -----------------------------------------------------------------
    def binary(self, opcode: str, a: Value, b: Value) -> Value:
        """`opcode a, b`."""
        return self.op(f"{opcode} {a.type} {a}, {b}", a.type)

    def add(self, a: Value, b: Value) -> Value:
        """A + b."""
        return self.binary("fadd" if is_float(a.type) else "add", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.binary("fsub" if is_float(a.type) else "sub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """A * b."""
        return self.binary("fmul" if is_float(a.type) else "mul", a, b)

    def div(self, a: Value, b: Value) -> Value:
        """A / b on floats."""
        return self.binary("fdiv", a, b)

    def neg(self, a: Value) -> Value:
        if is_float(a.type):
            return self.op(f"fneg {a.type} {a}", a.type)
        return self.sub(constant(0, a.type), a)

    def and_(self, a: Value, b: Value) -> Value:
        return self.binary("and", a, b)

    def or_(self, a: Value, b: Value) -> Value:
        """Bitwise or."""
        return self.binary("or", a, b)

    def xor(self, a: Value, b: Value) -> Value:
        """Bitwise exclusive or."""
        return self.binary("xor", a, b)

    def not_(self, a: Value) -> Value:
        return self.binary("xor", a, constant(-1 if element_of(a.type) != "i1" else 1, a.type))

    def shl(self, a: Value, amount: int) -> Value:
        return self.binary("shl", a, constant(amount, a.type))

    def lshr(self, a: Value, amount: int) -> Value:
        return self.binary("lshr", a, constant(amount, a.type))

    def ashr(self, a: Value, amount: int) -> Value:
        return self.binary("ashr", a, constant(amount, a.type))

    # -- floats -------------------------------------------------------------------------------------------
    def float_intrinsic(self, name: str, *arguments: Value) -> Value:
        """An overloaded LLVM intrinsic, `fma` for `llvm.fma.v16f32`."""
        type_ = arguments[0].type
        return self.intrinsic(f"llvm.{name}.{suffix(type_)}", type_, *arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """A * b + c, rounded once."""
        return self.float_intrinsic("fma", a, b, c)

    def fabs(self, a: Value) -> Value:
        return self.float_intrinsic("fabs", a)

    def sqrt(self, a: Value) -> Value:
        return self.float_intrinsic("sqrt", a)

    def copysign(self, magnitude: Value, sign: Value) -> Value:
        """The magnitude of one value with the sign of another."""
        return self.float_intrinsic("copysign", magnitude, sign)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger, 0 larger than -0; NaN if either is NaN (IEEE 754-2019)."""
        return self.float_intrinsic("maximum", a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller, -0 smaller than 0; NaN if either is NaN (IEEE 754-2019)."""
        return self.float_intrinsic("minimum", a, b)

    def larger_number(self, a: Value, b: Value) -> Value:
        """One max instruction: the larger, or `b` if either is NaN."""
        return self.select(self.compare("ogt", a, b), a, b)

    def smaller_number(self, a: Value, b: Value) -> Value:
        """One min instruction: the smaller, or `b` if either is NaN."""
        return self.select(self.compare("olt", a, b), a, b)

    # -- comparison and choice ----------------------------------------------------------------------------
    def compare(self, predicate: str, a: Value, b: Value) -> Value:
        """Lane-wise comparison by LLVM predicate (`olt`, `une`, `slt`, `ult`, `eq`); the result is `i1`s."""
        opcode = "fcmp" if is_float(a.type) else "icmp"
        return self.op(f"{opcode} {predicate} {a.type} {a}, {b}", with_element(a.type, "i1"))

    def select(self, condition: Value, then: Value, otherwise: Value) -> Value:
        """`then` where the condition is set."""
        return self.op(f"select {condition.typed}, {then.typed}, {otherwise.typed}", then.type)

    # -- conversions --------------------------------------------------------------------------------------
    def cast(self, opcode: str, a: Value, type_: str) -> Value:
        """`zext`, `sext`, `trunc`, `fptosi`, `sitofp`, `fpext`, `fptrunc`, `bitcast` ..."""
        return a if a.type == type_ else self.op(f"{opcode} {a.typed} to {type_}", type_)

    def as_bits(self, a: Value) -> Value:
        return self.cast("bitcast", a, integer_type(a.type))

    def from_bits(self, a: Value, element: str) -> Value:
        """The same bits as an element type of that width."""
        return self.cast("bitcast", a, with_element(a.type, element))

    # -- lanes --------------------------------------------------------------------------------------------
    def splat(self, scalar: Value, lanes: int) -> Value:
        if lanes == 1:
            return scalar
        type_ = vector(scalar.type, lanes)
        if not scalar.text.startswith("%"):
            return Value(f"splat ({scalar.typed})", type_)
        one = self.op(f"insertelement {type_} poison, {scalar.typed}, i64 0", type_)
        zeros = vector("i32", lanes)
        return self.op(f"shufflevector {one.typed}, {type_} poison, {zeros} zeroinitializer", type_)

    def extract(self, a: Value, lane: int) -> Value:
        return (
            a
            if lanes_of(a.type) == 1
            else self.op(f"extractelement {a.typed}, i64 {lane}", element_of(a.type))
        )

    def insert(self, a: Value, scalar: Value, lane: int) -> Value:
        return (
            scalar
            if lanes_of(a.type) == 1
            else self.op(f"insertelement {a.typed}, {scalar.typed}, i64 {lane}", a.type)
        )

    def assemble(self, scalars: Sequence[Value]) -> Value:
        result = Value("poison", vector(scalars[0].type, len(scalars)))
        for lane, scalar in enumerate(scalars):
            result = self.insert(result, scalar, lane)
        return result

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of `a` and `b` joined, picked by number."""
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        type_ = vector(element_of(a.type), len(lanes))
        return self.op(f"shufflevector {a.typed}, {b.typed}, <{len(lanes)} x i32> <{mask}>", type_)

    def lane_numbers(self, lanes: int, element: str = "i32") -> Value:
        """The constant 0, 1, 2 ..."""
        if lanes == 1:
            return constant(0, element)
        listed = ", ".join(f"{element} {lane}" for lane in range(lanes))
        return Value(f"<{listed}>", vector(element, lanes))

    def lane_fold(self, a: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined pairwise into a scalar by a commutative function of two values."""
        while lanes_of(a.type) > 1:
            half = lanes_of(a.type) // 2
            low = self.shuffle(a, a, range(half)) if half > 1 else self.extract(a, 0)
            high = self.shuffle(a, a, range(half, 2 * half)) if half > 1 else self.extract(a, 1)
            a = combine(low, high)
        return a

    def any_lane(self, mask: Value) -> Value:
        """An `i1`: whether any lane of a mask is set."""
        if lanes_of(mask.type) == 1:
            return mask
        return self.intrinsic(f"llvm.vector.reduce.or.{suffix(mask.type)}", "i1", mask)


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
