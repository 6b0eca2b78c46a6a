"""KernelPlan: the computation of one kernel, without a loop structure, its parts and its invariants.

A plan has an iteration space, a DAG of values and a list of stores:

    dims     batch | outer | row                  the space, outermost first
    levels   element: a value for every point     row: one per (batch, outer)
             column: one per (batch, row)         batch: one per (batch)

A value that does not change along the row dims is at the row level; a reduction over the row dims takes an
element there, one over the outer dims takes an element to the column level and a row value to the batch
level.  Row values may be used by elements again (a softmax reads each row's maximum and sum), so a plan can
hold several passes over a row; column and batch values are final: they are combined only with each other and
with values without outer dims.

The pass of each value follows from the DAG: `stages`.  `problems_of` lists the invariants that a plan breaks;
guarded loads have theirs in `guards.py`.

`may_share` is the query of buffer assignment: whether a result may be written over an operand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.operations import DTYPE_BYTES, OPERATIONS, REDUCTIONS
from mpmd.errors import CompileError, collect

ELEMENT, ROW, COLUMN, BATCH = "element", "row", "column", "batch"
"""Levels of values; see `plan.py`."""


@dataclass(frozen=True)
class Operand:
    """An array that a kernel reads or writes.

    Attributes:
        name: its name in text and arguments.
        dtype: HLO name of its element type.
        size: number of elements.
    """

    name: str
    dtype: str
    size: int

    @property
    def bytes(self) -> int:
        return int(self.size * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    dtype: str
    value: float | int | bool


@dataclass(frozen=True)
class IndexValue:
    """An index expression as a value: iota, and comparisons of positions."""

    dtype: str
    index: Index


@dataclass(frozen=True)
class Load:
    """An element of an operand.

    Attributes:
        dtype: of the operand.
        operand: number of the operand.
        index: position in it.
        where: number of a `pred` node, or -1; where it is false nothing is read, and the value is zero, which
            no store needs (`guards.py`).
    """

    dtype: str
    operand: int
    index: Index
    where: int = -1


@dataclass(frozen=True)
class Apply:
    """An elementwise operation on nodes."""

    dtype: str
    op: str
    args: tuple[int, ...]


@dataclass(frozen=True)
class ReduceNode:
    """A reduction.

    Attributes:
        dtype: of the value and the result; sums of bf16 and f16 are kept in f32 and rounded once.
        op: name in `REDUCTIONS`.
        arg: number of the node.
        axis: `row` or `column`: which dims go away.
    """

    dtype: str
    op: str
    arg: int
    axis: str


Node = Constant | IndexValue | Load | Apply | ReduceNode


@dataclass(frozen=True)
class Store:
    """A value written to an operand.

    Attributes:
        operand: number of the operand.
        index: position, in the dims of the value's level.
        node: number of the value.
        combine: name of the reduction that combines it with the old value; empty to overwrite.
        where: number of a `pred` node, or -1; where it is false nothing is written.
    """

    operand: int
    index: Index
    node: int
    combine: str = ""
    where: int = -1


def arguments(node: Node) -> tuple[int, ...]:
    """Numbers of the nodes that a node uses, those inside of index expressions included."""
    if isinstance(node, Apply):
        return node.args
    if isinstance(node, ReduceNode):
        return (node.arg,)
    if isinstance(node, Load):
        guard = () if node.where < 0 else (node.where,)
        return (*guard, *node.index.values())
    return node.index.values() if isinstance(node, IndexValue) else ()


def store_arguments(store: Store) -> tuple[int, ...]:
    """Numbers of the nodes that a store uses: its value, its guard, and those inside of its index."""
    guard = () if store.where < 0 else (store.where,)
    return (store.node, *guard, *store.index.values())


def dims_of(node: Node, argument_dims: Sequence[frozenset[int]], row: range, outer: range) -> frozenset[int]:
    """The dims along which a node's value may change, given the dims of its arguments."""
    dims = frozenset[int]().union(*argument_dims)
    if isinstance(node, Load | IndexValue):
        return dims | node.index.dims()
    if isinstance(node, ReduceNode):
        return dims - set(row if node.axis == ROW else outer)
    return dims


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
        depends: list[frozenset[int]] = []
        for node, used in zip(self.nodes, self.uses):
            depends.append(dims_of(node, [depends[a] for a in used], self.row, self.outer))
        return tuple(depends)

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


def problems_of(plan: KernelPlan) -> list[str]:
    problems = []
    if plan.batch_dims < 0 or plan.row_dims < 0 or plan.batch_dims + plan.row_dims > plan.rank:
        return [f"{plan.batch_dims} batch dims and {plan.row_dims} row dims of {plan.rank} dims"]
    if any(e < 0 for e in plan.extents):
        problems.append(f"a negative extent in {plan.extents}")
    problems += [
        f"operand {o.name} has the unknown dtype {o.dtype}"
        for o in plan.operands
        if o.dtype not in DTYPE_BYTES
    ]
    for number, node in enumerate(plan.nodes):
        late = [a for a in plan.uses[number] if not 0 <= a < number]
        if late:
            problems.append(f"%{number} uses %{late[0]}, which is not before it")
            return problems
        problems += [f"%{number}: {p}" for p in _node_problems(plan, node)]
    if not problems:
        problems += [p for store in plan.stores for p in _store_problems(plan, store)]
        problems += _level_problems(plan)
    return problems


def _node_problems(plan: KernelPlan, node: Node) -> list[str]:
    if node.dtype not in DTYPE_BYTES:
        return [f"unknown dtype {node.dtype}"]
    if isinstance(node, Load):
        return _load_problems(plan, node)
    if isinstance(node, ReduceNode):
        return _reduce_problems(plan, node)
    return _apply_problems(plan, node) if isinstance(node, Apply) else []


def _load_problems(plan: KernelPlan, node: Load) -> list[str]:
    if not 0 <= node.operand < len(plan.operands):
        return [f"there is no operand {node.operand}"]
    operand = plan.operands[node.operand]
    problems = []
    if operand.dtype != node.dtype:
        problems.append(f"loads {node.dtype} from {operand.name}, which holds {operand.dtype}")
    if node.where >= 0 and plan.nodes[node.where].dtype != "pred":
        problems.append(f"its guard %{node.where} is {plan.nodes[node.where].dtype}, not pred")
    if node.where < 0 and not node.index.values() and plan.size:
        problems += _outside(node.index, operand, plan)
    return problems


def _outside(index: Index, operand: Operand, plan: KernelPlan) -> list[str]:
    low, high = index.bounds(plan.extents)
    if low < 0 or high >= operand.size:
        return [f"{index} reaches [{low}, {high}] of {operand.name}, which has {operand.size} elements"]
    return []


def _reduce_problems(plan: KernelPlan, node: ReduceNode) -> list[str]:
    if node.op not in REDUCTIONS:
        return [f"no reduction is named {node.op}; there are {', '.join(REDUCTIONS)}"]
    problems = []
    if node.axis not in (ROW, COLUMN):
        problems.append(f"the axis {node.axis!r} is neither row nor column")
    if node.dtype not in REDUCTIONS[node.op].dtypes:
        problems.append(f"reduce-{node.op} is not defined for {node.dtype}")
    if plan.nodes[node.arg].dtype != node.dtype:
        problems.append(f"reduces {plan.nodes[node.arg].dtype} to {node.dtype}")
    return problems


def _apply_problems(plan: KernelPlan, node: Apply) -> list[str]:
    if node.op not in OPERATIONS:
        return [f"no operation is named {node.op}"]
    operation = OPERATIONS[node.op]
    if len(node.args) != operation.arity:
        return [f"{node.op} takes {operation.arity} operands, got {len(node.args)}"]
    kinds = [plan.nodes[a].dtype for a in node.args]
    problems = []
    data = kinds[1:] if node.op == "select" else kinds
    if node.op == "select" and kinds[0] != "pred":
        problems.append(f"select chooses by {kinds[0]}, not pred")
    if len(set(data)) > 1:
        problems.append(f"{node.op} of {' and '.join(data)}: convert them to one dtype")
    if data[0] not in operation.dtypes:
        problems.append(f"{node.op} is not defined for {data[0]}")
    wanted = {"same": data[0], "pred": "pred", "given": node.dtype}[operation.result]
    if node.dtype != wanted:
        problems.append(f"{node.op} of {data[0]} gives {wanted}, not {node.dtype}")
    if node.op == "bitcast-convert" and DTYPE_BYTES[data[0]] != DTYPE_BYTES[node.dtype]:
        problems.append(f"bitcast-convert from {data[0]} to {node.dtype}: sizes differ")
    return problems


def _store_problems(plan: KernelPlan, store: Store) -> list[str]:
    if not 0 <= store.operand < len(plan.operands) or not 0 <= store.node < len(plan.nodes):
        return [f"a store of %{store.node} to operand {store.operand}: one of them does not exist"]
    operand, node = plan.operands[store.operand], plan.nodes[store.node]
    problems = []
    if operand.dtype != node.dtype:
        problems.append(f"stores {node.dtype} to {operand.name}, which holds {operand.dtype}")
    if store.combine and store.combine not in REDUCTIONS:
        problems.append(f"combines by {store.combine!r}, which is not a reduction")
    if store.where < 0 and not store.index.values() and plan.size:
        problems += _outside(store.index, operand, plan)
    if store.where >= 0 and plan.nodes[store.where].dtype != "pred":
        problems.append(f"its guard %{store.where} is {plan.nodes[store.where].dtype}, not pred")
    return problems


def _level_problems(plan: KernelPlan) -> list[str]:
    """Sums over the outer dims can only be combined with values without outer dims, and not reduced again.

    A store combines its value, its guard and what its place is computed from.
    """
    final = [level in (COLUMN, BATCH) for level in plan.levels]
    if not any(final):
        return []
    outer, problems = set(plan.outer), list[str]()
    reduced: list[bool] = []
    for number, node in enumerate(plan.nodes):
        reduced.append(isinstance(node, ReduceNode) or any(reduced[a] for a in plan.uses[number]))
    users: list[tuple[str, Node | Store, tuple[int, ...]]] = [
        (f"%{k}", n, plan.uses[k]) for k, n in enumerate(plan.nodes)
    ]
    users += [(f"a store to {plan.operands[s.operand].name}", s, store_arguments(s)) for s in plan.stores]
    for name, user, used in users:
        if not any(final[a] for a in used):
            continue
        if isinstance(user, ReduceNode):
            problems.append(f"{name} reduces a value that is already reduced over the outer dims")
        problems += [
            f"{name} combines a sum over the outer dims with %{a}, which is inside of it"
            for a in used
            if not final[a] and (plan.depends[a] & outer or reduced[a])
        ]
        here = user.index.dims() & outer if isinstance(user, Load | IndexValue | Store) else ()
        if here:
            names = ", ".join(f"d{d}" for d in sorted(here))
            problems.append(f"{name} uses a sum over the outer dims, but its place depends on {names}")
    return problems


def may_share(
    plan: KernelPlan, source: int, result: int, *, row: bool = False, stores_last: bool = False
) -> bool:
    """Whether a result may use the memory of an operand without later readers.

    True if every element of the operand is read before its place is written: the result is written where the
    operand is read, by the same point and by no other one, and no later pass over the row reads the operand
    again.

    Args:
        plan: the kernel.
        source: number of the operand that is read.
        result: number of the operand that is written.
        row: both hold one row, which is dead when the next one begins.
        stores_last: kernels compute all finished values of a place before they store the first.
    """
    if source == result or plan.operands[source].bytes != plan.operands[result].bytes:
        return source == result
    if source in plan.results:
        return False
    stores = [s for s in plan.stores if s.operand == result]
    loads = [(k, n) for k, n in enumerate(plan.nodes) if isinstance(n, Load) and n.operand == source]
    if not loads or not stores:
        return False
    place = stores[0].index
    if plan.operands[source].dtype != plan.operands[result].dtype:
        return False
    if any(s.index != place or s.combine or s.where >= 0 or place.values() for s in stores):
        return False
    if any(node.index != place for _, node in loads):
        return False
    if any(store_level(plan, s) != ELEMENT for s in stores) and plan.row_dims:
        return _only_finishes(plan, [k for k, _ in loads], stores, stores_last)
    if any(e > 1 and d not in place.dims() for d, e in enumerate(plan.extents) if not row or d in plan.row):
        return False  # written once more, by a point that reads it then
    written_in = min(max(plan.stages[n] for n in store_arguments(s)) for s in stores)
    last = _last_passes(plan)
    return all(last[number] <= written_in for number, _ in loads)


def _only_finishes(plan: KernelPlan, loads: list[int], stores: list[Store], stores_last: bool) -> bool:
    """Whether loads are used for nothing that happens after one store of a finished column or batch value.

    Such a store happens after all outer iterations, each place by itself.  Where all values of a place come
    before its first store, other stores may use the loads, too, and so may the outer iterations, if they are
    the ones of one program that stores the place.
    """
    if len(stores) != 1 or store_level(plan, stores[0]) not in (COLUMN, BATCH):
        return False
    final, place = store_level(plan, stores[0]), stores[0].index
    if any(plan.extents[d] > 1 and d not in place.dims() for d in range(plan.batch_dims)):
        return False
    iterated = stores_last and final == COLUMN
    reached = set(loads)
    for number, node in enumerate(plan.nodes):
        if reached & set(arguments(node)):
            if isinstance(node, ReduceNode) and not iterated:
                return False
            if not isinstance(node, ReduceNode) or node.axis != COLUMN:
                reached.add(number)
    inner = (ELEMENT, ROW) if iterated else ()
    others = [s for s in plan.stores if s is not stores[0] and reached & set(store_arguments(s))]
    return all(
        store_level(plan, s) in inner or (stores_last and (store_level(plan, s), s.index) == (final, place))
        for s in others
    )


def _last_passes(plan: KernelPlan) -> list[int]:
    """For each node the last pass over a row that may compute it again."""
    last = list(plan.stages)
    for store in plan.stores:
        needed = store_arguments(store)
        written_in = max(plan.stages[n] for n in needed)
        for number in needed:
            last[number] = max(last[number], written_in)
    for user in reversed(range(len(plan.nodes))):  # users come after their operands
        node = plan.nodes[user]
        for number in arguments(node):
            # a reduction reads its argument in the argument's own pass
            read_in = plan.stages[number] if isinstance(node, ReduceNode) else last[user]
            last[number] = max(last[number], read_in)
    return last
