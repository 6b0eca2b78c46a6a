"""The text of matrix products of tiles: factors from memory, sums in registers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mpmd.compile.backends.native_gpu.triton.dtypes import pointer_type
from mpmd.compile.backends.native_gpu.triton.emit import TileWriter
from mpmd.compile.backends.native_gpu.triton.kernels import PrintedKernel
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling
from mpmd.compile.kernels.matmul import View

MIN_SIDE = 16
"""Of the matrices that Triton multiplies."""


def pieces_of(width: int) -> list[tuple[int, int, bool]]:
    """A width as powers of two: (first, size, whether the size is more than is left)."""
    found, at = [], 0
    while at < width:
        left = width - at
        size = 1 << (left.bit_length() - 1)
        if size < MIN_SIDE:
            size = MIN_SIDE
        found.append((at, size, size > left))
        at += size
    return found


class MatrixWriter(TileWriter):
    """Writes a kernel with matrix products.

    Attributes:
        flops: of the products so far.
    """

    def __init__(self, tiling: PlanTiling) -> None:
        super().__init__(tiling)
        self.flops = 0.0

    def _origin(self, view: View, operand: int) -> str:
        """Where the matrix of the program's batch index begins."""
        steps = [f"d{d} * {step}" for d, step in enumerate(view.batch) if step]
        return " + ".join([f"p{operand}", *([str(view.offset)] if view.offset else []), *steps])

    def factor(
        self, name: str, view: View, operand: int, sides: tuple[str, str], masks: Iterable[str]
    ) -> None:
        """Loads a matrix `[rows, columns]`; `sides` are the positions along both, as columns and as a row."""
        self.reads.add(operand)
        place = f"{self._origin(view, operand)} + {sides[0]} * {view.row} + {sides[1]} * {view.column}"
        mask = " & ".join(filter(None, masks))
        rest = f", mask={mask}, other=0.0" if mask else ""
        self.line(f"{name} = tl.load({place}{rest})")

    def dot(
        self,
        name: str,
        pairs: list[tuple[str, str]],
        dtypes: tuple[str, str],
        start: str = "",
        *,
        exact: bool = True,
    ) -> None:
        """`name` = the sum of products, from `start` on; those of f32 by tf32 unless they are exact."""
        one = dtypes[0] == dtypes[1]
        for left, right in pairs:
            if not one:
                left, right = f"{left}.to(tl.float32)", f"{right}.to(tl.float32)"
            digits = "ieee" if exact or not one else "tf32"
            how = f', input_precision="{digits}"' if not one or dtypes[0] == "f32" else ""
            before = f", {start}" if start else ""
            self.line(f"{name} = tl.dot({left}, {right}{before}{how})")
            start = name

    def printed(
        self, kind: str, arrays: Mapping[int, tuple[str, int]], grid: int, warps: int, factors: str
    ) -> PrintedKernel:
        """The kernel.

        Args:
            kind: of it.
            arrays: number of an argument → its dtype and bytes.
            grid: how many programs run it.
            warps: of each.
            factors: dtype of what it multiplies.
        """
        operands = tuple(sorted(self.reads | self.writes))
        return PrintedKernel(
            kind=kind,
            body=f"({', '.join(f'p{k}' for k in operands)}):\n{self.text()}",
            pointers=tuple(pointer_type(arrays[k][0]) for k in operands),
            aligned=(True,) * len(operands),
            operands=operands,
            sizes=tuple(arrays[k][1] for k in operands),
            reads=frozenset(self.reads),
            writes=frozenset(self.writes),
            grid=grid,
            warps=warps,
            flops=self.flops,
            factors=factors,
        )
