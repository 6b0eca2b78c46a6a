"""The parts of a KernelPlan: operands, nodes of the value graph, and stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.kernels.index import Index
from mpmd.compile.kernels.operations import DTYPE_BYTES

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
    """The dims along which a node's value may change, given those of its arguments."""
    dims = frozenset[int]().union(*argument_dims)
    if isinstance(node, Load | IndexValue):
        return dims | node.index.dims()
    if isinstance(node, ReduceNode):
        return dims - set(row if node.axis == ROW else outer)
    return dims
