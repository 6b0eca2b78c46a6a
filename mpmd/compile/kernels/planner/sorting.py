"""Sorting: the position of an element is the number of elements that come before it.

Equal elements keep their order.  Comparing every pair of a row suits the short rows that routers and beams
sort; for longer ones a target has better ways to the same result (`kernels/sort_patterns.py`).

Positions are counts, so a comparator must be a strict weak order: one that contradicts itself would give two
elements one place, and leave another one empty.  Floats contradict themselves where one is NaN: here all NaN
are equal, and greater than every number.  A comparator must then be lexicographic: its answer follows from
the first of some keys that differs between the elements, and is `false` where none does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mpmd.compile.hlo.attributes import SliceDims
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import dim, linear, strides_of, value
from mpmd.compile.kernels.kernel_plan import Apply, Constant, KernelPlan
from mpmd.compile.kernels.operations import FLOATS
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.planner.elements import NoPlan, Trace, check_dtype
from mpmd.compile.kernels.planner.iteration_space import IterationSpace
from mpmd.errors import CompileError

_ANSWERS = {
    "lt": (True, False, False),
    "le": (True, True, False),
    "gt": (False, False, True),
    "ge": (False, True, True),
    "eq": (False, True, False),
    "ne": (True, False, True),
}
"""Direction → its answers where the left side is less, equal and greater."""

_Text = tuple[object, ...]


class Comparator:
    """A comparator over two elements, each a node for each sorted array.

    Args:
        build: the builder of the plan.
        first, second: the elements.
        root: the comparator's answer for them.

    Attributes:
        answer: the same, as a strict weak order.

    Raises:
        NoPlan: it may contradict itself.
    """

    def __init__(self, build: PlanBuilder, first: Sequence[int], second: Sequence[int], root: int) -> None:
        self.build = build
        self._sides = (dict(zip(reversed(first), reversed(range(len(first))))),
                       dict(zip(reversed(second), reversed(range(len(second))))))  # fmt: skip
        self._texts: tuple[dict[int, _Text | None], ...] = ({}, {})
        self._keys: dict[int, tuple[_Text, bool]] = {}
        """Comparisons of a key of one element with the same of the other → the key; whether turned round."""
        self._known: dict[int, int] = {}
        self.answer = self._total(root)
        self._check(root)

    # -- keys
    def _text(self, number: int, side: int) -> _Text | None:
        """A value of one element, without saying of which; None if it is not one."""
        texts = self._texts[side]
        if number not in texts:
            texts[number] = self._described(number, side)
        return texts[number]

    def _described(self, number: int, side: int) -> _Text | None:
        if number in self._sides[side]:
            return ("element", self._sides[side][number])
        node = self.build.node_at(number)
        if isinstance(node, Constant):
            return ("constant", repr(node))
        if not isinstance(node, Apply):
            return None
        parts = [self._text(a, side) for a in node.args]
        return None if None in parts else (node.op, node.dtype, *parts)

    def _total(self, number: int) -> int:
        """An answer with all NaN equal and last; notes which keys it compares."""
        if number not in self._known:
            self._known[number] = self._totalled(number)
        return self._known[number]

    def _totalled(self, number: int) -> int:
        node = self.build.node_at(number)
        if not isinstance(node, Apply):
            return number
        direction = node.op.removeprefix("compare-")
        if direction == node.op:
            return self.build.node(Apply(node.dtype, node.op, tuple(self._total(a) for a in node.args)))
        left, right = node.args
        for turned in (False, True):
            text = self._text(left, turned)
            if text is not None and text == self._text(right, not turned):
                self._keys[number] = (text, turned)
                return self._compared(direction, left, right)
        return number

    def _compared(self, direction: str, left: int, right: int) -> int:
        build = self.build
        if build.dtype(left) not in FLOATS:
            return build.apply(f"compare-{direction}", left, right)
        if direction in ("gt", "le"):
            left, right = right, left
        if direction in ("eq", "ne"):
            both = build.apply("and", self._is_nan(left), self._is_nan(right))
            equal = build.apply("or", build.apply("compare-eq", left, right), both)
            return build.apply("not", equal) if direction == "ne" else equal
        last = build.apply("and", build.apply("not", self._is_nan(left)), self._is_nan(right))
        less = build.apply("or", build.apply("compare-lt", left, right), last)
        return build.apply("not", less) if direction in ("le", "ge") else less

    def _is_nan(self, number: int) -> int:
        return self.build.apply("compare-ne", number, number)

    # -- the proof
    def _check(self, root: int) -> None:
        """Find one key after the other that decides where those before it are equal."""
        equal: dict[_Text, int] = {}
        keys = list(dict.fromkeys(text for text, _ in self._keys.values()))
        while self._decided(root, equal) is not False:
            first = next((key for key in keys if key not in equal and self._decides(root, equal, key)), None)
            if first is None:
                raise NoPlan("its comparator may contradict itself: elements have no places")
            equal[first] = 0

    def _decides(self, root: int, equal: Mapping[_Text, int], key: _Text) -> bool:
        """Whether the answer follows from a key wherever that differs."""
        less, greater = (self._decided(root, {**equal, key: sign}) for sign in (-1, 1))
        return None not in (less, greater) and less != greater

    def _decided(self, number: int, signs: Mapping[_Text, int]) -> bool | None:
        """An answer that follows from how some keys compare; None if it does not."""
        node = self.build.node_at(number)
        if isinstance(node, Constant):
            return bool(node.value)
        if not isinstance(node, Apply):
            return None
        if number in self._keys:
            key, turned = self._keys[number]
            if key not in signs:
                return None
            sign = -signs[key] if turned else signs[key]
            return _ANSWERS[node.op.removeprefix("compare-")][sign + 1]
        if node.op not in ("and", "or", "not", "select"):
            return None
        first = self._decided(node.args[0], signs)
        if node.op == "not":
            return None if first is None else not first
        if node.op == "select":
            return None if first is None else self._decided(node.args[1 if first else 2], signs)
        decides = node.op == "or"
        if first is decides:
            return decides
        second = self._decided(node.args[1], signs)
        if second is decides:
            return decides
        return None if first is None else second


_MAX_ARRAYS = 64  # each deepens the comparison, which is planned recursively


def plan_sort(name: str, sort: HloInstruction) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort, and the arrays that it reads; its results follow them.

    Raises:
        NoPlan: kernels do not support the comparison.
    """
    every = range(len(sort.operands))
    return _planned(name, sort, every, sort.operands[0].shape.dims[sort.dimensions[0]], ())


def plan_sort_prefix(
    name: str, group: Sequence[HloInstruction], results: Sequence[HloInstruction]
) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort of whose results only the first elements are used; see `plan_sort`.

    Args:
        name: symbol of the kernel.
        group: the sort, the iota of its positions, its elements, and slices of them.
        results: the slices.

    Raises:
        NoPlan: something else is in the group, or kernels do not support the comparison.
    """
    sort = next(i for i in group if i.opcode == "sort")
    (along,), dims = sort.dimensions, sort.operands[0].shape.dims
    taken = results[0].shape.dims[along]
    numbers = []
    for result in results:
        element = result.operands[0] if result.opcode == "slice" else result
        whole = (*dims[:along], taken, *dims[along + 1 :])
        of_sort = element is sort or (element.opcode == "get-tuple-element" and element.operands[0] is sort)
        if not of_sort or result.opcode != "slice" or result.slice_dims != first_elements(whole):
            raise NoPlan("{0} is not the beginning of a sorted array", result)
        numbers.append(0 if element is sort else element.tuple_index)
    return _planned(name, sort, numbers, taken, group)


def first_elements(dims: Sequence[int]) -> SliceDims:
    """The slice that takes the first elements along each dim."""
    return SliceDims((0,) * len(dims), tuple(dims), (1,) * len(dims))


def _planned(
    name: str, sort: HloInstruction, numbers: Iterable[int], taken: int, inside: Iterable[HloInstruction]
) -> tuple[KernelPlan, tuple[HloInstruction, ...]]:
    """The kernel of a sort that writes as many elements as are taken, of the operands with these numbers."""
    (along,), dims = sort.dimensions, sort.operands[0].shape.dims
    if len(sort.operands) > _MAX_ARRAYS:
        raise NoPlan(f"it sorts {len(sort.operands)} arrays at once")
    rank, order = len(dims), [*(d for d in range(len(dims)) if d != along), along]
    # the space: the other dims, the element that is placed, the element that it is compared with
    space = IterationSpace((*(dims[d] for d in order), dims[along]), 0, 1)
    comparator = sort.to_apply
    trace = Trace(name, space, dict.fromkeys((*comparator.post_order(), *inside)))
    places = {d: dim(k) for k, d in enumerate(order)}
    here = tuple(places[d] for d in range(rank))
    there = tuple(dim(rank) if d == along else places[d] for d in range(rank))
    mine = [trace.value(check_dtype(o), here) for o in sort.operands]
    its = [trace.value(check_dtype(o), there) for o in sort.operands]
    before = _compared(trace, comparator.parameters, comparator.root, its, mine)
    after = _compared(trace, comparator.parameters, comparator.root, mine, its)
    build = trace.build
    earlier = build.apply("compare-lt", build.index(dim(rank)), build.index(dim(rank - 1)))
    first = build.apply("or", before, build.apply("and", build.apply("not", after), earlier))
    count = build.reduce_row("add", build.convert(first, "s32"))
    where = -1
    if taken < dims[along]:
        where = build.apply("compare-lt", count, build.constant(taken, "s32"))
    kept = [taken if d == along else e for d, e in enumerate(dims)]
    for number in numbers:
        target = tuple(value(count) if d == along else places[d] for d in range(rank))
        result = trace.operand(sort.operands[number].shape.dtype, math.prod(kept))
        build.store(result, linear(target, strides_of(kept)), mine[number], where=where)
    try:
        return build.finish(), tuple(trace.arrays)
    except CompileError as error:
        raise NoPlan(str(error)) from error


def _compared(
    trace: Trace, parameters: list[HloInstruction], root: HloInstruction, a: list[int], b: list[int]
) -> int:
    """The comparator's answer for two elements, as a strict weak order."""
    trace.substitute(dict(zip(parameters, [node for pair in zip(a, b) for node in pair])))
    node = trace.value(root, ())
    trace.substitute({})
    return Comparator(trace.build, a, b, node).answer
