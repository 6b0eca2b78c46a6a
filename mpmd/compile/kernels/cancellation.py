"""1 + tanh(u), as in a GELU, without its cancellation.

    (a * (1 + tanh(u)))  ->  2 * a / (1 + exp(-2 * u))

Where u is far below zero, 1 + tanh(u) is the difference of two numbers that are nearly equal, with few
correct digits; the quotient is accurate.  It also takes fewer instructions.  Factors of powers of two go into
constants, so a GELU's x * 0.5 * (1 + tanh(u)) becomes x / (1 + exp(v)), v having the constant of u times -2.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mpmd.compile.kernels.builder import PlanBuilder, renumbered
from mpmd.compile.kernels.plan import Apply, Constant, KernelPlan, Node, arguments, store_arguments

_DTYPE = "f32"


def without_cancellation(plan: KernelPlan) -> KernelPlan:
    """The plan with quotients for every 1 + tanh(u) whose tanh nothing else uses."""
    uses = Counter(a for node in plan.nodes for a in arguments(node))
    uses.update(a for store in plan.stores for a in store_arguments(store))
    found = {k: u for k, node in enumerate(plan.nodes) if (u := _argument(plan, node, uses)) is not None}
    return _Rewriting(plan, uses, found).plan() if found else plan


def _argument(plan: KernelPlan, node: Node, uses: Counter[int]) -> int | None:
    """The number of u if a node is 1 + tanh(u) and nothing else uses that tanh."""
    if not isinstance(node, Apply) or node.op != "add" or node.dtype != _DTYPE:
        return None
    for one, other in (node.args, node.args[::-1]):
        tanh = plan.nodes[other]
        if _constant(plan.nodes[one]) == 1.0 and isinstance(tanh, Apply) and tanh.op == "tanh":
            return tanh.args[0] if uses[other] == 1 else None
    return None


def _constant(node: Node) -> float | None:
    return float(node.value) if isinstance(node, Constant) else None


@dataclass(frozen=True)
class _Quotient:
    """`factor * top / (1 + exp(-2 * u))`, without a top `factor / (1 + exp(-2 * u))`.

    Attributes:
        factor: a constant.
        top: number of a node of the old plan, or None.
        u: number of a node of the old plan.
    """

    factor: float
    top: int | None
    u: int


class _Rewriting:
    """The rewriting of one plan."""

    def __init__(self, old: KernelPlan, uses: Counter[int], found: dict[int, int]) -> None:
        self.old = old
        self.uses = uses
        self.quotients = {number: _Quotient(2.0, None, u) for number, u in found.items()}
        self.build = PlanBuilder(old.name, old.extents, batch_dims=old.batch_dims, row_dims=old.row_dims)
        for operand in old.operands:
            self.build.operand(operand.name, operand.dtype, operand.size)
        self._values: dict[int, int] = {}

    def plan(self) -> KernelPlan:
        """The plan with quotients."""
        for number, node in enumerate(self.old.nodes):
            quotient = self._product(node)
            if quotient is not None:
                self.quotients[number] = quotient
            elif number not in self.quotients:
                numbers = {k: self.value(k) for k in arguments(node)}
                self._values[number] = self.build.node(renumbered(node, numbers))
        for store in self.old.stores:
            numbers = {k: self.value(k) for k in store_arguments(store)}
            where = numbers[store.where] if store.where >= 0 else -1
            index = store.index.renumber(numbers)
            self.build.store(store.operand, index, numbers[store.node], combine=store.combine, where=where)
        return self.build.finish()

    def _product(self, node: Node) -> _Quotient | None:
        """A product with a quotient that nothing else uses, as one quotient."""
        if not isinstance(node, Apply) or node.op != "multiply":
            return None
        for one, other in (node.args, node.args[::-1]):
            quotient = self.quotients.get(one)
            if quotient is None or self.uses[one] > 1 or one == other or other in self.quotients:
                continue
            constant = _constant(self.old.nodes[other])
            if constant is not None:
                return _Quotient(quotient.factor * constant, quotient.top, quotient.u)
            if quotient.top is None:
                factor, top = self._factors(other)
                return _Quotient(quotient.factor * factor, top, quotient.u)
        return None

    def _factors(self, number: int) -> tuple[float, int]:
        """A node as a constant power of two and another node."""
        node = self.old.nodes[number]
        if isinstance(node, Apply) and node.op == "multiply":
            for one, other in (node.args, node.args[::-1]):
                constant = _constant(self.old.nodes[one])
                if constant in (0.5, 2.0):
                    return constant, other
        return 1.0, number

    def value(self, number: int) -> int:
        """The new plan's node for one of the old plan's; a quotient is emitted at its first use."""
        if number not in self._values:
            self._values[number] = self._divided(self.quotients[number])
        return self._values[number]

    def _divided(self, quotient: _Quotient) -> int:
        b, one = self.build, self.build.constant(1.0, _DTYPE)
        bottom = b.apply("add", b.apply("exponential", self._times(quotient.u, -2.0)), one)
        top = b.constant(quotient.factor, _DTYPE)
        if quotient.top is not None:
            whole = self.value(quotient.top)
            top = whole if quotient.factor == 1.0 else b.apply("multiply", whole, top)
        return b.apply("divide", top, bottom)

    def _times(self, number: int, factor: float) -> int:
        """A node times a power of two, in the place of a constant if one is multiplied already."""
        node, b = self.old.nodes[number], self.build
        constant = _constant(node)
        if constant is not None:
            return b.constant(constant * factor, _DTYPE)
        if isinstance(node, Apply) and node.op == "multiply" and self.uses[number] == 1:
            for one, other in (node.args, node.args[::-1]):
                if self._has_constant(one):
                    return b.apply("multiply", self._times(one, factor), self.value(other))
        return b.apply("multiply", self.value(number), b.constant(factor, _DTYPE))

    def _has_constant(self, number: int) -> bool:
        """Whether a node is a constant, or a product with one that nothing else uses."""
        node = self.old.nodes[number]
        if isinstance(node, Apply) and node.op == "multiply" and self.uses[number] == 1:
            return any(self._has_constant(a) for a in node.args)
        return isinstance(node, Constant)
