"""bf16 arithmetic inside of a kernel, without rounding after every operation.

    y = round(a * b); z = round(y + c)  ->  z = round(a * b + c)

Values are rounded where they are stored, where the program converts them, and where a small difference
would become a large one: comparisons, rounding to integers, bit patterns.  Results are more exact, with half
of the instructions.  XLA calls that "excess precision".  `hlo-keep-rounding` has written conversions into
the chains that lead to comparisons and the like, and to values that may cancel, so that every kernel which
computes such a value rounds it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from mpmd.compile.kernels.kernel_plan import (
    ROW,
    Apply,
    Constant,
    KernelPlan,
    Load,
    Node,
    ReduceNode,
    arguments,
    store_arguments,
)
from mpmd.compile.kernels.operations import FLOATS, NUMPY_DTYPE, OPERATIONS
from mpmd.compile.kernels.plan_builder import PlanBuilder, renumbered

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


def without_narrow_sums(plan: KernelPlan, factors: Collection[int]) -> KernelPlan:
    """The plan without roundings to bf16 on the way to some factors of products.

    They stay in values that others may know rounded: those that are stored, those that meet a value of a row
    which is in memory, and those of which something discrete is made.

    Args:
        plan: the plan.
        factors: operands that exist in the plan only.
    """
    sharp = {n for s in plan.stores if s.operand not in factors for n in store_arguments(s)}
    # From users to arguments: what a sharp value is computed from is sharp.
    for number in reversed(range(len(plan.nodes))):
        if number in sharp or _meets_row(plan, number) or _is_discrete(plan, number):
            sharp.update(plan.uses[number])
    narrow = _narrow_values(plan)
    build = PlanBuilder(plan.name, plan.extents, batch_dims=plan.batch_dims, row_dims=plan.row_dims)
    for operand in plan.operands:
        build.operand(operand.name, operand.dtype, operand.size)
    numbers: dict[int, int] = {}
    for number, node in enumerate(plan.nodes):
        source = _rounded_by(plan, number)
        # Dropped where bf16 holds the value anyway, or where no other kernel knows it rounded.
        if source >= 0 and (source in narrow or number not in sharp):
            numbers[number] = numbers[source]
        else:
            numbers[number] = build.node(renumbered(node, numbers))
    for store in plan.stores:
        where = numbers[store.where] if store.where >= 0 else -1
        place = store.index.renumber(numbers)
        build.store(store.operand, place, numbers[store.node], combine=store.combine, where=where)
    return build.finish()


def _narrow_values(plan: KernelPlan) -> set[int]:
    """Values of f32 that bf16 holds, but for denormal ones."""
    narrow = set[int]()
    for number, node in enumerate(plan.nodes):
        if isinstance(node, Constant) and node.dtype == WIDE_TYPE:
            value = np.float32(node.value)
            if value.astype(NUMPY_DTYPE[NARROW_TYPE]).astype(np.float32) == value:
                narrow.add(number)
        elif isinstance(node, Apply) and node.dtype == WIDE_TYPE:
            values = node.args[1:] if node.op == "select" else node.args
            if node.op == "convert":
                holds = plan.nodes[node.args[0]].dtype == NARROW_TYPE
            elif node.op == "multiply":
                # A power of two moves the exponent and leaves the mantissa.
                holds = any(
                    a in narrow and _is_power_of_two(plan.nodes[b]) for a, b in (values, values[::-1])
                )
            else:
                holds = node.op in EXACT and all(a in narrow for a in values)
            if holds:
                narrow.add(number)
    return narrow


def _is_power_of_two(node: Node) -> bool:
    return isinstance(node, Constant) and abs(math.frexp(float(node.value))[0]) == 0.5


def _meets_row(plan: KernelPlan, number: int) -> bool:
    """Whether elements may cancel with a value of their row that is read from memory."""
    node = plan.nodes[number]
    if not isinstance(node, Apply) or node.op not in ("add", "subtract"):
        return False
    return any(plan.levels[a] == ROW and _is_read(plan, a) for a in node.args)


def _is_read(plan: KernelPlan, number: int) -> bool:
    """Whether a value is made of what is in memory; reductions are made of it here."""
    node = plan.nodes[number]
    if isinstance(node, ReduceNode):
        return False
    return isinstance(node, Load) or any(_is_read(plan, a) for a in plan.uses[number])


def _rounded_by(plan: KernelPlan, number: int) -> int:
    """The value in f32 that two conversions round to bf16; -1 if a node is something else."""
    node = plan.nodes[number]
    if not isinstance(node, Apply) or node.op != "convert" or node.dtype != WIDE_TYPE:
        return -1
    inner = plan.nodes[node.args[0]]
    rounds = isinstance(inner, Apply) and inner.op == "convert" and inner.dtype == NARROW_TYPE
    if not isinstance(inner, Apply) or not rounds or plan.nodes[inner.args[0]].dtype != WIDE_TYPE:
        return -1
    return inner.args[0]


def _is_discrete(plan: KernelPlan, number: int) -> bool:
    node = plan.nodes[number]
    if not isinstance(node, Apply):
        return False
    floats = any(plan.nodes[a].dtype in (NARROW_TYPE, WIDE_TYPE) for a in node.args)
    if node.op == "convert":
        return floats and node.dtype not in FLOATS
    discrete = node.op in ABRUPT or node.op == "bitcast-convert" or OPERATIONS[node.op].result == "pred"
    return floats and discrete


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
        for number, node in enumerate(self.old.nodes):
            # Only smooth nodes are widened.  Others, and stores and indices, take rounded values, as without
            # this.
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
        if number not in self._rounded:
            # On demand, once: the unrounded value remains for the other users.
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
