"""Reductions of rows: how few iterations over their columns compute them, and in which of these.

A row's maximum is known after its last key only.  A sum of multiples of `exp(x - maximum)` is kept relative
to the largest x so far: where that grows, the sum is multiplied by `exp(old - new)`.  Factors of a row leave
its sums before that, so that sums which differ by such factors need no iteration of their own.

Source: online softmax (Milakov and Gimelshein 2018), as in FlashAttention.

An accumulator `a<number>` of such an iteration holds a value for some columns of a tile that are beside
each other, to which each tile is reduced first. If these are what one thread loads, nothing passes between
threads before the last tile.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Sequence

from mpmd.compile.backends.native_gpu.triton.conversions import rounded
from mpmd.compile.backends.native_gpu.triton.emit import TileWriter, identity
from mpmd.compile.backends.native_gpu.triton.operations import accumulator_type, combine, reduce
from mpmd.compile.backends.native_gpu.triton.tiling import TileSteps
from mpmd.compile.kernels.index import dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import ELEMENT, ROW, Apply, Constant, KernelPlan, Node, ReduceNode
from mpmd.compile.kernels.plan_builder import PlanBuilder, renumbered

_WIDE = ("f32", "bf16")


@dataclasses.dataclass(frozen=True)
class RowIteration:
    """Reductions of one iteration over keys.

    Attributes:
        reductions: numbers of their nodes.
        top: a maximum to which others are relative; -1 if there is none.
        shift: number of the value that exponentials subtract: the maximum, or made of it.
        relative: the sums that are kept relative to the maximum.
    """

    reductions: tuple[int, ...]
    top: int = -1
    shift: int = -1
    relative: tuple[int, ...] = ()


def tiles_seen(rows: TileSteps, columns: TileSteps, offset: int | None, *, keys: bool) -> tuple[float, float]:
    """Tiles of columns that a tile of rows goes through, on average: of those that all see, and of others.

    Args:
        rows: tiles of a program each.
        columns: tiles of an iteration each.
        offset: query q sees the keys up to q + offset; None if each sees all.
        keys: columns are keys, not queries.
    """
    full, every = columns.points // columns.side, columns.tiles
    if offset is None:
        return float(full), float(every - full)
    whole, others = 0, 0
    # Counted for each tile of rows: under a mask they differ.
    for first in range(0, rows.points, rows.side):
        last = first + rows.side - 1
        if keys:
            inside = min(max(first + offset + 1, 0) // columns.side, full)
            seen = -(-min(max(last + 1 + offset, 0), columns.points) // columns.side)
        else:
            inside = full - min(-(-max(last - offset, 0) // columns.side), full)
            seen = max(0, every - max(first - offset, 0) // columns.side)
        whole, others = whole + inside, others + max(0, seen - inside)
    return whole / max(1, rows.tiles), others / max(1, rows.tiles)


@dataclasses.dataclass(frozen=True)
class FactoredRows:
    """Rows whose factors of a row have left sums and mixtures.

    Attributes:
        plan: the rows.
        after: operand of a mixture's factor → operand of the row values by which its mixtures are multiplied;
            it exists in the plan only.
    """

    plan: KernelPlan
    after: dict[int, int]


def factored(plan: KernelPlan, mixed: Collection[int]) -> FactoredRows:
    """The rows with factors of a row outside of sums and mixtures.

    Args:
        plan: over `(batch..., queries | keys)`.
        mixed: operands of factors that are mixed over keys alone.
    """
    work = _Factoring(plan)
    after: dict[int, int] = {}
    for store in plan.stores:
        # The factor of the row becomes a result of its own in the plan, by which the mixture is multiplied
        # at the end.
        core, factor = work.split(store.node) if store.operand in mixed else (work.numbers[store.node], None)
        build, where = work.build, work.numbers[store.where] if store.where >= 0 else -1
        build.store(
            store.operand, store.index.renumber(work.numbers), core, combine=store.combine, where=where
        )
        if factor is not None:
            rows = tuple(range(plan.rank - 1))
            place = linear([dim(d) for d in rows], strides_of([plan.extents[d] for d in rows]))
            size = plan.size // max(1, plan.extents[-1])
            after[store.operand] = build.operand("", build.dtype(factor), size)
            build.store(after[store.operand], place, factor)
    return FactoredRows(work.build.finish(), after)


class _Factoring:
    """A plan built again; `numbers` are the new ones of its nodes."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.build = PlanBuilder(plan.name, plan.extents, batch_dims=plan.batch_dims, row_dims=plan.row_dims)
        for operand in plan.operands:
            self.build.operand(operand.name, operand.dtype, operand.size)
        self.numbers: dict[int, int] = {}
        self._reciprocals: dict[int, int] = {}
        totals = RowReductions(plan).totals()
        for number, node in enumerate(plan.nodes):
            if isinstance(node, ReduceNode) and node.op == "add" and node.axis == ROW and node.dtype == "f32":
                # sum(c · x) = c · sum(x) for a factor c of the row.
                core, factor = self.split(node.arg)
                self.numbers[number] = self._times(self.build.reduce_row("add", core), factor)
            # A division by a softmax's total becomes a product, with one division for the row: totals have
            # normal reciprocals.
            elif isinstance(node, Apply) and node.op == "divide" and node.args[1] in totals:
                value, over = node.args
                self.numbers[number] = self._times(self.numbers[value], self._reciprocal(over))
            else:
                self.numbers[number] = self.build.node(renumbered(node, self.numbers))

    def split(self, number: int) -> tuple[int, int | None]:
        """A value as one that changes along the row, and a factor of the row, if there is one."""
        node, levels = self.plan.nodes[number], self.plan.levels
        if isinstance(node, Apply) and levels[number] == ELEMENT and node.dtype in _WIDE:
            rows = [levels[a] == ROW for a in node.args]
            if node.op == "multiply":
                parts = [(None, self.numbers[a]) if row else self.split(a) for a, row in zip(node.args, rows)]
                cores = [core for core, _ in parts if core is not None]
                factor = self._product([factor for _, factor in parts])
                return (self.build.apply("multiply", *cores) if len(cores) == 2 else cores[0]), factor
            # dividing an element by a row value: the reciprocal leaves as a factor
            if node.op == "divide" and rows == [False, True]:
                core, factor = self.split(node.args[0])
                over = self.numbers[node.args[1]]
                one = self.build.constant(1.0, self.build.dtype(over)) if factor is None else factor
                return core, self.build.apply("divide", one, over)
            if node.op == "convert" and self.plan.nodes[node.args[0]].dtype in _WIDE:
                core, factor = self.split(node.args[0])
                return self.build.convert(core, node.dtype), factor
        return self.numbers[number], None

    def _reciprocal(self, number: int) -> int:
        """One division for a row instead of one for each element."""
        if number not in self._reciprocals:
            over = self.numbers[number]
            one = self.build.constant(1.0, self.build.dtype(over))
            self._reciprocals[number] = self.build.apply("divide", one, over)
        return self._reciprocals[number]

    def _product(self, factors: list[int | None]) -> int | None:
        converted = [self.build.convert(f, "f32") for f in factors if f is not None]
        return (
            None
            if not converted
            else converted[0]
            if len(converted) == 1
            else self.build.apply("multiply", *converted)
        )

    def _times(self, number: int, factor: int | None) -> int:
        if factor is None:
            return number
        return self.build.apply("multiply", number, self.build.convert(factor, self.build.dtype(number)))


class RowReductions:
    """The reductions of rows, in the order in which iterations make them.

    Args:
        plan: the rows.
    """

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.needs: list[frozenset[int]] = []
        """For each node the reductions that it needs; those that they need are not counted."""
        for number, used in enumerate(plan.uses):
            reduces = isinstance(plan.nodes[number], ReduceNode)
            inside = frozenset[int]().union(*(self.needs[a] for a in used))
            self.needs.append(frozenset([number]) if reduces else inside)

    def passes(self) -> list[RowIteration]:
        """All iterations before the one that makes factors."""
        plan, known, iterations = self.plan, set[int](), list[RowIteration]()
        waiting = [k for k, n in enumerate(plan.nodes) if isinstance(n, ReduceNode)]
        while waiting:
            ready = [k for k in waiting if self._inputs(k) <= known]
            # All reductions whose inputs are known. If one is a maximum, sums that are relative to it join:
            # they would otherwise wait for a pass of their own.
            iteration = RowIteration(tuple(ready))
            for top in ready:
                node = plan.nodes[top]
                assert isinstance(node, ReduceNode)
                shift, relative = self._relative_to(top, waiting, known)
                if node.op == "maximum" and shift >= 0:
                    iteration = RowIteration((*ready, *relative), top, shift, tuple(relative))
                    break
            iterations.append(iteration)
            known.update(iteration.reductions)
            waiting = [k for k in waiting if k not in known]
        return iterations

    def totals(self) -> set[int]:
        """The sums of a softmax's exponentials, the largest of them 1, and selections of them and 1.

        They are 0, NaN, or between 1 and the number of keys: their reciprocals are normal numbers.
        """
        plan, totals = self.plan, set[int]()
        for number, node in enumerate(plan.nodes):
            if isinstance(node, ReduceNode) and node.op == "add" and node.axis == ROW and node.dtype == "f32":
                tops = [k for k in self.needs[node.arg] if self._is_maximum(k)]
                totals |= {number for top in tops if self._is_weight(node.arg, top)}
            elif isinstance(node, Apply) and node.op == "select":
                values = [plan.nodes[a] for a in node.args[1:]]
                ones = [isinstance(v, Constant) and float(v.value) == 1.0 for v in values]
                sums = [a in totals for a in node.args[1:]]
                totals |= {number} if any(sums) and all(map(operator.or_, ones, sums)) else set()
        return totals

    def _is_maximum(self, number: int) -> bool:
        node = self.plan.nodes[number]
        return isinstance(node, ReduceNode) and node.op == "maximum" and node.axis == ROW

    def _is_weight(self, number: int, top: int) -> bool:
        """Whether a value is exp(x - maximum of all x), or that where the maximum is finite."""
        node = self.plan.nodes[number]
        if not isinstance(node, Apply) or node.op != "exponential":
            return False
        inner, reduced = self.plan.nodes[node.args[0]], self.plan.nodes[top]
        assert isinstance(reduced, ReduceNode)
        if not isinstance(inner, Apply) or inner.op != "subtract" or inner.args[0] != reduced.arg:
            return False
        shift = self.plan.nodes[inner.args[1]]
        if not isinstance(shift, Apply) or shift.op != "select":
            return inner.args[1] == top
        test = self.plan.nodes[shift.args[0]]
        finite = isinstance(test, Apply) and test.op == "is-finite" and test.args[0] == top
        return finite and shift.args[1] == top

    def _inputs(self, reduction: int) -> frozenset[int]:
        node = self.plan.nodes[reduction]
        assert isinstance(node, ReduceNode)
        return self.needs[node.arg]

    def _relative_to(self, top: int, waiting: list[int], known: set[int]) -> tuple[int, list[int]]:
        shift, relative = -1, []
        for number in waiting:
            node = self.plan.nodes[number]
            assert isinstance(node, ReduceNode)
            if number == top or node.op != "add" or node.dtype != "f32":
                continue
            if top in self._inputs(number) and self._inputs(number) <= known | {top}:
                this = self.shift_of(node.arg, top)
                if this >= 0 and shift in (-1, this):
                    shift = this
                    relative.append(number)
        return shift, relative

    def shift_of(self, number: int, top: int, where: frozenset[tuple[int, bool]] = frozenset()) -> int:
        """What exponentials subtract in a value that is a sum of multiples of them; -1 if it is not one.

        Args:
            number: of the value.
            top: the maximum that they subtract, which bounds them.
            where: conditions, and whether they hold; elsewhere the value is 0.
        """
        node = self.plan.nodes[number]
        if not isinstance(node, Apply) or node.dtype not in _WIDE:
            return -1
        # The form is a tree over exponentials: whatever does not depend on the maximum may scale them, add
        # them or choose between them, as the sum is linear in them.
        if node.op == "exponential":
            return self._subtracted(self.plan.nodes[node.args[0]], top, where)
        free = [top not in self.needs[a] for a in node.args]
        if node.op in ("convert", "negate") or (node.op == "divide" and free[1]):
            return self.shift_of(node.args[0], top, where)
        if node.op == "multiply" and any(free):
            return self.shift_of(node.args[0 if free[1] else 1], top, where)
        if node.op == "select" and free[0]:
            condition, yes, no = node.args
            # A branch that is zero adds nothing; under the condition of the other, more is known about its
            # exponent.
            parts = [(a, other, holds) for a, other, holds in ((yes, no, True), (no, yes, False))
                     if not self._is_zero(a)]  # fmt: skip
            return self._same(
                [
                    (a, where | {(condition, holds)} if self._is_zero(other) else where)
                    for a, other, holds in parts
                ],
                top,
            )
        return self._same([(a, where) for a in node.args], top) if node.op in ("add", "subtract") else -1

    def _subtracted(self, inner: Node, top: int, where: frozenset[tuple[int, bool]]) -> int:
        """The node that an exponential of at most 1 subtracts; -1 if it may be larger."""
        if not isinstance(inner, Apply) or inner.op != "subtract" or inner.dtype != "f32":
            return -1
        value, shift = inner.args
        reduced = self.plan.nodes[top]
        assert isinstance(reduced, ReduceNode)
        # exp(value - shift) must not overflow while the shift is the maximum so far: value must be below
        # what the maximum is taken of.
        fits = top not in self.needs[value] and self.plan.levels[shift] == ROW
        below = fits and self._is_below(value, reduced.arg, where)
        return shift if below and self._grows_with(shift, top) else -1

    def _is_below(self, number: int, other: int, where: frozenset[tuple[int, bool]]) -> bool:
        """Whether a value is no more than another, but for rounding, where some conditions hold."""
        number, other = self._unrounded(number), self._unrounded(other)
        a, b = self.plan.nodes[number], self.plan.nodes[other]
        if number == other:
            return True
        if isinstance(a, Constant) and isinstance(b, Constant):
            return float(a.value) <= float(b.value)
        # A masked score is select(mask, x, filler): compared branch by branch, those left out that `where`
        # excludes.
        if not isinstance(b, Apply) or b.op != "select":
            return False
        condition, *branches = b.args
        of_a = (
            a.args[1:]
            if isinstance(a, Apply) and a.op == "select" and a.args[0] == condition
            else (number,) * 2
        )
        return all(
            (condition, not holds) in where or self._is_below(own, branch, where)
            for own, branch, holds in zip(of_a, branches, (True, False))
        )

    def _unrounded(self, number: int) -> int:
        node = self.plan.nodes[number]
        while (
            isinstance(node, Apply) and node.op == "convert" and self.plan.nodes[node.args[0]].dtype in _WIDE
        ):
            number = node.args[0]
            node = self.plan.nodes[number]
        return number

    def _grows_with(self, number: int, top: int) -> bool:
        """Whether a value is a maximum, or another number where that is not finite.

        What falls as the maximum grows may have lost sums that count at the end.
        """
        node = self.plan.nodes[number]
        if number == top:
            return True
        if not isinstance(node, Apply):
            return False
        if node.op == "convert":
            return self._grows_with(node.args[0], top)
        # a maximum with a constant still grows with it
        if node.op == "maximum":
            return any(
                self._grows_with(a, top) and not self.needs[b] for a, b in (node.args, node.args[::-1])
            )
        if node.op != "select":
            return False
        # `where(is_finite(max), max, 0)`: it is the constant while a row has seen nothing but -inf.
        condition, yes, no = node.args
        of_top = self.needs[condition] == {top} and self._distinguishes_infinities(condition)
        return of_top and any(
            self._grows_with(a, top) and isinstance(self.plan.nodes[b], Constant)
            for a, b in ((yes, no), (no, yes))
        )

    def _distinguishes_infinities(self, number: int) -> bool:
        """Whether a condition is the same for all finite maxima."""
        node = self.plan.nodes[number]
        if not isinstance(node, Apply):
            return False
        if node.op in ("is-finite", "not"):
            return node.op == "is-finite" or self._distinguishes_infinities(node.args[0])
        others = [self.plan.nodes[a] for a in node.args]
        infinite = [isinstance(n, Constant) and math.isinf(n.value) for n in others]
        return node.op.startswith("compare-") and any(infinite)

    def _same(self, parts: Sequence[tuple[int, frozenset[tuple[int, bool]]]], top: int) -> int:
        shifts = {self.shift_of(a, top, where) for a, where in parts}
        return shifts.pop() if len(shifts) == 1 else -1

    def _is_zero(self, number: int) -> bool:
        node = self.plan.nodes[number]
        return isinstance(node, Constant) and float(node.value) == 0.0


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
