"""Small transposes and computations on them: squares are transposed in registers.

Along the last dim, where results are written, such an array steps by more than one element; along another
dim, the strided dim, it steps by one.  A square of both dims is read along the strided dim, transposed,
and from then on read along the last dim like everything else: from registers, or from the stack where a long
computation follows.  Narrow elements take several squares side by side, so that whole lines are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.kernels.loop import meets_itself, needed_nodes, store_all, stored_nodes
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, product, unflatten
from mpmd.compile.backends.native_cpu.kernels.plan_kernel import PlanKernel, emit_streaming
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, load, widen
from mpmd.compile.kernels.kernel_plan import Apply, KernelPlan, Load
from mpmd.compile.llvm.cpu import LINE_BYTES
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.function_builder import Index as Position
from mpmd.compile.llvm.llvm_types import Value, constant, vector
from mpmd.compile.llvm.squares import transpose

_MAX_OPERATIONS = 4  # of a row, that its code is written for every row of a square


@dataclass(frozen=True)
class TileKernel(PlanKernel):
    """A kernel over a plan of kind `loop` with a strided dim.

    A unit is a band of the strided dim, as wide as a line, of one index of the dims but it and the last.

    Attributes:
        strided: the strided dim.
        streamed: numbers of the results that are written by non-temporal stores.
    """

    strided: int
    streamed: frozenset[int] = frozenset()

    @property
    def _outer(self) -> list[int]:
        return [d for d in range(self.plan.rank - 1) if d != self.strided]

    @property
    def _squares(self) -> int:
        widest = max(BYTES[self.plan.nodes[k].dtype] for k in self._tiles)
        # As many squares side by side along the strided dim as fill a line of the widest elements that are
        # read, but no more than the dim has.
        needed = -(-self.plan.extents[self.strided] // self.target.lanes())
        return min(max(1, LINE_BYTES // (widest * self.target.lanes())), needed)

    @property
    def _in_a_row(self) -> int:
        """Squares done together along the last dim, so that whole lines are written."""
        widest = max(BYTES[self.plan.operands[s.operand].dtype] for s in self.plan.stores)
        wanted = max(1, LINE_BYTES // (widest * self.target.lanes()))
        # Other rows would need a second form of the code for their ends.
        return 1 if self.plan.extents[-1] % (wanted * self.target.lanes()) else wanted

    @property
    def _band(self) -> int:
        return self._squares * self.target.lanes()

    @property
    def _bands(self) -> int:
        return -(-self.plan.extents[self.strided] // self._band)

    @property
    def _in_registers(self) -> bool:
        """Whether the code for one row is short enough to be repeated for each row of a square."""
        nodes = needed_nodes(self.plan, stored_nodes(self.plan.stores), self._tiles)
        operations = sum(isinstance(self.plan.nodes[k], Apply | Load) for k in nodes)
        return operations <= _MAX_OPERATIONS

    @property
    def units(self) -> int:
        return product(self.plan.extents, self._outer) * self._bands if self.plan.size else 0

    @property
    def _tiles(self) -> list[int]:
        return strided_loads(self.plan, self.strided)

    def emit_units(self, f: FunctionBuilder, pointers: dict[int, Value]) -> None:
        emit_streaming(f, pointers, self.streamed, lambda streams: self._emit(f, pointers, streams))

    def _emit(self, f: FunctionBuilder, pointers: dict[int, Value], streams: bool) -> None:
        plan, lanes = self.plan, self.target.lanes()
        last = plan.rank - 1
        start = Scope(f, plan, pointers, streamed=self.streamed if streams else frozenset())
        start.hoist(range(len(plan.nodes)), lanes)
        with f.loop(f.arguments["begin"], f.arguments["end"]) as unit:
            dims = unflatten(f, f.idiv(unit.i, self._bands), self._outer, plan.extents)
            scope = start.inside(dims)
            scope.hoist(range(len(plan.nodes)), lanes)
            band = f.imul(f.irem(unit.i, self._bands), self._band)
            end = plan.extents[self.strided]
            # The strided dim is the inner one: squares side by side use the lines of the operand that the
            # first of them brought in.
            with f.loop(0, plan.extents[last], lanes * self._in_a_row) as column:
                columns = [f.iadd(column.i, k * lanes) for k in range(self._in_a_row)]
                for square in range(self._squares):
                    first = f.iadd(band, square * lanes)
                    if self._squares == 1 or not end % self._band:
                        self._some_squares(scope, first, columns)
                        continue
                    with f.when(f.compare("slt", f.index(first), constant(end, "i64"))):
                        self._some_squares(scope, first, columns)

    def _some_squares(self, scope: Scope, first: Position, columns: Sequence[Position]) -> None:
        f, plan, lanes = scope.f, self.plan, self.target.lanes()
        end = plan.extents[self.strided]
        # These squares are loaded before the results at the same place are stored: they may share memory.
        squares = [{k: self._transposed(scope, k, first, at) for k in self._tiles} for at in columns]
        if not self._in_registers:
            for at, square in zip(columns, squares, strict=True):
                self._from_stack(scope, first, at, square)
            return
        for k in range(lanes):
            row = f.iadd(first, k)
            with contextlib.ExitStack() as inside:
                if end % lanes:
                    inside.enter_context(f.when(f.compare("slt", f.index(row), constant(end, "i64"))))
                at_row = scope.inside({self.strided: row})
                for at, square in zip(columns, squares, strict=True):
                    given = {n: widen(f, rows[k], plan.nodes[n].dtype) for n, rows in square.items()}
                    self._row(at_row, given, at)

    def _from_stack(
        self, scope: Scope, first: Position, column: Position, square: dict[int, list[Value]]
    ) -> None:
        f, plan, lanes = scope.f, self.plan, self.target.lanes()
        # A loop over rows cannot choose a register by its counter: the squares go through the stack.
        stacks = {k: f.stack(MEMORY[plan.nodes[k].dtype], lanes * lanes) for k in square}
        for number, rows in square.items():
            for k, value in enumerate(rows):
                f.store(value, stacks[number], k * lanes)
        with f.loop(0, f.imin(lanes, f.isub(plan.extents[self.strided], first))) as row:
            given = {
                k: load(f, stack, plan.nodes[k].dtype, lanes, f.imul(row.i, lanes))
                for k, stack in stacks.items()
            }
            self._row(scope.inside({self.strided: f.iadd(first, row.i)}), given, column)

    def _transposed(self, scope: Scope, number: int, first: Position, column: Position) -> list[Value]:
        """One square as rows along the last dim: lanes beyond the end of that dim repeat its last index."""
        f, plan, lanes = scope.f, self.plan, self.target.lanes()
        node = plan.nodes[number]
        assert isinstance(node, Load)
        last, extent = plan.rank - 1, plan.extents[self.strided]
        type_ = vector(MEMORY[node.dtype], lanes)
        # The mask is along the strided dim, in which vectors are loaded; after the transpose its lanes are
        # rows, which `_some_squares` skips.
        mask = None
        if extent % lanes:
            left = f.splat(f.index(f.isub(extent, first)), lanes)
            mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
        pointer, rows = scope.pointers[node.operand], []
        for lane in range(lanes):
            index = f.iadd(column, lane)
            # Beyond the end of the last dim, any address that exists will do: the lanes are not stored.
            if plan.extents[last] % lanes:
                index = f.imin(index, plan.extents[last] - 1)
            at = scope.inside({last: index, self.strided: first}).position(node.index)
            row = f.load(pointer, type_, at) if mask is None else f.masked_load(pointer, type_, mask, at)
            rows.append(row)
        return transpose(f, rows)

    def _row(self, scope: Scope, given: dict[int, Value], column: Position) -> None:
        f, plan, lanes = scope.f, self.plan, self.target.lanes()
        last, extent = plan.rank - 1, plan.extents[-1]
        scope.hoist(range(len(plan.nodes)), lanes)
        mask = None
        if extent % lanes:
            left = f.splat(f.index(f.isub(extent, column)), lanes)
            mask = f.compare("slt", f.lane_numbers(lanes, "i64"), left)
        inner = scope.inside(lanes=Lanes(last, column, lanes, mask))
        for number, value in given.items():
            inner.define(number, value)
        store_all([inner])


def strided_dim(plan: KernelPlan) -> int | None:
    """The dim along which arrays that cross the last dim are contiguous, or None if no array crosses it."""
    if plan.rank < 2 or meets_itself(plan):
        return None
    last = plan.rank - 1
    for node in plan.nodes:
        if isinstance(node, Load) and _is_strided(node, last):
            dims = [d for d in range(last) if node.index.factor(d) == 1 and node.index.is_linear_in(d)]
            if dims:
                return dims[-1]
    return None


def strided_loads(plan: KernelPlan, crossing: int) -> list[int]:
    """Numbers of the loads that step by one along a dim and by more along the last one."""
    last = plan.rank - 1
    return [
        k
        for k, n in enumerate(plan.nodes)
        if isinstance(n, Load)
        and _is_strided(n, last)
        and n.index.factor(crossing) == 1
        and n.index.is_linear_in(crossing)
    ]


def _is_strided(node: Load, last: int) -> bool:
    """Whether a load steps by more than one element along the last dim, always by as many."""
    plain = node.where < 0 and not node.index.values() and node.index.is_linear_in(last)
    return plain and abs(node.index.factor(last)) > 1
