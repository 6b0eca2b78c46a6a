"""The rows of one block: passes over scores that lie in the cache, up to the last key that matters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from mpmd.compile.backends.native_cpu.attention.blocking import Blocking
from mpmd.compile.backends.native_cpu.kernels.partials import Accumulators, reduce_node, sum_dtype
from mpmd.compile.backends.native_cpu.kernels.places import Lanes, vector_loop
from mpmd.compile.backends.native_cpu.kernels.row import RowPass, plan_passes
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY, REGISTER, load, store
from mpmd.compile.kernels.kernel_plan import ELEMENT, ROW, store_arguments, store_level
from mpmd.compile.llvm.function_builder import FunctionBuilder, Index
from mpmd.compile.llvm.llvm_types import Value, constant, vector

_KEPT_BYTES = 8  # of every element that is kept between passes, whatever its type


class Reach:
    """Which keys the rows of a block look at.

    Args:
        f: the function.
        blocking: the tiling of the kernel.
        first: the block's first query.
        offset: last key of query 0; None where all rows look at all keys.
    """

    def __init__(self, f: FunctionBuilder, blocking: Blocking, first: Value, offset: Value | None) -> None:
        self.f = f
        self.blocking = blocking
        self.first = first
        self.offset = offset

    def end(self, rows: Index) -> Index:
        """The first key, in whole strips, that none of the block's first rows looks at."""
        # In whole strips, since that is what products write: beyond its last key a row reads scores that
        # its own mask turns into the filler.
        tiling = self.blocking
        return self.f.round_up(self.seen(rows), tiling.scores[0].width)

    def seen(self, rows: Index) -> Index:
        """The first key that none of the block's first rows looks at."""
        f, keys = self.f, self.blocking.plan.keys
        if self.offset is None:
            return keys
        return f.imin(f.imax(f.iadd(f.iadd(self.first, rows), self.offset), 0), keys)

    def first_row(self, key: Index, multiple: int) -> Index:
        """A row of the block, a multiple of some number, before which no row looks at a key or later ones."""
        f = self.f
        if self.offset is None:
            return 0
        # the inverse of `seen`: query + offset >= key
        row = f.isub(f.isub(key, self.offset), self.first)
        return f.floor_to(f.imax(row, 0), multiple)


class BlockRows:
    """Emission of the rows of one kernel.

    Args:
        f: the function.
        blocking: the tiling of the kernel.
        pointers: the arrays, by number of the rows' operand.
        inner: where the block's sums and factors begin, likewise.
        kept: memory for values that a pass keeps for later ones.
    """

    def __init__(
        self,
        f: FunctionBuilder,
        blocking: Blocking,
        pointers: Mapping[int, Value],
        inner: Mapping[int, Value],
        kept: Value,
    ) -> None:
        self.f = f
        self.blocking = blocking
        self.plan = blocking.local_rows
        self.inner = inner
        self.memory = kept
        self.pointers = dict(pointers)
        self.lanes = blocking.lanes
        self.unroll = blocking.scores[0].vectors
        self.triangle = blocking.plan.triangle
        self.passes = plan_passes(self.plan)
        kept_nodes = sorted({n for p in self.passes for n in p.keeps})
        self.kept = {node: k for k, node in enumerate(kept_nodes)}
        self.start = Scope(f, self.plan, self.pointers)
        self.start.hoist(range(len(self.plan.nodes)), self.lanes)

    @staticmethod
    def kept_bytes(blocking: Blocking) -> int:
        """Bytes of the memory between passes."""
        nodes = {n for p in plan_passes(blocking.local_rows) for n in p.keeps}
        return len(nodes) * blocking.line * _KEPT_BYTES

    @cached_property
    def _factors(self) -> list[int]:
        return sorted({m.factor for m in self.blocking.plan.mixtures})

    def emit(self, batch: Scope, count: Index, reach: Reach) -> Value:
        """Write the loop over the rows of a block; returns whether all rows met the guards.

        Args:
            batch: knows the batch dims.
            count: queries of the block.
            reach: which keys they look at.
        """
        f, plan = self.f, self.plan
        last = reach.end(count)
        with f.loop(0, count, carried=[constant(1, "i1")]) as loop:
            line = f.imul(loop.i, self.blocking.line)
            pointers = dict(self.pointers)
            for operand, base in self.inner.items():
                pointers[operand] = f.offset(base, f.imul(line, BYTES[plan.operands[operand].dtype]))
            dims = {plan.rank - 2: f.iadd(reach.first, loop.i)}
            # The scope of the batch index is the parent: what only depends on it is computed once, outside
            # of the rows.
            row = Scope(f, plan, pointers, dims=dims, parent=batch)
            # each row ends at its own last strip, not at the block's: half of the elements under a triangle
            end = f.imin(reach.end(f.iadd(loop.i, 1)), plan.extents[-1])
            self._row(row, end)
            # Columns from the row's end to the block's are read by the products of other rows in the same
            # tile.
            self._pad(row, end, f.imin(last, plan.extents[-1]))
            loop.carry([f.and_(loop.carried[0], self._guarded(row))])
        return loop.carried[0]

    def _row(self, row: Scope, end: Index) -> None:
        plan = self.plan
        row.hoist(range(len(plan.nodes)), self.lanes)
        for item in self.passes:
            if item.is_empty:
                continue
            for number, value in self._pass(row, item, end).items():
                row.define(number, value)
            row.hoist(range(len(plan.nodes)), self.lanes)
        for item_ in plan.stores:
            if store_level(plan, item_) == ROW:
                row.store(item_)
        self._fill(row, end)

    def _pass(self, row: Scope, item: RowPass, end: Index) -> dict[int, Value]:
        f, plan = self.f, self.plan
        last, extent = plan.rank - 1, plan.extents[-1]
        sums = Accumulators(f, plan, item.row_sums, self.lanes, self.unroll)

        def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
            scopes = [(part, row.inside(lanes=part)) for part in parts]
            for part, scope in scopes:
                self._point(scope, part, item)
            return sums.add(scopes, carried)

        return sums.finish(vector_loop(f, last, 0, end, extent, self.lanes, self.unroll, sums.start, body))

    def _point(self, scope: Scope, part: Lanes, item: RowPass) -> None:
        """Everything but the sums for one vector, all values before the first store."""
        f, plan = self.f, self.plan
        for number in item.reads:
            dtype = sum_dtype(plan.nodes[number].dtype)
            scope.define(number, load(f, self._place(number), dtype, part.count, part.start))
        # A factor may lie over the sums that other stores of this vector read: first all values, then
        # stores.
        for item_ in item.stores:
            for number in store_arguments(item_):
                scope.value(number)
        for number in item.row_sums:
            scope.value(reduce_node(plan, number).arg)
        for number in item.keeps:
            dtype = sum_dtype(plan.nodes[number].dtype)
            store(f, scope.wide(number), self._place(number), dtype, part.start)
        for item_ in item.stores:
            scope.store(item_)

    def _place(self, number: int) -> Value:
        return self.f.offset(self.memory, self.kept[number] * self.blocking.line * _KEPT_BYTES)

    # -- behind the mask
    def _fill(self, row: Scope, end: Index) -> None:
        f, plan = self.f, self.plan
        if self.triangle is None:
            return
        # Results in memory that no product reads, such as the softmax itself, need their masked elements;
        # factors in the workspace are padded by `_pad` instead.
        inner = self.blocking.plan.inner
        stores = [
            (s, self.triangle.fills[k])
            for k, s in enumerate(plan.stores)
            if s.operand not in inner and store_level(plan, s) == ELEMENT
        ]
        if not stores:
            return
        extent = plan.extents[-1]

        def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
            for part in parts:
                scope = row.inside(lanes=part)
                for item, filler in stores:
                    scope.define(item.node, constant(filler, REGISTER[plan.nodes[item.node].dtype]))
                    scope.store(item)
            return carried

        vector_loop(f, plan.rank - 1, end, extent, extent, self.lanes, self.unroll, (), body)

    def _pad(self, row: Scope, end: Index, last: Index) -> None:
        """Zeros behind the factors, as far as any row of the block looks, and as tiles run over that."""
        f, lanes = self.f, self.lanes
        # A tile of keys that begins before the last one has up to `rows` of them; stores are whole
        # registers.
        behind = -(-max(lanes, self.blocking.rows) // lanes) * lanes
        for factor in self._factors:
            element = MEMORY[self.plan.operands[factor].dtype]
            zero = constant(0, vector(element, lanes))
            with f.loop(end, f.iadd(last, behind), lanes) as at:
                f.store(zero, row.pointers[factor], at.i)

    def _guarded(self, row: Scope) -> Value:
        """Whether a row may skip masked elements."""
        f, fine = self.f, constant(1, "i1")
        if self.triangle is None:
            return fine
        for guard in self.triangle.guards:
            value = row.value(guard.value)
            filler = constant(guard.filler, value.type)
            # Masked elements count as nothing if they are far enough below a value of the row; `masking.py`
            # says how far. A NaN fails the comparison.
            distance = f.add(filler, value) if guard.negated else f.sub(filler, value)
            fine = f.and_(fine, f.compare("olt", distance, constant(guard.bound, value.type)))
        return fine
