"""The elementwise operations and reductions of kernels, by HLO name: their dtypes and what they cost.

One row per operation, which means what the evaluator of HLO says, rounded to its type: no target joins two of
them, as a product and a sum, or a value would be another number where it is computed again.  The printer of a
target has a table with the same names; that every name is in every table is a test, so an operation that a
target lacks is found when a kernel is planned and not when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.reducers import identity_of
from mpmd.compile.kernels.narrow import NARROW

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
        found = identity_of(self.name, dtype)
        return float(found) if dtype in FLOATS else found.item()


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
