"""The work of a kernel, independent of the device: bytes, operations, parallel parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpmd.compile.kernels.operations import DTYPE_BYTES, OPERATIONS
from mpmd.compile.kernels.plan import (
    BATCH,
    COLUMN,
    ELEMENT,
    Apply,
    KernelPlan,
    Load,
    ReduceNode,
    Store,
    store_level,
)

_MIN_PART = 2048
"""Points of the smallest part of a kernel that is worth a processor of its own."""

_MAX_LINE_BYTES = 64
"""Elements so far apart share a line on no device."""


@dataclass(frozen=True)
class KernelWorkload:
    """The work of one kernel.

    Attributes:
        kind: of the kernel: `loop`, `row`, `column`, `mixed` or `matmul`.
        flops: floating-point operations as commonly counted: one per elementwise operation, two per
            multiply-add.
        vector_bytes: operand bytes that vector instructions work on, each operation weighted by its cost: the
            instructions themselves are this over the device's vector width.
        matmul_dtype: element type of a matrix product; empty for other kernels.
        read_bytes: bytes that are read at least once.
        again_bytes: bytes that are read again, by other points or by later passes.
        written_bytes: bytes that are written.
        scattered_bytes: bytes, of the above, for which neighbours in a vector do not share cache lines.
        scattered_elements: how many separate accesses these are.
        parts: parts that can run at the same time.
        rows: number of reductions along a row.
        live_values: maximum of values of a point that are live together.
    """

    kind: str
    flops: float
    vector_bytes: float
    read_bytes: float
    again_bytes: float
    written_bytes: float
    parts: int
    matmul_dtype: str = ""
    scattered_bytes: float = 0.0
    scattered_elements: float = 0.0
    rows: int = 0
    live_values: int = 0

    @property
    def memory_bytes(self) -> float:
        """Lower bound of the bytes to move."""
        return self.read_bytes + self.written_bytes


def plan_workload(plan: KernelPlan, virtual: Collection[int] = ()) -> KernelWorkload:
    """The work of a plan.

    Args:
        plan: the plan.
        virtual: numbers of operands that are not in memory: sums that a product passes to its epilogue.
    """
    points = [_points(plan, k) for k in range(len(plan.nodes))]
    users: list[list[int]] = [[] for _ in plan.nodes]
    for number, used in enumerate(plan.uses):
        for a in dict.fromkeys(used):
            users[a].append(number)
    flops = vector_bytes = read = again = scattered = 0.0
    scattered_elements = rows = 0.0
    for number, node in enumerate(plan.nodes):
        if isinstance(node, Load):
            if node.operand in virtual:
                continue
            loads = points[number] * _passes(plan, number, users[number])
            size = DTYPE_BYTES[node.dtype]
            first = min(plan.operands[node.operand].size, _touched(plan, node))
            read += first * size
            again += max(0, loads - first) * size
            if _is_scattered(plan, node):
                scattered += loads * size
                scattered_elements += loads
        elif isinstance(node, Apply):
            cost = OPERATIONS[node.op].cycles
            width = max(4, DTYPE_BYTES[plan.nodes[node.args[-1]].dtype])
            vector_bytes += points[number] * width * cost
            flops += points[number]
        elif isinstance(node, ReduceNode):
            inner = _points(plan, node.arg, whole=True)
            vector_bytes += inner * max(4, DTYPE_BYTES[node.dtype])
            flops += inner
            rows += points[number] if node.axis == "row" else 0
    stores = [s for s in plan.stores if s.operand not in virtual]
    written = sum(_stored(plan, s) * DTYPE_BYTES[plan.operands[s.operand].dtype] for s in stores)
    parts = math.prod(plan.extents[: plan.rank - max(1, plan.row_dims)]) or 1
    if plan.kind in ("loop", "column"):
        parts = max(1, plan.size // _MIN_PART)
    return KernelWorkload(
        kind=plan.kind,
        flops=flops,
        vector_bytes=vector_bytes,
        read_bytes=read,
        again_bytes=again,
        written_bytes=float(written),
        parts=max(1, parts),
        scattered_bytes=scattered,
        scattered_elements=scattered_elements,
        rows=int(rows),
        live_values=_live_values(plan),
    )


def _points(plan: KernelPlan, number: int, *, whole: bool = False) -> int:
    """How often a node is computed; with `whole`, how often its value is consumed by a reduction."""
    level = plan.levels[number]
    dims = set(range(plan.batch_dims))
    if level in (ELEMENT, "row"):
        dims |= set(plan.outer)
    if level in (ELEMENT, COLUMN) or plan.row_dims == 0 or whole:
        dims |= set(plan.row)
    if plan.row_dims == 0 and level != BATCH:
        dims = set(range(max(plan.depends[number], default=-1) + 1))  # where all inputs are
    return math.prod([plan.extents[d] for d in sorted(dims)])


def _touched(plan: KernelPlan, node: Load) -> int:
    """Upper bound of the different elements that a load reads."""
    dims = set(node.index.dims())
    for value in node.index.values():
        dims |= plan.depends[value]
    return math.prod([plan.extents[d] for d in sorted(dims)])


def _stored(plan: KernelPlan, store: Store) -> int:
    level = store_level(plan, store)
    dims = set(range(plan.batch_dims))
    if level in (ELEMENT, "row"):
        dims |= set(plan.outer)
    if level in (ELEMENT, COLUMN):
        dims |= set(plan.row)
    return math.prod([plan.extents[d] for d in sorted(dims)])


def _is_scattered(plan: KernelPlan, node: Load) -> bool:
    """Whether neighbouring points of the last dim read from different lines."""
    if not plan.rank:
        return False
    last = plan.rank - 1
    if any(last in plan.depends[v] for v in node.index.values()) or not node.index.is_linear_in(last):
        return True
    size = DTYPE_BYTES[node.dtype]
    return abs(node.index.factor(last)) * size >= _MAX_LINE_BYTES and plan.extents[last] > 1


def _passes(plan: KernelPlan, number: int, users: Sequence[int]) -> int:
    """The number of passes over a row that need a load, if nothing is kept between them."""
    stages = {plan.stages[number]} | {
        plan.stages[u] for u in users if not isinstance(plan.nodes[u], ReduceNode)
    }
    return len(stages)


def _live_values(plan: KernelPlan) -> int:
    """Maximum of values of one point that are live at the same time, in the order of the nodes."""
    last_use = {a: k for k, used in enumerate(plan.uses) for a in used}
    for store in plan.stores:
        last_use[store.node] = len(plan.nodes)
    alive = most = 0
    ends: dict[int, int] = {}
    for number in range(len(plan.nodes)):
        alive += 1
        end = last_use.get(number, number)
        ends[end] = ends.get(end, 0) + 1
        most = max(most, alive)
        alive -= ends.pop(number, 0)
    return most
