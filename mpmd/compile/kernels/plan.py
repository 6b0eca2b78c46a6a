"""KernelPlan: the computation of one kernel, without a loop structure.

A plan has an iteration space, a DAG of values and a list of stores:

    dims     batch | outer | row                  the space, outermost first
    levels   element: a value for every point     row: one per (batch, outer)
             column: one per (batch, row)         batch: one per (batch)

A value that does not change along the row dims is at the row level; a reduction over the row dims takes an
element there, one over the outer dims takes an element to the column level and a row value to the batch
level.  Row values may be used by elements again (a softmax reads each row's maximum and sum), so a plan can
hold several passes over a row; column and batch values are final: they are combined only with each other and
with values without outer dims.

The pass of each value follows from the DAG: `stages`.  The parts of a plan are in `nodes.py`, its
invariants in `validity.py` and `guards.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.kernels.nodes import (
    BATCH,
    COLUMN,
    ELEMENT,
    ROW,
    Apply,
    Constant,
    IndexValue,
    Load,
    Node,
    Operand,
    ReduceNode,
    Store,
    arguments,
    dims_of,
    store_arguments,
)
from mpmd.compile.kernels.validity import problems_of
from mpmd.errors import CompileError, collect


@dataclass(frozen=True)
class KernelPlan:
    """The computation of one kernel; see the module's docstring.

    Attributes:
        name: symbol of the kernel.
        extents: sizes of the iteration dims.
        batch_dims: how many leading dims are batch dims.
        row_dims: how many trailing dims are row dims.
        operands: arrays; those that are stored to are results.
        nodes: values, each after its arguments.
        stores: the results.

    Raises:
        CompileError: the parts do not fit together; all problems are listed.
    """

    name: str
    extents: tuple[int, ...]
    batch_dims: int
    row_dims: int
    operands: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    stores: tuple[Store, ...]

    def __post_init__(self) -> None:
        problems = problems_of(self)
        if problems:
            raise collect(CompileError, problems, f"kernel {self.name} is not valid:")

    # -- the space -----------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def outer(self) -> range:
        return range(self.batch_dims, self.rank - self.row_dims)

    @property
    def row(self) -> range:
        return range(self.rank - self.row_dims, self.rank)

    @property
    def size(self) -> int:
        return math.prod(self.extents)

    @property
    def row_size(self) -> int:
        return math.prod([self.extents[d] for d in self.row])

    @cached_property
    def results(self) -> tuple[int, ...]:
        return tuple(sorted({s.operand for s in self.stores}))

    @property
    def kind(self) -> str:
        """`loop`, `row`, `column` or `mixed`, by the reductions in it."""
        axes = {n.axis for n in self.nodes if isinstance(n, ReduceNode)}
        return "loop" if not axes else "mixed" if len(axes) == 2 else axes.pop()

    # -- what follows from the DAG -------------------------------------------------------------------------
    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each node the numbers of those that it uses."""
        return tuple(arguments(node) for node in self.nodes)

    @cached_property
    def depends(self) -> tuple[frozenset[int], ...]:
        """For each node the dims along which its value may change."""
        found: list[frozenset[int]] = []
        for node, used in zip(self.nodes, self.uses):
            found.append(dims_of(node, [found[a] for a in used], self.row, self.outer))
        return tuple(found)

    @cached_property
    def levels(self) -> tuple[str, ...]:
        final: list[bool] = []
        levels: list[str] = []
        row = set(self.row)
        for number, node in enumerate(self.nodes):
            column_sum = isinstance(node, ReduceNode) and node.axis == COLUMN
            final.append(column_sum or any(final[a] for a in self.uses[number]))
            wide = bool(self.depends[number] & row)
            levels.append((COLUMN if wide else BATCH) if final[-1] else (ELEMENT if wide else ROW))
        return tuple(levels)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """For each node the pass over a row in which it can first be computed.

        A row reduction of elements of pass p is known after it, so whatever uses it belongs to pass p + 1.
        """
        stages: list[int] = []
        for node, used in zip(self.nodes, self.uses):
            stage = max((stages[a] for a in used), default=0)
            stages.append(stage + (isinstance(node, ReduceNode) and node.axis == ROW))
        return tuple(stages)

    def text(self) -> str:
        """The plan in a readable form; equal plans have equal text, and it is part of cache keys."""
        dims = [f"d{d}:{e}" for d, e in enumerate(self.extents)]
        first_row_dim = self.rank - self.row_dims
        groups = (dims[: self.batch_dims], dims[self.batch_dims : first_row_dim], dims[first_row_dim:])
        lines = [f"kernel {self.name} [{' | '.join(' '.join(g) for g in groups)}]"]
        results = set(self.results)
        for k, operand in enumerate(self.operands):
            mark = "result" if k in results else "operand"
            lines.append(f"  {mark} {operand.name}: {operand.dtype}[{operand.size}]")
        for k, node in enumerate(self.nodes):
            lines.append(f"  %{k} = {_node_text(self, node)}")
        for store in self.stores:
            how = f" {store.combine}=" if store.combine else " ="
            guard = f" where %{store.where}" if store.where >= 0 else ""
            lines.append(f"  {self.operands[store.operand].name}[{store.index}]{how} %{store.node}{guard}")
        return "\n".join(lines) + "\n"


def store_level(plan: KernelPlan, store: Store) -> str:
    """The dims of a store: a value may be written to more places than it has values."""
    nodes = [plan.levels[n] for n in store_arguments(store)]
    final = COLUMN in nodes or BATCH in nodes
    wide = ELEMENT in nodes or COLUMN in nodes or bool(store.index.dims() & set(plan.row))
    return (COLUMN if wide else BATCH) if final else (ELEMENT if wide else ROW)


def _node_text(plan: KernelPlan, node: Node) -> str:
    if isinstance(node, Constant):
        return f"{node.dtype} {node.value!r}"
    if isinstance(node, IndexValue):
        return f"{node.dtype} index {node.index}"
    if isinstance(node, Load):
        guard = f" where %{node.where}" if node.where >= 0 else ""
        return f"{node.dtype} {plan.operands[node.operand].name}[{node.index}]{guard}"
    if isinstance(node, Apply):
        return f"{node.dtype} {node.op} {' '.join(f'%{a}' for a in node.args)}"
    return f"{node.dtype} reduce-{node.op} %{node.arg} over {node.axis}"
