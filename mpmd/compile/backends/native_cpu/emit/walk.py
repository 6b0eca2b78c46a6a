"""One pass over rows: its loops over vectors, what it reads, keeps, stores and adds up; several at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from mpmd.compile.backends.native_cpu.emit.accumulate import (
    Accumulators,
    identity,
    reduce_node,
    sum_dtype,
)
from mpmd.compile.backends.native_cpu.emit.coming_rows import ComingRows
from mpmd.compile.backends.native_cpu.emit.nest import Body, nested, vector_loop
from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.passes import Pass
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.row_form import SCRATCH_BYTES, RowForm
from mpmd.compile.backends.native_cpu.emit.scope import Scope, store_run
from mpmd.compile.backends.native_cpu.emit.together import evaluate, needed_nodes
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import Value, lanes_of
from mpmd.compile.backends.native_cpu.storage import load, store
from mpmd.compile.kernels.plan import KernelPlan


@dataclass(frozen=True)
class Walk:
    """One pass over the rows of a block, a round of vectors of every row after the other.

    Attributes:
        form: how the kernel walks over its rows.
        f: the kernel's function.
        start: where no row is known.
        rows: where one row of the block is known each.
        ahead: the rows that are asked for meanwhile.
        number: which pass it is.
        unit: the line of partial sums, if there are any.
        coming: what is asked for meanwhile, and where it lies.
        vectors: of a round, if another pass goes on at the same time; else as many as suit this one.
        backwards: whether rounds go from the end of a row to its beginning; None: they never do.
    """

    form: RowForm
    f: FunctionBuilder
    start: Scope
    rows: tuple[Scope, ...]
    ahead: tuple[Scope, ...]
    number: int
    unit: Value | None
    coming: ComingRows
    vectors: int = 0
    backwards: Value | None = None

    @property
    def plan(self) -> KernelPlan:
        """What the kernel computes."""
        return self.form.plan

    @property
    def item(self) -> Pass:
        """What happens in the pass."""
        return self.form.walks[self.number]

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.form.target.lanes() if self.plan.row_dims else 1

    @cached_property
    def unroll(self) -> int:
        """Vectors of each row in a round."""
        fitting = min(self.form.vectors_of_a_row(self.item), self.plan.extents[-1] // self.lanes)
        return self.vectors or max(1, fitting)

    @cached_property
    def roots(self) -> list[int]:
        """Numbers of the nodes that the pass is about."""
        return self.form.roots(self.item)

    @cached_property
    def needed(self) -> list[int]:
        """Numbers of the nodes that those are computed from."""
        return needed_nodes(self.plan, self.roots)

    @cached_property
    def sums(self) -> Accumulators:
        """The running values of the row reductions."""
        return Accumulators(self.f, self.plan, self.item.row_sums, self.lanes, self.unroll)

    @property
    def carried(self) -> list[Value]:
        """What the running values of the reductions of every row start from."""
        return self.sums.start * len(self.rows)

    def along(self, indices: Mapping[int, Position]) -> Body:
        """What is done with each round of vectors of one run of the rows."""
        scopes = [row.inside(indices) if indices else row for row in self.rows]
        for scope in scopes:
            scope.hoist(self.needed, self.lanes)
        common = self.start.inside(indices) if indices else self.start
        ahead = [row.inside(indices) if indices else row for row in self.ahead]
        line = self.f.imul(self._run_number(indices), self.form.row_width)
        return lambda parts, carried: self._round(common, scopes, ahead, line, parts, carried)

    def finish(self, values: Sequence[Value]) -> list[dict[int, Value]]:
        """The row reductions that each row completes, from their running values."""
        count = len(self.sums.start)
        return [self.sums.finish(values[k * count : (k + 1) * count]) for k in range(len(self.rows))]

    def _run_number(self, indices: Mapping[int, Position]) -> Position:
        total: Position = 0
        for dim, index in indices.items():
            total = self.f.iadd(self.f.imul(total, self.plan.extents[dim]), index)
        return total

    def _round(
        self,
        common: Scope,
        rows: Sequence[Scope],
        ahead: Sequence[Scope],
        line: Position,
        parts: list[Lanes],
        carried: list[Value],
    ) -> list[Value]:
        """A round of vectors of each row, which starts `line` elements into lines of its length."""
        if len(parts) % 2 == 0 and self.form.takes_pairs(self.item):
            parts = [half for low in parts[::2] for half in low.halves()]
        shared, same = [common.inside(lanes=part) for part in parts], self.form.shared(self.item)
        evaluate(shared, same)
        scopes = [[row.inside(lanes=part) for part in parts] for row in rows]
        for number, row in enumerate(scopes):
            for part, known, inner in zip(parts, shared, row, strict=True):
                for n in same:
                    inner.define(n, known.value(n))
                self._read(inner, part, self._kept_at(number, line))
        # all values before any store: a result may lie over an operand
        evaluate([inner for row in scopes for inner in row], self.roots)
        for number, row in enumerate(scopes):
            self._keep(row, parts, self._kept_at(number, line))
            for store_ in self.item.stores:
                store_run(row, store_)
        self._add_columns(scopes, parts, line)
        self.coming.ask(self.number, ahead, parts)
        self.coming.claim(self.number, rows, parts)
        count = len(self.sums.start)
        sums = [
            self.sums.add(list(zip(parts, row, strict=True)), carried[k * count : (k + 1) * count])
            for k, row in enumerate(scopes)
        ]
        return [value for row in sums for value in row]

    # -- what lies between passes ----------------------------------------------------------------------------
    def _kept_at(self, number: int, line: Position) -> Position:
        return self.f.iadd(number * self.form.scratch_size, line)

    def _start_of(self, part: Lanes) -> Position:
        """Where a vector is kept: the even ones of two, then the odd ones."""
        return self.f.iadd(part.start, part.count) if part.half == 1 else part.start

    def _scratch(self, number: int) -> Value:
        """The scratch rows of a node, one for each row of a block."""
        rows = self.form.kept[number] * self.form.at_once
        return self.f.offset(self.f.arguments["workspace"], rows * self.form.scratch_size * SCRATCH_BYTES)

    def _read(self, scope: Scope, part: Lanes, at: Position) -> None:
        """What earlier passes kept for one vector of a row."""
        for number in self.item.reads:
            dtype = sum_dtype(self.plan.nodes[number].dtype)
            place = self.f.iadd(at, self._start_of(part))
            scope.define(number, load(self.f, self._scratch(number), dtype, part.count, place))

    def _keep(self, row: Sequence[Scope], parts: Sequence[Lanes], at: Position) -> None:
        """What later passes read of one round of a row."""
        for number in self.item.keeps:
            dtype = sum_dtype(self.plan.nodes[number].dtype)
            for part, scope in zip(parts, row, strict=True):
                place = self.f.iadd(at, self._start_of(part))
                store(self.f, scope.wide(number), self._scratch(number), dtype, place)

    # -- sums over the rows ----------------------------------------------------------------------------------
    def _add_columns(self, scopes: Sequence[Sequence[Scope]], parts: Sequence[Lanes], line: Position) -> None:
        """The rows of a block are added up before their sum is added to the partial sums in memory."""
        f, lines = self.f, self.form.partials
        for number in self.item.column_sums:
            assert self.unit is not None and lines is not None
            node = reduce_node(self.plan, number)
            for u, part in enumerate(parts):
                values = [row[u].wide(node.arg) for row in scopes]
                while len(values) > 1:
                    pairs = zip(values[::2], values[1::2], strict=True)
                    values = [emit_combine(f, node.op, a, b, node.dtype) for a, b in pairs]
                value = values[0]
                if part.mask is not None:
                    value = f.select(part.mask, value, identity(node, part.count))
                place = f.iadd(lines.place(f, self.unit), f.iadd(line, part.start))
                add_to_partials(f, lines, number, place, value)


def add_to_partials(f: FunctionBuilder, parts: Partials, number: int, at: Position, value: Value) -> None:
    """Add to the partial sums of a column reduction.

    Args:
        f: the kernel's function.
        parts: the partial sums of its column reductions.
        number: the reduction's.
        at: place among its partial sums.
        value: what is added.
    """
    node = reduce_node(parts.plan, number)
    pointer, dtype = f.arguments[parts.name(number)], sum_dtype(node.dtype)
    old = load(f, pointer, dtype, lanes_of(value.type), at)
    store(f, emit_combine(f, node.op, old, value, node.dtype), pointer, dtype, at)


def emit_walks(walks: Sequence[Walk]) -> list[list[dict[int, Value]]]:
    """Write the loops of passes that go on together, a round of each after the other.

    Returns:
        the row reductions that each row of each pass completes.
    """
    first = walks[0]
    f, extents, (*runs, last) = first.f, first.plan.extents, first.plan.row
    ends = list(accumulate((len(walk.carried) for walk in walks), initial=0))

    def split(values: Sequence[Value]) -> list[list[Value]]:
        return [list(values[low:high]) for low, high in pairwise(ends)]

    def run(indices: Mapping[int, Position], values: Sequence[Value]) -> list[Value]:
        bodies = [walk.along(indices) for walk in walks]

        def body(parts: list[Lanes], carried: list[Value]) -> list[Value]:
            given = zip(bodies, split(carried), strict=True)
            return [value for one, own in given for value in one(parts, own)]

        def rounds(backwards: bool) -> list[Value]:
            lanes, end = first.lanes, extents[last]
            return vector_loop(f, last, 0, end, end, lanes, first.unroll, values, body, backwards=backwards)

        if first.backwards is None:
            return rounds(backwards=False)
        assert not values, "sums would depend on the order"
        with f.when(first.backwards):
            rounds(backwards=True)
        with f.when(f.not_(first.backwards)):
            rounds(backwards=False)
        return []

    values = nested(f, runs, extents, [value for walk in walks for value in walk.carried], run)
    return [walk.finish(own) for walk, own in zip(walks, split(values), strict=True)]
