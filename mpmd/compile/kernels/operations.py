"""The elementwise operations and reductions of kernels, by HLO name: their dtypes and what they cost.

One row per operation, which means what the evaluator of HLO says, rounded to its type: no target joins two of
them, as a product and a sum, or a value would be another number where it is computed again.  The printer of a
target has a table with the same names; that every name is in every table is a test, so an operation that a
target lacks is found when a kernel is planned and not when it runs.

Types of a byte or less, which kernels load, store, select and convert, and do not compute with.

They are stored one to a byte; narrower ones in its low bits, the others zero.

| kind | infinity | NaN | zeros |
|---|---|---|---|
| `ieee` | the highest exponent, no mantissa | the highest exponent with a mantissa | both |
| `fn` | none: becomes NaN | all ones, either sign | both |
| `fnuz` | none: becomes NaN | the bits of -0 | one |
| `finite` | none: becomes the largest number | none: becomes -0 | both |
| `scale` | none: becomes NaN | all ones | none: becomes NaN; nothing is negative |

Source: the OCP specifications of 8 bit floats and of microscaling formats; names as in LLVM's APFloat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import identity_of

Special = Literal["ieee", "fn", "fnuz", "finite", "scale"]


@dataclass(frozen=True)
class NarrowFloat:
    """A floating-point format of 8 bits or less; a sign but for `scale`, then exponent, then mantissa.

    Attributes:
        exponent: bits of the exponent.
        mantissa: bits of the mantissa.
        bias: of the exponent.
        special: the encoding of special values, by the table above.
    """

    exponent: int
    mantissa: int
    bias: int
    special: Special

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def largest(self) -> int:
        ones = self.sign - 1
        return {
            "ieee": ones - (1 << self.mantissa),
            "fn": ones - 1,
            "fnuz": ones,
            "finite": ones,
            "scale": ones - 1,
        }[self.special]

    @property
    def nan(self) -> int:
        """The bits of a NaN without a sign; of -0 where there is none."""
        if self.special == "ieee":
            return self.largest + 1 + (1 << (self.mantissa - 1))
        return self.sign if self.special in ("fnuz", "finite") else self.sign - 1

    @property
    def beyond(self) -> int:
        if self.special == "finite":
            return self.largest
        return self.largest + 1 if self.special == "ieee" else self.nan


NARROW_FLOATS: dict[str, NarrowFloat] = {
    "f4e2m1fn": NarrowFloat(2, 1, 1, "finite"),
    "f8e3m4": NarrowFloat(3, 4, 3, "ieee"),
    "f8e4m3": NarrowFloat(4, 3, 7, "ieee"),
    "f8e4m3b11fnuz": NarrowFloat(4, 3, 11, "fnuz"),
    "f8e4m3fn": NarrowFloat(4, 3, 7, "fn"),
    "f8e4m3fnuz": NarrowFloat(4, 3, 8, "fnuz"),
    "f8e5m2": NarrowFloat(5, 2, 15, "ieee"),
    "f8e5m2fnuz": NarrowFloat(5, 2, 16, "fnuz"),
    "f8e8m0fnu": NarrowFloat(8, 0, 127, "scale"),
}
NARROW_INTEGERS = ("s2", "s4", "u2", "u4")
NARROW = (*NARROW_FLOATS, *NARROW_INTEGERS)


def bits_of(value: float | int, dtype: str) -> int:
    """The byte that encodes a value of `dtype`."""
    number = np.asarray(value).astype(DTYPES[dtype].numpy)
    return int(number.reshape(1).view(np.uint8)[0])


FLOATS = ("bf16", "f16", "f32", "f64")
SIGNED = ("s8", "s16", "s32", "s64")
UNSIGNED = ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
NUMPY_DTYPE = {name: DTYPES[name].numpy.type for name in ("pred", *INTEGERS, *FLOATS, *NARROW)}
DTYPE_BYTES = {name: DTYPES[name].numpy.itemsize for name in NUMPY_DTYPE}


@dataclass(frozen=True)
class ElementwiseOperation:
    """An elementwise operation.

    Attributes:
        name: its HLO name.
        arity: how many operands it takes.
        cycles: cost of one vector of f32, in units of a multiply-add.
        dtypes: operand dtypes that it is defined for.
        result: `same` as the first operand, `pred`, or `given` (by the node).
    """

    name: str
    arity: int
    cycles: float
    dtypes: tuple[str, ...]
    result: str = "same"

    @property
    def is_expensive(self) -> bool:
        """Whether keeping a result is cheaper than computing it a second time."""
        return self.cycles >= 8


_NUMBERS, _LOGIC = FLOATS + INTEGERS, (*INTEGERS, "pred")
OPERATIONS: dict[str, ElementwiseOperation] = {
    row.name: row
    for row in (
        ElementwiseOperation("add", 2, 1, (*_NUMBERS, "pred")),
        ElementwiseOperation("subtract", 2, 1, _NUMBERS),
        ElementwiseOperation("multiply", 2, 1, (*_NUMBERS, "pred")),
        ElementwiseOperation("divide", 2, 10, _NUMBERS),
        ElementwiseOperation("remainder", 2, 60, _NUMBERS),
        ElementwiseOperation("maximum", 2, 2, (*_NUMBERS, "pred")),
        ElementwiseOperation("minimum", 2, 2, (*_NUMBERS, "pred")),
        ElementwiseOperation("power", 2, 60, _NUMBERS),
        ElementwiseOperation("atan2", 2, 300, FLOATS),
        ElementwiseOperation("and", 2, 1, _LOGIC),
        ElementwiseOperation("or", 2, 1, _LOGIC),
        ElementwiseOperation("xor", 2, 1, _LOGIC),
        ElementwiseOperation("not", 1, 1, _LOGIC),
        ElementwiseOperation("shift-left", 2, 2, INTEGERS),
        ElementwiseOperation("shift-right-arithmetic", 2, 2, INTEGERS),
        ElementwiseOperation("shift-right-logical", 2, 2, INTEGERS),
        ElementwiseOperation("negate", 1, 1, _NUMBERS),
        ElementwiseOperation("abs", 1, 1, FLOATS + SIGNED),
        ElementwiseOperation("sign", 1, 3, FLOATS + SIGNED),
        ElementwiseOperation("floor", 1, 1, FLOATS),
        ElementwiseOperation("ceil", 1, 1, FLOATS),
        ElementwiseOperation("round-nearest-even", 1, 1, FLOATS),
        ElementwiseOperation("round-nearest-afz", 1, 4, FLOATS),
        ElementwiseOperation("exponential", 1, 14, FLOATS),
        ElementwiseOperation("exponential-minus-one", 1, 22, FLOATS),
        ElementwiseOperation("log", 1, 26, FLOATS),
        ElementwiseOperation("log-plus-one", 1, 32, FLOATS),
        ElementwiseOperation("logistic", 1, 28, FLOATS),
        ElementwiseOperation("tanh", 1, 24, FLOATS),
        ElementwiseOperation("tan", 1, 200, FLOATS),
        ElementwiseOperation("sine", 1, 30, FLOATS),
        ElementwiseOperation("cosine", 1, 30, FLOATS),
        ElementwiseOperation("erf", 1, 26, FLOATS),
        ElementwiseOperation("sqrt", 1, 14, FLOATS),
        ElementwiseOperation("rsqrt", 1, 24, FLOATS),
        ElementwiseOperation("cbrt", 1, 200, FLOATS),
        ElementwiseOperation("is-finite", 1, 2, FLOATS, "pred"),
        ElementwiseOperation("popcnt", 1, 4, INTEGERS),
        ElementwiseOperation("count-leading-zeros", 1, 4, INTEGERS),
        ElementwiseOperation("clamp", 3, 3, _NUMBERS),
        ElementwiseOperation("select", 3, 1, (*_NUMBERS, "pred", *NARROW)),
        *(
            ElementwiseOperation(f"compare-{direction}", 2, 1, (*_NUMBERS, "pred"), "pred")
            for direction in ("eq", "ne", "lt", "le", "gt", "ge")
        ),
        ElementwiseOperation("convert", 1, 1, (*_NUMBERS, "pred", *NARROW), "given"),
        ElementwiseOperation("bitcast-convert", 1, 0, (*_NUMBERS, *NARROW), "given"),
    )
}


@dataclass(frozen=True)
class Reduction:
    """A way to combine many values into one.

    Attributes:
        name: name of the binary operation.
        meaning: NumPy ufunc.
        dtypes: dtypes that it is defined for.
    """

    name: str
    meaning: Any
    dtypes: tuple[str, ...]

    def identity(self, dtype: str) -> float | int | bool:
        neutral = identity_of(self.name, dtype)
        return float(neutral) if dtype in FLOATS else neutral.item()


REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("add", np.add, (*_NUMBERS, "pred")),
        Reduction("multiply", np.multiply, (*_NUMBERS, "pred")),
        Reduction("maximum", np.maximum, (*_NUMBERS, "pred")),
        Reduction("minimum", np.minimum, (*_NUMBERS, "pred")),
        Reduction("and", np.bitwise_and, _LOGIC),
        Reduction("or", np.bitwise_or, _LOGIC),
        Reduction("xor", np.bitwise_xor, _LOGIC),
    )
}
