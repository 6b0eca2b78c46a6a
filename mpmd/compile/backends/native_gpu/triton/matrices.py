"""The text of matrix products of tiles: factors from memory, sums in registers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping

from mpmd.compile.backends.native_gpu.triton.conversions import pointer_type
from mpmd.compile.backends.native_gpu.triton.emit import TileWriter
from mpmd.compile.backends.native_gpu.triton.tiling import PlanTiling
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.kernels.product_plans import View

MIN_SIDE = 16
"""Of the matrices that Triton multiplies."""


def pieces_of(width: int) -> list[tuple[int, int, bool]]:
    """A width as powers of two: (first, size, whether the size is more than is left)."""
    pieces, at = [], 0
    while at < width:
        left = width - at
        size = 1 << (left.bit_length() - 1)
        if size < MIN_SIDE:
            size = MIN_SIDE
        pieces.append((at, size, size > left))
        at += size
    return pieces


@dataclasses.dataclass(frozen=True)
class MatrixOperand:
    """An array of matrices, one per batch index, and their sides."""

    view: View
    batch: tuple[int, ...]
    rows: int
    columns: int

    @property
    def span(self) -> int:
        """Elements up to the last one."""
        return self.view.span(self.batch, self.rows, self.columns)

    @property
    def bytes(self) -> int:
        sizes = zip(
            (*self.batch, self.rows, self.columns), (*self.view.batch, self.view.row, self.view.column)
        )
        return int(DTYPE_BYTES[self.view.dtype] * math.prod(size for size, step in sizes if step))


class MatrixWriter(TileWriter):
    """Writes a kernel with matrix products.

    Args:
        tiling: its tiles.
        matrices: number of an argument → the matrices in it; positions have room for all of them.

    Attributes:
        flops: of the products so far.
    """

    def __init__(self, tiling: PlanTiling, matrices: Mapping[int, MatrixOperand]) -> None:
        super().__init__(dataclasses.replace(tiling, span=max(m.span for m in matrices.values())))
        self.matrices = matrices
        self.flops = 0.0

    def element(self, operand: int, row: str, column: str, *, turned: bool = False) -> str:
        """The address of an element of the program's matrix, or of its transpose.

        Args:
            operand: number of the argument.
            row: its position, a tensor.
            column: likewise.
            turned: whether it is an element of the transpose.
        """
        view = self.matrices[operand].view
        steps = [(f"d{d}", step) for d, step in enumerate(view.batch)]
        sides = (column, row) if turned else (row, column)
        steps += zip(sides, (view.row, view.column))
        wide = ".to(tl.int64)" if self.tiling.index_type == "int64" else ""
        parts = [f"{place}{wide}" + (f" * {step}" if step != 1 else "") for place, step in steps if step]
        return " + ".join([f"p{operand}", *([str(view.offset)] if view.offset else []), *parts])

    def factor(
        self, name: str, operand: int, sides: tuple[str, str], masks: Iterable[str], *, turned: bool = False
    ) -> None:
        """Loads a matrix `[rows, columns]`; `sides` are the positions along both, as columns and as a row."""
        self.reads.add(operand)
        mask = " & ".join(filter(None, masks))
        rest = f", mask={mask}, other=0.0" if mask else ""
        self.line(f"{name} = tl.load({self.element(operand, *sides, turned=turned)}{rest})")

    def pieces(self, name: str, column: str, width: int) -> Iterator[str]:
        """Narrower tiles, which together are a tile of sums, one after the other.

        In each, columns are its own, and values are not known in the next.  A tile is halved by a dim of two
        that becomes the last, which moves nothing between threads.

        Args:
            name: of the sums.
            column: the number of the tile.
            width: of a piece.
        """
        tiling = self.tiling
        halves = self._halved(name, tiling.height, tiling.width, width)
        if len(halves) > 1:
            self.tiling = dataclasses.replace(tiling, width=width)
        for number, piece in enumerate(halves):
            known = dict(self._known)
            if len(halves) > 1:
                self._columns(f"({column} * {len(halves)} + {number}) * {width}")
            yield piece
            self._known = known
        self.tiling = tiling

    def _halved(self, name: str, height: int, wide: int, width: int) -> list[str]:
        if wide <= width:
            return [name]
        halves = [f"{name}{k}" for k in range(2)]
        self.line(f"{name} = tl.permute(tl.reshape({name}, [{height}, 2, {wide // 2}]), [0, 2, 1])")
        self.line(f"{', '.join(halves)} = tl.split({name})")
        return [piece for half in halves for piece in self._halved(half, height, wide // 2, width)]

    def dot(
        self,
        name: str,
        pairs: list[tuple[str, str]],
        dtypes: tuple[str, str],
        start: str = "",
        *,
        exact: bool = True,
    ) -> None:
        """`name` = the sum of products, from `start` on; f32 by tf32 unless they are exact."""
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
        self, kind: str, scratch: Mapping[int, tuple[str, int]], grid: int, warps: int, factors: str
    ) -> PrintedKernel:
        """The kernel.

        Args:
            kind: of it.
            scratch: number of an argument that is neither the plan's nor a matrix → its dtype and bytes.
            grid: how many programs run it.
            warps: of each.
            factors: dtype of what it multiplies.
        """
        operands = tuple(sorted(self.reads | self.writes))
        arrays = {k: (o.dtype, o.bytes) for k, o in enumerate(self.plan.operands)}
        arrays |= {k: (m.view.dtype, m.bytes) for k, m in self.matrices.items()} | dict(scratch)
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
