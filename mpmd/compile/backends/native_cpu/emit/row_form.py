"""The form of a row kernel: its passes, how many rows go side by side, what is kept between passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.backends.native_cpu.emit.accumulate import dot_factors, reduce_node
from mpmd.compile.backends.native_cpu.emit.ahead import Run
from mpmd.compile.backends.native_cpu.emit.coming_rows import PAGE, ComingRows
from mpmd.compile.backends.native_cpu.emit.loop import stored_nodes
from mpmd.compile.backends.native_cpu.emit.nest import product
from mpmd.compile.backends.native_cpu.emit.partials import Partials
from mpmd.compile.backends.native_cpu.emit.passes import Pass, plan_passes
from mpmd.compile.backends.native_cpu.emit.together import MOST_VECTORS, needed_nodes, vectors_at_once
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.cost.workload import plan_workload
from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.plan import ELEMENT, Apply, KernelPlan, Load, Store, store_level

SCRATCH_BYTES = 8  # of every element kept in a scratch row, whatever its type
_MOST_ROWS = 4  # of a block
_MOST_ROWS_IN_TURN = 2  # the same where results are claimed and arithmetic is soon done
_WIDE = 4  # bytes of elements of which that is so
_SHORTEST_IN_TURN = 2 << 10  # bytes of a row, read and written, from which on results are claimed
# Bytes in vector instructions for each byte of memory from which on ...
_WORK_FAR = 8  # ... rows past the caches go by two: there is time for it
_WORK_DEAR = 16  # ... what is read beside dear functions comes late unless it is asked for
_FEWEST_OVERLAPPING = 8  # rows one after the other: one pass over the last is done in vain
_FEWEST_BLOCKS = 4  # the last block may do a row several times, which must not matter
_MOST_VECTORS = 8  # of all rows in one round
_STORED_VECTORS = 8  # of all rows one after the other, not held up by reads in between
_LONGEST_WIDE = 8 << 10  # bytes of a row of wide elements up to which it is written while the next is read
_LONGEST_NARROW = 16 << 10  # the same of narrow ones in two passes
_HELD_UP_WIDE, _HELD_UP_NARROW = 256, 512  # bytes within which stores hold up loads by their places in pages
_MOST_DOTS = 12  # running sums of products, each of which takes longer than others to be added to


@dataclass(frozen=True)
class RowForm:
    """How the rows of a plan are walked over.

    Attributes:
        plan: the plan.
        target: the CPU.
        partials: where the column reductions' partial sums are kept.
        streamed: numbers of the results that go past the caches.
    """

    plan: KernelPlan
    target: CpuTarget
    partials: Partials | None = None
    streamed: frozenset[int] = frozenset()

    @property
    def units(self) -> int:
        """Rows, or groups of rows."""
        if self.partials:
            return self.partials.batch * self.partials.groups
        return product(self.plan.extents, range(self.plan.rank - self.plan.row_dims))

    @cached_property
    def passes(self) -> list[Pass]:
        """What each walk over a row does; one may have nothing to do."""
        return plan_passes(self.plan)

    @cached_property
    def walks(self) -> list[Pass]:
        """The passes in which something happens."""
        return [item for item in self.passes if not item.is_empty]

    @cached_property
    def kept(self) -> dict[int, int]:
        """Number of the scratch row of each kept node."""
        nodes = sorted({n for p in self.passes for n in p.keeps})
        return {node: k for k, node in enumerate(nodes)}

    @property
    def row_width(self) -> int:
        """Elements from one run of the last dim to the next in a scratch row: whole vectors."""
        lanes = self.target.lanes()
        return -(-self.plan.extents[-1] // lanes) * lanes if self.plan.row_dims else 1

    @property
    def scratch_size(self) -> int:
        """Elements of one scratch row."""
        runs = product(self.plan.extents, list(self.plan.row)[:-1])
        return runs * self.row_width

    @property
    def workspace_bytes(self) -> int:
        """The scratch rows."""
        return len(self.kept) * self.at_once * self.scratch_size * SCRATCH_BYTES

    @cached_property
    def outer(self) -> frozenset[int]:
        """The dims that tell rows apart."""
        return frozenset(range(self.plan.rank - self.plan.row_dims))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes that the passes over one row touch of the row's own."""
        plan = self.plan
        loads = [n for k, n in enumerate(plan.nodes) if isinstance(n, Load) and plan.levels[k] == ELEMENT]
        touched = {n.operand for n in loads if n.index.dims() & self.outer}
        touched |= {s.operand for s in plan.stores if store_level(plan, s) == ELEMENT}
        each = sum(BYTES[plan.operands[k].dtype] for k in sorted(touched)) + 4 * len(self.kept)
        return plan.row_size * each

    @cached_property
    def at_once(self) -> int:
        """Rows of a block, on which every round of a pass works side by side.

        What all rows use is loaded and widened once for all of them, and the end of a pass over a row, a
        chain of operations on one number that the next pass waits for, is hidden behind other rows' work.
        More than stay in L1 between passes are no gain, nor are several where memory is what takes long: it
        sends lines fastest one after the other, and takes two at once in the time of much arithmetic.
        """
        plan, parts = self.plan, self.partials
        if any(s.combine for s in plan.stores):
            return 1  # the last block may do a row twice, which must be the same as once
        count = max(1, min(self._most_rows, self.target.l1_bytes // 2 // max(1, self.row_bytes)))
        if parts is None:
            count = min(count, self.units // _FEWEST_BLOCKS)
            return 4 if count >= 4 else 2 if count >= 2 else 1
        lines = (parts.rows_per_group, parts.rows)  # a row must not be added twice
        return next(n for n in (4, 2, 1) if n <= count and not any(rows % n for rows in lines))

    @property
    def _most_rows(self) -> int:
        """How many rows side by side are a gain, if they stay in L1."""
        if self.is_dear or not any(self.shared(item) for item in self.walks):
            return 1
        if self._bytes <= self.target.l3_bytes // 2:
            return _MOST_ROWS_IN_TURN if self._claims and self._is_wide else _MOST_ROWS
        if self._streams and self._width % PAGE == 0:
            return 1  # what is read has the place in its page of what the other row has just written
        return 2 if self._work > _WORK_FAR else 1

    @cached_property
    def _work(self) -> float:
        """Bytes in vector instructions for each byte of memory."""
        work = plan_workload(self.plan)
        return work.vector_bytes / max(1, work.memory_bytes)

    @cached_property
    def is_dear(self) -> bool:
        """Whether functions such as an exponential are computed for every element."""
        return self._has_dear(range(len(self.plan.nodes)))

    def _has_dear(self, numbers: Iterable[int]) -> bool:
        plan = self.plan
        nodes = [plan.nodes[n] for n in numbers if plan.levels[n] == ELEMENT]
        return any(isinstance(n, Apply) and OPERATIONS[n.op].is_expensive for n in nodes)

    @cached_property
    def overlapped(self) -> int:
        """Number of the pass over a block beside which the first pass over the next one goes on, or 0.

        That reads memory and only looks for an extreme or a sum, while dear functions wait for units that
        multiply, or results for memory.
        """
        rows = self.partials.rows_per_group if self.partials else self.units
        if rows < _FEWEST_OVERLAPPING * self.at_once:
            return 0
        if len(self.walks) < 2 or not self.plan.row_dims or any(s.combine for s in self.plan.stores):
            return 0
        first, second = self.walks[:2]
        if first.stores or first.keeps or first.column_sums or self._has_dear(self._nodes(first)):
            return 0
        if self._has_dear(self._nodes(second)):
            return 1
        return len(self.walks) - 1 if self._writes_while_reading else 0

    @property
    def _writes_while_reading(self) -> bool:
        """Whether memory takes longest, so that it is to be read whenever it is written.

        Of wide elements that is so if a pass in between gives requests a time without results.  Long rows
        gain nothing: the second cache has to hold two of them and what all rows use.
        """
        if not self._streams or self.is_dear or len(self._runs) != 1 or not self._follows(self._runs[0]):
            return False
        between = len(self.walks) > 2
        if self._is_wide:
            return between and self._width <= _LONGEST_WIDE
        return between or self._width <= _LONGEST_NARROW

    @property
    def _streams(self) -> bool:
        """Whether the last pass writes rows past the caches."""
        return any(run.operand in self.streamed for run in self._results)

    @cached_property
    def neighbours(self) -> list[tuple[int, int]]:
        """Numbers of what the last pass writes and what it reads at the same places of rows.

        Only where its order is free, and backwards is no loss: rows that caches have, and of wide elements
        those that an earlier pass has brought near.
        """
        plan, size = self.plan, {k: BYTES[o.dtype] for k, o in enumerate(self.plan.operands)}
        if len(self.walks) < (3 if self._is_wide else 2) or self.overlapped or self._streams:
            return []
        item = self.walks[-1]
        if item.row_sums or item.keeps or not plan.row_dims:
            return []
        if any(s.combine or not _is_run(s.index, plan.rank - 1) for s in item.stores):
            return []
        nodes = [plan.nodes[n] for n in self._nodes(item)]
        read = {(n.operand, str(n.index)) for n in nodes if isinstance(n, Load)}
        pairs = {
            (run.operand, operand)
            for run in self._results
            for operand, place in read
            if place == str(run.index) and size[operand] == size[run.operand]
        }
        return sorted(pairs)

    @property
    def held_up(self) -> int:
        """Bytes beyond a load's place in its page within which stores just before it hold it up."""
        return _HELD_UP_WIDE if self._is_wide else _HELD_UP_NARROW

    @property
    def _width(self) -> int:
        """Bytes of the longest of the rows that are read and written."""
        operands = [run.operand for run in (*self._runs, *self._results)]
        return self.plan.extents[-1] * max([BYTES[self.plan.operands[k].dtype] for k in operands], default=0)

    def _follows(self, run: Run) -> bool:
        """Whether the rows of a run follow each other in memory without a gap."""
        step = self.plan.extents[-1]
        for outer in reversed(range(self.plan.rank - 1)):
            if not run.index.is_linear_in(outer) or run.index.factor(outer) != step:
                return False
            step *= self.plan.extents[outer]
        return True

    def _nodes(self, item: Pass) -> list[int]:
        """Numbers of the nodes that a pass computes."""
        return needed_nodes(self.plan, self.roots(item), item.reads)

    def vectors_of_a_row(self, item: Pass) -> int:
        """A row's vectors in one round: enough to hide the latency of sums, few enough for the registers.

        Passes that read what others kept go the same way through it.
        """
        if item.keeps or item.reads:
            return min(self._fitting_vectors(p) for p in self.walks if p.keeps or p.reads)
        return self._fitting_vectors(item)

    def _fitting_vectors(self, item: Pass) -> int:
        rows, sums = self.at_once, len(item.row_sums)
        only_sums = not (item.column_sums or item.stores or item.keeps)
        if only_sums and all(dot_factors(self.target, self.plan, n) for n in item.row_sums):
            return max(1, _MOST_DOTS // max(1, sums) // rows)
        fitting = vectors_at_once(self.plan, self.target, self.roots(item), sums)
        each = max(1, fitting // rows)
        if self.coming.steady and item.stores and fitting == MOST_VECTORS and self._is_wide:
            return max(each, _STORED_VECTORS // rows)
        if each % 2 and 2 * rows <= _MOST_VECTORS and self._has_bf16(item):
            return each + 1  # they are converted by twos
        return each

    def _has_bf16(self, item: Pass) -> bool:
        """Whether a pass converts bf16."""
        nodes = [self.plan.nodes[k] for k in needed_nodes(self.plan, self.roots(item))]
        loaded = {n.dtype for n in nodes if isinstance(n, Load)}
        return "bf16" in loaded | {self.plan.operands[s.operand].dtype for s in item.stores}

    def roots(self, item: Pass) -> list[int]:
        """Numbers of the nodes that a pass is about."""
        reduced = [reduce_node(self.plan, n).arg for n in (*item.row_sums, *item.column_sums)]
        return [*stored_nodes(item.stores), *reduced, *item.keeps]

    def shared(self, item: Pass) -> list[int]:
        """Numbers of the nodes that change along vectors, but not from row to row."""
        plan, last = self.plan, self.plan.rank - 1
        nodes = needed_nodes(plan, self.roots(item), item.reads)
        same = [n for n in nodes if last in plan.depends[n] and not plan.depends[n] & self.outer]
        return [n for n in same if plan.stages[n] == 0]

    def takes_pairs(self, item: Pass) -> bool:
        """Whether a pass takes the even elements of two vectors and then the odd ones.

        Adjacent bf16 are the halves of 32 bits: widening every second one is a shift, the others a mask.
        Sums do not ask for the order of elements; what is stored is put in order when two vectors become
        one; and what is kept is read as it was kept.
        """
        if item.keeps or item.reads:
            return all(self._may_take_pairs(p) for p in self.walks if p.keeps or p.reads)
        return self._may_take_pairs(item)

    def _may_take_pairs(self, item: Pass) -> bool:
        plan, target, last = self.plan, self.target, self.plan.rank - 1
        if item.column_sums or not target.mask_registers or not plan.row_dims:
            return False
        if any(dot_factors(target, plan, n) for n in item.row_sums):
            return False  # they are not widened at all
        found = bool(item.reads)
        for number in needed_nodes(plan, self.roots(item), item.reads):
            node = plan.nodes[number]
            if last not in plan.depends[number] or isinstance(node, Apply):
                continue
            if not isinstance(node, Load) or node.dtype != "bf16" or node.where >= 0:
                return False
            if not _is_run(node.index, last):
                return False
            found = True
        return found and all(self._stores_pairs(s) for s in item.stores)

    def _stores_pairs(self, item: Store) -> bool:
        """Whether a store rounds adjacent vectors to bf16."""
        last = self.plan.rank - 1
        if self.plan.operands[item.operand].dtype != "bf16" or not self.target.bf16_dot:
            return False
        if isinstance(self.plan.nodes[item.node], Load) or last not in self.plan.depends[item.node]:
            return False
        return item.where < 0 and not item.combine and _is_run(item.index, last)

    @cached_property
    def coming(self) -> ComingRows:
        """What the passes ask for of the next rows; nothing if there is one pass, or a cache has all."""
        plan, walks = self.plan, self.walks
        if len(walks) < 2 or not plan.row_dims or self._bytes < self.target.l2_bytes:
            return ComingRows(plan)
        if self.overlapped and not self.is_dear:
            return ComingRows.beside_results(plan, self._runs, self._results, len(walks), self.at_once)
        if self.overlapped:
            return ComingRows.along(plan, self._runs) if self._work > _WORK_DEAR else ComingRows(plan)
        near = 2 * self.at_once * self.row_bytes <= self.target.l1_bytes
        if self._bytes >= self.target.l3_bytes and not self.is_dear:
            near = ComingRows.within_a_page(plan, self._runs, self.at_once)
            if near and self.at_once == 1:
                return ComingRows.evenly(plan, self._runs, len(walks))
        if walks[1].stores:  # memory is busy with results
            return ComingRows(plan)
        if near and self._claims:
            return ComingRows.in_turn(plan, self._runs, self._results, len(walks))
        return ComingRows.between(plan, self._runs, near=near)

    @cached_property
    def _bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(o.bytes for o in self.plan.operands)

    @property
    def _claims(self) -> bool:
        """Whether results are written at last, to lines that a cache may have lost or not."""
        if not self.target.l2_bytes <= self._bytes < self.target.l3_bytes or self.is_dear:
            return False
        return len(self.walks) > 2 and bool(self._results) and self.row_bytes >= _SHORTEST_IN_TURN

    @property
    def _is_wide(self) -> bool:
        """Whether all that is read and written in rows is of wide elements."""
        operands = {run.operand for run in (*self._runs, *self._results)}
        return all(BYTES[self.plan.operands[k].dtype] >= _WIDE for k in operands)

    @property
    def _results(self) -> list[Run]:
        """What the last pass writes in every row without having read it, each once."""
        read = {n.operand for n in self.plan.nodes if isinstance(n, Load)}
        stores = [s for item in self.walks[-1:] for s in item.stores]
        written = [Run(s.operand, s.index) for s in stores if s.operand not in read]
        return [run for run in dict.fromkeys(written) if _is_run(run.index, self.plan.rank - 1)]

    @cached_property
    def _runs(self) -> list[Run]:
        """What the passes read of each row, each once."""
        last, found = self.plan.rank - 1, dict[Run, None]()
        for walk in self.walks:
            for number in needed_nodes(self.plan, self.roots(walk)):
                node = self.plan.nodes[number]
                if isinstance(node, Load) and node.index.dims() & self.outer and _is_run(node.index, last):
                    found[Run(node.operand, node.index)] = None
        return list(found)


def _is_run(index: Index, dim: int) -> bool:
    """Whether neighbours along a dim are neighbours in memory."""
    return not index.values() and index.is_linear_in(dim) and index.factor(dim) == 1
