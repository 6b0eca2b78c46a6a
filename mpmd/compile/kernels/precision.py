"""bf16 arithmetic inside of a kernel, without rounding after every operation.

    y = round(a * b); z = round(y + c)  ->  z = round(a * b + c)

Values are rounded where they are stored, where the program converts them, and where a small difference
would become a large one: comparisons, rounding to integers, bit patterns.  Results are more exact, with half
of the instructions.  XLA calls that "excess precision".  `hlo-keep-rounding` has written conversions into
the chains that lead to comparisons and the like, and to values that may cancel, so that every kernel which
computes such a value rounds it.
"""

from __future__ import annotations

import numpy as np

from mpmd.compile.kernels.builder import PlanBuilder, renumbered
from mpmd.compile.kernels.operations import NUMPY_DTYPE, OPERATIONS
from mpmd.compile.kernels.plan import Apply, Constant, KernelPlan, Node, ReduceNode, arguments

NARROW_TYPE, WIDE_TYPE = "bf16", "f32"
ABRUPT = frozenset(("ceil", "floor", "remainder", "round-nearest-afz", "round-nearest-even", "sign"))
"""Operations whose result may change much if an operand changes little."""
EXACT = (ABRUPT - {"remainder"}) | {"abs", "clamp", "maximum", "minimum", "negate", "select"}
"""Operations whose results their operands' dtype already holds."""


def without_rounding(plan: KernelPlan) -> KernelPlan:
    """The plan with bf16 arithmetic in f32; the plan itself if it has none."""
    if not any(
        n.dtype == NARROW_TYPE and isinstance(n, Apply | ReduceNode) and _is_smooth(n) for n in plan.nodes
    ):
        return plan
    return _Widening(plan).plan()


def _is_smooth(node: Node) -> bool:
    if not isinstance(node, Apply):
        return isinstance(node, ReduceNode)
    return OPERATIONS[node.op].result == "same" and node.op not in ABRUPT


class _Widening:
    """The rewriting of one plan.  Every bf16 node has a rounded and an unrounded value."""

    def __init__(self, old: KernelPlan) -> None:
        self.old = old
        self.build = PlanBuilder(old.name, old.extents, batch_dims=old.batch_dims, row_dims=old.row_dims)
        for operand in old.operands:
            self.build.operand(operand.name, operand.dtype, operand.size)
        self._rounded: dict[int, int] = {}
        self._wide: dict[int, int] = {}

    def plan(self) -> KernelPlan:
        """The plan in f32."""
        for number, node in enumerate(self.old.nodes):
            if node.dtype == NARROW_TYPE and _is_smooth(node):
                self._wide[number] = self._in_f32(node)
            else:
                numbers = {k: self.rounded(k) for k in arguments(node)}
                self._rounded[number] = self.build.node(renumbered(node, numbers))
        for store in self.old.stores:
            numbers = {k: self.rounded(k) for k in store.index.values()}
            where = self.rounded(store.where) if store.where >= 0 else -1
            index, value = store.index.renumber(numbers), self.rounded(store.node)
            self.build.store(store.operand, index, value, combine=store.combine, where=where)
        return self.build.finish()

    def rounded(self, number: int) -> int:
        """A node's value in its own dtype."""
        if number not in self._rounded:
            self._rounded[number] = self.build.convert(self._wide[number], NARROW_TYPE)
        return self._rounded[number]

    def wide(self, number: int) -> int:
        """A bf16 node's value in f32; other values unchanged."""
        if number not in self._wide:
            node = self.old.nodes[number]
            if node.dtype != NARROW_TYPE:
                return self._rounded[number]
            if isinstance(node, Constant):
                value = float(np.asarray(node.value).astype(NUMPY_DTYPE[NARROW_TYPE]))
                self._wide[number] = self.build.constant(value, WIDE_TYPE)
            else:
                self._wide[number] = self.build.convert(self._rounded[number], WIDE_TYPE)
        return self._wide[number]

    def _in_f32(self, node: Node) -> int:
        if isinstance(node, ReduceNode):
            arg = self.wide(node.arg)
            return self.build.node(ReduceNode(WIDE_TYPE, node.op, arg, node.axis))
        assert isinstance(node, Apply) and OPERATIONS[node.op].result == "same"
        return self.build.apply(node.op, *(self.wide(a) for a in node.args))
