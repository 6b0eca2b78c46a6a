"""Several rows at once, far apart from each other: each is the next row of a run of rows of its own.

Adding up rows one by one loads and stores the sums for every row.  Several rows at once save that; were they
neighbours, each would end where the next one begins, and the core's prefetchers, which follow a run of lines,
would have to find all of them again after every row.  So the rows are cut into as many runs as are read at
once, each of which goes on without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.together import needed_nodes
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.builder import Index as Position
from mpmd.compile.backends.native_cpu.llvm.types import Value
from mpmd.compile.backends.native_cpu.storage import BYTES, MEMORY
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.plan import ELEMENT, Apply, KernelPlan, Load, store_level

_MOST_STREAMS = 8  # that a core's prefetchers follow well
_ROWS = 4  # as long as their sums fit into L1
_NARROW_ROWS = 2  # of bf16, whose sums are twice as long as they are
_FEWEST_ROWS = 2
_MOST_OPERATIONS = 64  # of one vector of every row: arithmetic as long as this hides all loads of sums
_LINE_BYTES = 64
_BYTES_AHEAD = 768
_WIDE = 4  # bytes of an element
_SHARE_OF_CACHE = 0.25  # of the last cache, which others use too: arrays beyond it come from memory

Rows = Callable[[list[Position], list[Value]], list[Value]]


def rows_at_once(plan: KernelPlan, target: CpuTarget, roots: Sequence[int], line_bytes: int) -> int:
    """How many rows are best read at once.

    Args:
        plan: the plan.
        target: the CPU.
        roots: numbers of the nodes that are computed at every point.
        line_bytes: size of the sums of a row.
    """
    needed = [plan.nodes[n] for n in needed_nodes(plan, roots)]
    loads = {(n.operand, n.index) for n in needed if isinstance(n, Load) and _moves(plan, n)}
    stores = [s for s in plan.stores if store_level(plan, s) == ELEMENT]
    streams = max(1, len(loads) + len(stores))
    narrow = all(BYTES[plan.operands[k].dtype] < 4 for k, _ in loads)
    if line_bytes <= target.l1_bytes // 2:
        rows = max(_FEWEST_ROWS, (_NARROW_ROWS if narrow else _ROWS) // streams)
    else:
        rows = _MOST_STREAMS if narrow or line_bytes > target.l1_bytes else _ROWS
    operations = sum(isinstance(n, Apply) and n.op != "convert" for n in needed)
    rows = min(rows, _MOST_STREAMS // streams, _MOST_OPERATIONS // max(1, operations))
    return 1 << max(0, rows.bit_length() - 1)


def _moves(plan: KernelPlan, node: Load) -> bool:
    """Whether every row has elements of its own in an operand."""
    dims = node.index.dims()
    return bool(dims & set(plan.outer)) and bool(dims & set(plan.row))


def first_row(f: FunctionBuilder, rows: int, groups: int, at_once: int, group: Position) -> Position:
    """Where a group of rows begins: groups are whole rounds but for the last one's end.

    Args:
        f: where the code goes.
        rows: of all groups.
        groups: how many.
        at_once: rows of a round.
        group: the group's number; after the last one stands the end.
    """
    return f.imin(f.imul(f.idiv(f.imul(group, -(-rows // at_once)), groups), at_once), rows)


def far_rows(
    f: FunctionBuilder,
    low: Position,
    high: Position,
    count: int,
    carried: Sequence[Value],
    body: Rows,
    *,
    whole: bool,
) -> list[Value]:
    """`body` for all rows of `[low, high)`, `count` of them at once, then the rest one by one.

    Args:
        f: where the code goes.
        low: the first row.
        high: the end; not below `low`.
        count: rows at once.
        carried: values that go from body to body.
        body: gets the rows and the carried values, and returns the next ones.
        whole: whether it is known that nothing is left over.
    """
    each = f.idiv(f.isub(high, low), count)
    with f.loop(0, each, carried=carried) as loop:
        rows = [f.iadd(f.iadd(low, f.imul(each, k)), loop.i) for k in range(count)]
        loop.carry(body(rows, loop.carried))
    if whole or count == 1:
        return loop.carried
    with f.loop(f.iadd(low, f.imul(each, count)), high, carried=loop.carried) as rest:
        rest.carry(body([rest.i], rest.carried))
    return rest.carried


def lines_to_come(
    plan: KernelPlan, target: CpuTarget, roots: Sequence[int], narrowest: int = _WIDE
) -> list[Load]:
    """The loads whose lines a kernel asks for ahead of time: rows without a gap, from memory.

    What a cache holds is there soon enough; beside sums of a whole row so are the fewer lines of numbers that
    are narrower than these.

    Args:
        plan: the plan.
        target: the CPU.
        roots: numbers of the nodes that are computed at every point.
        narrowest: bytes of the narrowest elements that are asked for.
    """
    if sum(o.bytes for o in plan.operands) < target.l3_bytes * _SHARE_OF_CACHE:
        return []
    found: dict[tuple[int, str], Load] = {}
    for number in needed_nodes(plan, roots):
        node = plan.nodes[number]
        if not isinstance(node, Load) or node.index.values() or not _moves(plan, node):
            continue
        if BYTES[node.dtype] < narrowest:
            continue
        last, above = plan.rank - 1, plan.rank - 2
        if not all(node.index.is_linear_in(d) for d in (last, above)) or node.index.factor(last) != 1:
            continue
        if node.index.factor(above) == plan.extents[last]:
            found[node.operand, str(node.index)] = node
    return list(found.values())


def ask_ahead(rows: Sequence[Scope], loads: Sequence[Load], parts: Sequence[Lanes]) -> None:
    """Ask for what some adjacent vectors of every row need, and into the second cache for what lies ahead.

    LLVM loads in any order.  Memory is fastest for whoever asks for some lines of a row, then for those of
    the next one, so they are asked for once more, in this order, before the first is loaded.  Of narrow
    numbers only they are: those ahead are fewer lines, and the core asks for them in time.
    """
    f, last = rows[0].f, rows[0].plan.rank - 1
    for ahead, locality in ((_BYTES_AHEAD, 2), (0, 3)) if loads else ():
        for row in rows:
            for node in loads:
                size, element = BYTES[node.dtype], MEMORY[node.dtype]
                if ahead and size < _WIDE:
                    continue
                at = row.inside({last: parts[0].start}).position(node.index)
                for line in range(0, sum(part.count for part in parts) * size, _LINE_BYTES):
                    place = f.offset(row.pointers[node.operand], f.iadd(at, (ahead + line) // size), element)
                    f.prefetch(place, locality=locality)
    if loads:
        f.keep_order()
