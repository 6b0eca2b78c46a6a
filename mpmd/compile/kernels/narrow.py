"""Types of a byte or less, which kernels load, store, select and convert, and do not compute with.

They are stored one to a byte; those of less than a byte in its low bits, the others zero.

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
from typing import Literal

import numpy as np

from mpmd.compile.hlo.dtypes import DTYPES

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
    made = np.asarray(value).astype(DTYPES[dtype].numpy)
    return int(made.reshape(1).view(np.uint8)[0])
