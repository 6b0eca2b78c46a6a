"""Rows at places that the program computes: asked for before their turn.

A gather reads row after row, each somewhere else.  The hardware sees a run of lines only once some of them
were read, and goes on past its end: of a table that caches hold it comes late, of one beyond them it fetches
as much in vain as it finds.  But a row's place is known long before the row is wanted:

* near, where the last cache holds the arrays: the lines of a row some 2 KB ahead are asked for while this one
  is copied, and are in the first cache when their turn comes; and so are the result's, which the last cache
  may have lost: a store waits for its line, and the core for the store;
* far: lines are asked for into the second cache, which takes more requests at once than the first one, some
  rows ahead.  It drops requests while it has too many, so each line is asked for again half as far ahead.  A
  row itself is read in an order without any pattern, so that nothing is fetched beyond its end.

Elements at computed places of the rows of a large array have no pattern either: whole rows are asked for.

A single run of lines beside results that go past the caches is foreseen by the hardware, but not far enough:
it is asked for into the first cache some way ahead.  Two runs side by side come slower with requests.

Measured on Zen 4 in C, of a copy's bandwidth: gathers of rows of 0.75 to 12 KB from 64 MB 0.40-0.50 without
all this, 0.9-1.1 with it; in the last cache 0.85 and 0.92; sums into such rows 0.6 and 0.9.  A copy past the
caches is 1.1-1.18 times as fast with requests 1 to 4 KB ahead, a sum of two arrays 0.9-0.98 times.  Gathers
of 1,024 rows of 768 are 1.0-1.05 times as fast with requests for the result's lines, two in a round, where a
cache has them, and 1.1-1.27 times where it has lost them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.nest import product, unflatten
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.index import Index, dim
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.compile.kernels.plan import Apply, KernelPlan, Load, arguments

LINE = 64  # bytes of a cache line
_NEAR = 2 << 10  # bytes of rows between a request and its use, where the last cache holds the arrays
_FAR = 12 << 10  # the same beyond it
_FEWEST_ROWS, _MOST_ROWS = 4, 64  # far ahead
_THRICE = 1 << 10  # bytes of a row from which on a line is asked for three times
_LONGEST = 8 << 10  # bytes of a row up to which the order of its lines has no pattern
_SINGLE = 2 << 10  # bytes of a single run between a request and its use
_LONG = 16 << 10  # bytes of such a run: what is asked for beyond its end is not worth a word
_MOST_OPERATIONS = 16  # that compute a place: they are done once more for each request


@dataclass(frozen=True)
class Run:
    """Elements of an operand that lie side by side along the last dim."""

    operand: int
    index: Index


@dataclass(frozen=True)
class Ahead:
    """What a kernel asks for before its turn.

    Attributes:
        plan: the plan.
        runs: what is read in each row.
        distances: how many rows ahead, the farthest first.
        far: whether the arrays are larger than the last cache.
        results: what is written row after row, its lines to be claimed.
    """

    plan: KernelPlan
    runs: tuple[Run, ...]
    distances: tuple[int, ...]
    far: bool
    results: tuple[Run, ...] = ()

    @property
    def shuffled(self) -> bool:
        """Whether rows are to be read in an order without a pattern."""
        placed = any(run.index.values() for run in self.runs)
        return self.far and placed and self.plan.extents[-1] * self._widest <= _LONGEST

    @property
    def _widest(self) -> int:
        return max(BYTES[self.plan.operands[run.operand].dtype] for run in self.runs)

    def whole_lines(self, lanes: int) -> int:
        """Vectors that fill a line of everything that is asked for."""
        narrowest = min(BYTES[self.plan.operands[run.operand].dtype] for run in self.runs)
        return max(1, LINE // (lanes * narrowest))

    def rows(self, start: Scope, row: Position, end: Position) -> list[tuple[Value, int]]:
        """Where the rows to come begin, and the size of their elements.

        Args:
            start: the function's scope.
            row: number of the current row.
            end: number after the last one.
        """
        f, plan, found = start.f, self.plan, list[tuple[Value, int]]()
        last = plan.rank - 1
        for distance in self.distances:
            coming = f.imin(f.iadd(row, distance), f.isub(end, 1))
            scope = start.inside({**unflatten(f, coming, range(last), plan.extents), last: 0})
            for run in self.runs:
                size, pointer = BYTES[plan.operands[run.operand].dtype], start.pointers[run.operand]
                at = f.imul(scope.position(run.index), size)
                # a place may be outside of the array, where a guard keeps it from being read
                found.append((f.op(f"getelementptr i8, ptr {pointer}, i64 {at}", "ptr"), size))
        return found

    def ask(self, f: FunctionBuilder, rows: Sequence[tuple[Value, int]], parts: Sequence[Lanes]) -> None:
        """Ask for the lines of the rows to come that lie as these adjacent vectors lie in the current one."""
        if parts[0].count == 1:
            return
        count = len(parts) * parts[0].count
        for address, size in rows:
            at = f.imul(parts[0].start, size)
            for offset in range(0, count * size, LINE):
                place = f.op(f"getelementptr i8, ptr {address}, i64 {f.iadd(at, offset)}", "ptr")
                f.prefetch(place, locality=2 if self.far else 3)

    def claim(self, scope: Scope, parts: Sequence[Lanes]) -> None:
        """Ask for the lines of the results some way ahead of these adjacent vectors, to write them."""
        for run in self.results if parts[0].count > 1 else ():
            for place in _lines_beyond(scope, run, parts, _NEAR):
                scope.f.prefetch(place, write=True)


@dataclass(frozen=True)
class RunAhead:
    """The only run of lines that a kernel reads from memory, asked for before its turn.

    Attributes:
        run: what is read along the last dim.
        size: bytes of an element.
    """

    run: Run
    size: int

    def ask(self, scope: Scope, parts: Sequence[Lanes]) -> None:
        """Ask for the lines that lie as far ahead of these adjacent vectors as is good."""
        if len(parts) * parts[0].count * self.size < LINE:  # the rest of a row
            return
        for place in _lines_beyond(scope, self.run, parts, _SINGLE):
            scope.f.prefetch(place)


def _lines_beyond(scope: Scope, run: Run, parts: Sequence[Lanes], distance: int) -> Iterator[Value]:
    """The address of each line so many bytes beyond adjacent vectors; the array may end before it."""
    f, pointer = scope.f, scope.pointers[run.operand]
    size = BYTES[scope.plan.operands[run.operand].dtype]
    at = f.imul(scope.inside({parts[0].dim: parts[0].start}).position(run.index), size)
    for offset in range(distance, distance + len(parts) * parts[0].count * size, LINE):
        yield f.op(f"getelementptr i8, ptr {pointer}, i64 {f.iadd(at, offset)}", "ptr")


def run_ahead(plan: KernelPlan, target: CpuTarget, streamed: Collection[int]) -> RunAhead | None:
    """The run that a kernel over a plan of kind `loop` asks for ahead.

    Args:
        plan: the plan.
        target: the CPU.
        streamed: numbers of the results that go past the caches.

    Returns:
        None if no result goes past the caches, if several runs come from memory, if rows are short, or if
        functions such as an exponential take longer than memory.
    """
    last, loads = plan.rank - 1, [n for n in plan.nodes if isinstance(n, Load)]
    far = dict.fromkeys(
        Run(n.operand, n.index) for n in loads if plan.operands[n.operand].bytes >= target.l2_bytes
    )
    dear = any(isinstance(n, Apply) and OPERATIONS[n.op].is_expensive for n in plan.nodes)
    if not streamed or len(far) != 1 or dear:
        return None
    run = next(iter(far))
    size = BYTES[plan.operands[run.operand].dtype]
    in_order = not run.index.values() and run.index.is_linear_in(last) and run.index.factor(last) == 1
    return RunAhead(run, size) if in_order and plan.extents[-1] * size >= _LONG else None


def rows_ahead(plan: KernelPlan, target: CpuTarget) -> Ahead | None:
    """What a kernel over a plan of kind `loop` asks for ahead, or None if no row's place is computed."""
    if plan.rank < 2 or not plan.size:
        return None
    runs = _runs(plan)
    placed = [run for run in runs if run.index.values()]
    rows = product(plan.extents, range(plan.rank - 1))
    far = sum(o.bytes for o in plan.operands) >= target.l3_bytes
    if far and not placed:
        placed = _picked(plan)
    widths = [plan.extents[-1] * BYTES[plan.operands[run.operand].dtype] for run in placed]
    if not placed or rows < 2 or max(widths) < LINE or _operations(plan, placed) > _MOST_OPERATIONS:
        return None
    width = max(widths)
    if not far:
        results = _results(plan) if sum(o.bytes for o in plan.operands) >= target.l2_bytes else ()
        return Ahead(plan, tuple(placed), (max(1, -(-_NEAR // width)),), far=False, results=results)
    # lines that are read without a pattern are not foreseen by the hardware, wherever they lie
    large = [run for run in runs if plan.operands[run.operand].bytes >= target.l2_bytes]
    outside = dict.fromkeys((*placed, *large))
    most = min(_MOST_ROWS, max(_FEWEST_ROWS, -(-_FAR // width)))
    distances = (most, most // 2, most // 4) if width >= _THRICE else (most, most // 2)
    return Ahead(plan, tuple(outside), distances, far=True)


def _runs(plan: KernelPlan) -> list[Run]:
    """What is read from adjacent places along the last dim, and not the same in every row; each once."""
    last = plan.rank - 1
    read = [(n.operand, n.index) for n in plan.nodes if isinstance(n, Load)]
    read += [(s.operand, s.index) for s in plan.stores if s.combine]
    found = dict[Run, None]()
    for operand, index in read:
        varies = any(last in plan.depends[v] for v in index.values())
        if index.is_linear_in(last) and index.factor(last) == 1 and not varies:
            others = index.dims() - {last}
            if others or index.values():
                found[Run(operand, index)] = None
    return list(found)


def _results(plan: KernelPlan) -> tuple[Run, ...]:
    """What is written without being read, from one row to the next without a gap; each once."""
    last, above, found = plan.rank - 1, plan.rank - 2, dict[Run, None]()
    read = {n.operand for n in plan.nodes if isinstance(n, Load)}
    for item in plan.stores:
        index = item.index
        if item.combine or item.operand in read or index.values():
            continue
        if not all(index.is_linear_in(d) for d in (last, above)) or index.factor(last) != 1:
            continue
        if index.factor(above) == plan.extents[last]:
            found[Run(item.operand, index)] = None
    return tuple(found)


def _picked(plan: KernelPlan) -> list[Run]:
    """Rows of which elements at computed places are read, as if they were read one after the other."""
    last, found = plan.rank - 1, dict[Run, None]()
    for node in plan.nodes:
        if not isinstance(node, Load) or not any(last in plan.depends[v] for v in node.index.values()):
            continue
        fixed = tuple(t for t in node.index.terms if t[0].kind == "dim" and t[0].number != last)
        if fixed and min(factor for _, factor in fixed) in range(1, 2 * plan.extents[-1] + 1):
            found[Run(node.operand, Index(fixed, node.index.constant) + dim(last))] = None
    return list(found)


def _operations(plan: KernelPlan, runs: Sequence[Run]) -> int:
    """Operations that compute where some runs begin."""
    found, waiting = set[int](), [v for run in runs for v in run.index.values()]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += arguments(plan.nodes[number])
    return sum(isinstance(plan.nodes[n], Apply) for n in found)
