"""The next panel of an array that a kernel reads across, asked for in the order of memory."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.crossing import Tile
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import Value

_LINE_BYTES = 64


@dataclass(frozen=True)
class PanelAhead:
    """Rows of a source, a strip of each, wanted in the second cache.

    Attributes:
        f: where the requests go.
        tile: how the source is read.
        corner: address of the panel's first element.
        columns: elements of each row.
    """

    f: FunctionBuilder
    tile: Tile
    corner: Value
    columns: int

    def ask(self, step: Position, count: int) -> None:
        """Ask for the lines of one step: `count` of them, or whole rows where those are shorter.

        Args:
            step: number of the step, from 0 in each panel.
            count: lines of a step.
        """
        f, row_bytes = self.f, self.tile.step * self.tile.bytes
        width = -(-self.columns * self.tile.bytes // _LINE_BYTES)  # lines of a panel's row
        if self.columns == self.tile.step:  # rows without gaps between them
            rows, steps = 1, 1
            row_bytes = count * _LINE_BYTES
        elif width < count:
            rows, steps, count = count // width, 1, width
        else:
            rows, steps = 1, -(-width // count)
        column = f.imul(f.irem(step, steps), count * _LINE_BYTES)
        first = f.offset(self.corner, f.iadd(f.imul(f.idiv(step, steps), rows * row_bytes), column))
        for row in range(rows):
            for line in range(count):
                f.prefetch(f.offset(first, row * row_bytes + line * _LINE_BYTES), locality=2)
