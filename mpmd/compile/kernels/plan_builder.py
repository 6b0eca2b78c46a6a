"""Building plans: a small front end that numbers nodes, shares equal ones and infers dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpmd.compile.kernels.guards import guard_problems
from mpmd.compile.kernels.index import Index, dim, linear, strides_of
from mpmd.compile.kernels.kernel_plan import (
    COLUMN,
    ROW,
    Apply,
    Constant,
    IndexValue,
    KernelPlan,
    Load,
    Node,
    Operand,
    ReduceNode,
    Store,
    arguments,
    dims_of,
    store_arguments,
)
from mpmd.compile.kernels.operations import OPERATIONS
from mpmd.errors import CompileError, collect


class PlanBuilder:
    """Collects the parts of one plan.  Values are node numbers.

    Args:
        name: symbol of the kernel.
        extents: sizes of the iteration dims.
        batch_dims: how many leading dims are batch dims.
        row_dims: how many trailing dims are row dims.
    """

    def __init__(self, name: str, extents: Sequence[int], *, batch_dims: int = 0, row_dims: int = 0) -> None:
        self.name = name
        self.extents = tuple(extents)
        self.batch_dims = batch_dims
        self.row_dims = row_dims
        self._operands: list[Operand] = []
        self._nodes: list[Node] = []
        self._dims: list[frozenset[int]] = []
        self._numbers: dict[Node | str, int] = {}
        self._stores: list[Store] = []

    def operand(self, name: str, dtype: str, size: int) -> int:
        """Declare an array; returns its number.  Its name is by default its number."""
        name = name or f"p{len(self._operands)}"
        self._operands.append(Operand(name, dtype, size))
        return len(self._operands) - 1

    def node(self, node: Node) -> int:
        """Add a node with valid arguments, or find the equal one."""
        # constants by text: 0.0 and -0.0, 1 and True differ
        key = repr(node) if isinstance(node, Constant) else node
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes)
            self._nodes.append(node)
        return self._numbers[key]

    def node_at(self, number: int) -> Node:
        return self._nodes[number]

    @property
    def row(self) -> range:
        return range(len(self.extents) - self.row_dims, len(self.extents))

    @property
    def outer(self) -> range:
        return range(self.batch_dims, len(self.extents) - self.row_dims)

    def depends(self, node: int) -> frozenset[int]:
        """The dims along which a value may change."""
        for number in range(len(self._dims), node + 1):
            used = [self._dims[a] for a in arguments(self._nodes[number])]
            self._dims.append(dims_of(self._nodes[number], used, self.row, self.outer))
        return self._dims[node]

    def conjuncts(self, condition: int) -> Iterator[int]:
        """The conditions that are all true where one is: the operands of its `and`s."""
        node = self._nodes[condition]
        if isinstance(node, Apply) and node.op == "and":
            for argument in node.args:
                yield from self.conjuncts(argument)
        else:
            yield condition

    def dtype(self, node: int) -> str:
        return self._nodes[node].dtype

    def constant(self, value: float | int | bool, dtype: str) -> int:
        return self.node(Constant(dtype, value))

    def index(self, index: Index, dtype: str = "s64") -> int:
        return self.node(IndexValue(dtype, index))

    def load(self, operand: int, index: Index, *, where: int = -1) -> int:
        """An element of an operand, or zero where the guard is false."""
        return self.node(Load(self._operands[operand].dtype, operand, index, where))

    def load_dense(self, operand: int, dims: Sequence[int] | None = None) -> int:
        """An element of a dense row-major array over the given iteration dims (all by default)."""
        dims = range(len(self.extents)) if dims is None else dims
        return self.load(operand, self.dense(dims))

    def dense(self, dims: Sequence[int]) -> Index:
        """The position in a dense row-major array over the given iteration dims."""
        shape = [self.extents[d] for d in dims]
        return linear([dim(d) for d in dims], strides_of(shape))

    def apply(self, op: str, *args: int, dtype: str = "") -> int:
        """An elementwise operation; the dtype is needed for conversions only."""
        result = OPERATIONS[op].result
        if result == "pred":
            dtype = "pred"
        elif result == "same":
            dtype = self._nodes[args[1 if op == "select" else 0]].dtype
        return self.node(Apply(dtype, op, args))

    def convert(self, value: int, dtype: str) -> int:
        return value if self._nodes[value].dtype == dtype else self.apply("convert", value, dtype=dtype)

    def reduce_row(self, op: str, value: int) -> int:
        return self.node(ReduceNode(self._nodes[value].dtype, op, value, ROW))

    def reduce_column(self, op: str, value: int) -> int:
        return self.node(ReduceNode(self._nodes[value].dtype, op, value, COLUMN))

    def store(self, operand: int, index: Index, value: int, *, combine: str = "", where: int = -1) -> None:
        """Write a value, or combine it with the old one; only where the guard is true."""
        self._stores.append(Store(operand, index, value, combine, where))

    def store_dense(self, operand: int, value: int, dims: Sequence[int] | None = None) -> None:
        """Write to a dense row-major array over the given iteration dims (all by default)."""
        dims = range(len(self.extents)) if dims is None else dims
        self.store(operand, self.dense(dims), value)

    def finish(self) -> KernelPlan:
        """The plan, without the nodes that no store needs.

        Raises:
            CompileError: the parts do not fit together.
        """
        needed = {n for s in self._stores for n in store_arguments(s)}
        for number in reversed(range(len(self._nodes))):
            if number in needed:
                needed |= set(arguments(self._nodes[number]))
        numbers = {old: new for new, old in enumerate(sorted(needed))}
        nodes = tuple(renumbered(self._nodes[old], numbers) for old in numbers)
        stores = tuple(
            Store(
                s.operand,
                s.index.renumber(numbers),
                numbers[s.node],
                s.combine,
                numbers[s.where] if s.where >= 0 else -1,
            )
            for s in self._stores
        )
        plan = KernelPlan(
            self.name, self.extents, self.batch_dims, self.row_dims, tuple(self._operands), nodes, stores
        )
        problems = guard_problems(plan)
        if problems:
            raise collect(CompileError, problems, f"kernel {plan.name} is not valid:")
        return plan


def renumbered(node: Node, numbers: dict[int, int]) -> Node:
    if isinstance(node, Apply):
        return Apply(node.dtype, node.op, tuple(numbers[a] for a in node.args))
    if isinstance(node, ReduceNode):
        return ReduceNode(node.dtype, node.op, numbers[node.arg], node.axis)
    if isinstance(node, Load):
        where = numbers[node.where] if node.where >= 0 else -1
        return Load(node.dtype, node.operand, node.index.renumber(numbers), where)
    return IndexValue(node.dtype, node.index.renumber(numbers)) if isinstance(node, IndexValue) else node
