"""The reductions of one iteration over the columns of rows, in accumulators `a<number>`.

An accumulator holds a value for some columns of a tile that are beside each other, to which each tile is
reduced first.  If these are what one thread loads, nothing passes between threads before the last tile.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.native_gpu.triton.conversions import rounded
from mpmd.compile.backends.native_gpu.triton.emit import TileWriter, identity
from mpmd.compile.backends.native_gpu.triton.online import RowIteration
from mpmd.compile.backends.native_gpu.triton.operations import accumulator_type, combine, reduce
from mpmd.compile.kernels.kernel_plan import ReduceNode


class RowAccumulators:
    """Writes the reductions of an iteration.

    Args:
        write: writes the kernel.
        each: the iteration.
        share: columns of a tile for which there is one value; all of them if it is not given.
    """

    def __init__(self, write: TileWriter, each: RowIteration, share: int = 0) -> None:
        height, width = write.tiling.height, write.tiling.width
        self.write, self.each, self.share = write, each, share
        self.shape = [height, width // share if share else 1]
        self._parts = [*self.shape, share]

    def begin(self) -> None:
        """The lines before the loop."""
        for number in self.each.reductions:
            node = self._node(number)
            kind = accumulator_type(node.dtype)
            self.write.line(f"a{number} = tl.full({self.shape}, {identity(node)}, tl.{kind})")
        if self.each.top >= 0:
            self.write.line(f"old = tl.full({self.shape}, 0.0, tl.float32)")

    def add_tile(self, others: Sequence[str] = ()) -> None:
        """The lines in the loop; `others` are sums that are relative to the maximum, too."""
        write, each = self.write, self.each
        if each.top >= 0:
            self._grow()
        for number in each.reductions:
            if number != each.top:
                node = self._node(number)
                before = f"a{number} * fade" if number in each.relative else f"a{number}"
                write.line(f"a{number} = {combine(node.op, node.dtype, before, self._tile(node))}")
        for name in others:
            write.line(f"{name} = {name} * fade")

    def define(self) -> None:
        """The values so far, after a loop, if there is one for a row."""
        self.write.forget(self.each.reductions)
        for number in self.each.reductions:
            self.write.define(number, self._reduced(number))

    def finish(self, others: Sequence[str] = ()) -> None:
        """The values after the last loop.

        The sums of rows that see nothing are NaN if these rows subtract -inf, and 0 if they do not.
        """
        write, each = self.write, self.each
        if self.share:
            self._join()
        self.define()
        if each.top < 0:
            return
        shift = write.value(each.shift)
        write.line(f"beside = {shift} - {shift}")
        for number in each.relative:
            write.line(f"a{number} = a{number} + beside")
            write.define(number, self._reduced(number))
        for name in others:
            write.line(f"{name} = {name} + beside")

    def _grow(self) -> None:
        """The maximum with this tile, and what values relative to the old one are multiplied by."""
        write, each, node = self.write, self.each, self._node(self.each.top)
        write.define(each.top, combine(node.op, node.dtype, f"a{each.top}", self._tile(node)))
        self._shift("old")
        write.line(f"a{each.top} = {write.value(each.top)}")
        write.define(each.shift, self._of_columns("shift"))
        write.line("old = shift")

    def _shift(self, old: str) -> None:
        """The subtrahend for the maximum that is known now.

        While a row has seen nothing but -inf its sums are 0, and relative to any number: to 0 here, since
        `-inf - -inf` is NaN.
        """
        write, each = self.write, self.each
        nothing = "tl.where({} == float('-inf'), {}, {})".format
        write.line(f"shift = {nothing(write.value(each.top), '0.0', write.value(each.shift))}")
        write.line(f"fade = {nothing(f'a{each.top}', '1.0', f'tl.exp({old} - shift)')}")

    def _join(self) -> None:
        write, each = self.write, self.each
        write.forget(each.reductions)
        if each.top >= 0:
            node = self._node(each.top)
            write.define(each.top, reduce(node.op, node.dtype, f"a{each.top}", 1))
            self._shift("old")
            write.line(f"a{each.top} = {write.value(each.top)}")
        for number in each.reductions:
            if number != each.top:
                node = self._node(number)
                parts = f"a{number} * fade" if number in each.relative else f"a{number}"
                write.line(f"a{number} = {reduce(node.op, node.dtype, parts, 1)}")

    def _tile(self, node: ReduceNode) -> str:
        tile = self.write.accumulated(node)
        if not self.share:
            return reduce(node.op, node.dtype, tile, 1)
        parts = reduce(node.op, node.dtype, f"tl.reshape({tile}, {self._parts})", 2)
        return f"tl.reshape({parts}, {self.shape})"

    def _of_columns(self, name: str) -> str:
        if not self.share:
            return name
        height, width = self.write.tiling.height, self.write.tiling.width
        return f"tl.reshape(tl.broadcast_to({name}[:, :, None], {self._parts}), {[height, width]})"

    def _reduced(self, number: int) -> str:
        dtype = self._node(number).dtype
        return f"(a{number} != 0)" if dtype == "pred" else rounded(f"a{number}", dtype)

    def _node(self, number: int) -> ReduceNode:
        node = self.write.plan.nodes[number]
        assert isinstance(node, ReduceNode)
        return node
