"""Chains of arithmetic whose result is compared with itself, made discrete, or computed more than once.

All operations are exact or round once, so that every bit is known: discrete results, and the values behind
them, are those of the evaluator, which computes operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpmd.compile.driver import Compilation
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.kernel_plan import ELEMENT, Apply, KernelPlan, ReduceNode
from mpmd.compile.thunks.thunk import KernelThunk
from tests.support.random_hlo.draft import EIGHT_BIT_FLOATS, Case, Draft, values

SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)
FLOATS = ("f32", "bf16", "f16", "f32", "bf16", "f64")
_SPECIAL = 0.25
"""Share of the programs with NaN, infinities, zeros of both signs, and extremes."""


def numbers(seed: int) -> Case:
    """The program of a seed: always the same."""
    draft = Draft(np.random.default_rng([seed, 36]), f"numbers#{seed}", seed)
    dtype = FLOATS[seed % len(FLOATS)]
    dims = (draft.pick(SIZES), draft.pick(SIZES) if draft.rng.random() < 0.95 else 2049)
    special = draft.rng.random() < _SPECIAL
    chain = _Chain(draft, dtype, dims, special)
    first, last = chain.made(draft.pick((1, 2, 3))), chain.made(draft.pick((2, 3, 4, 5)))
    ends = [draft.pick(_ENDS) for _ in range(draft.pick((1, 2, 3)))]
    draft.name += f" {dtype}{list(dims)} {'special ' if special else ''}{' '.join(e.__name__ for e in ends)}"
    results = [found for end in ends for found in end(draft, last)]
    if draft.rng.random() < 0.7:  # the value has another user, or its middle has
        results.append(draft.pick((first, last)))
    return draft.finish(draft.builder.tuple(results))


class _Chain:
    """Values made of the ones before them, of arrays, rows, columns and constants."""

    def __init__(self, draft: Draft, dtype: str, dims: tuple[int, ...], special: bool) -> None:
        self.draft, self.dtype, self.dims = draft, dtype, dims
        self.special = special
        self.value = self._parameter(dims)

    def _parameter(self, dims: tuple[int, ...]) -> HloInstruction:
        made = values(self.draft.rng, self.dtype, dims, self.special)
        if self.dtype == "bf16":  # whose denormals an instruction makes zero: none arise of these
            size = np.abs(made.astype(np.float64))
            made = np.where(np.isfinite(size) & ((size > 1e10) | (size < 1e-10)), made.dtype.type(0), made)
        return self.draft.parameter(made, self.dtype)

    def _other(self) -> HloInstruction:
        build, draft = self.draft.builder, self.draft
        kind = draft.pick(("constant", "constant", "row", "column", "array"))
        if kind == "constant":
            return build.full(float(draft.rng.uniform(0.2, 2)), self.dtype, self.dims)
        if kind == "array":
            return self._parameter(self.dims)
        dim = int(kind == "row")
        return build.broadcast(self._parameter((self.dims[dim],)), self.dims, (dim,))

    def made(self, steps: int) -> HloInstruction:
        """The value after more operations."""
        build, draft = self.draft.builder, self.draft
        for _ in range(steps):
            kind = draft.pick(("multiply", "multiply", "add", "add", "subtract", "divide", "unary", "choice"))
            if kind == "unary":
                opcode = draft.pick(("abs", "negate", "sqrt"))
                positive = build.add("abs", self.value) if opcode == "sqrt" else self.value
                self.value = build.add(opcode, positive)
            elif kind == "choice":
                self.value = build.add(draft.pick(("maximum", "minimum")), self.value, self._other())
            else:
                pair = [self.value, self._other()]
                self.value = build.add(kind, *(pair if draft.rng.random() < 0.7 else pair[::-1]))
        return self.value


def _extreme(draft: Draft, value: HloInstruction, opcode: str, axis: int) -> HloInstruction:
    """The maximum or minimum along an axis, in the dims of the value."""
    build, dtype = draft.builder, value.shape.dtype
    start = build.constant(
        np.asarray(-np.inf if opcode == "maximum" else np.inf).astype(value.shape.numpy_dtype)
    )
    found = build.reduce([value], [start], (axis,), scalar_computation(draft.module, opcode, dtype))
    return build.broadcast(found, value.shape.dims, (1 - axis,))


def _count(draft: Draft, found: HloInstruction, axis: int) -> HloInstruction:
    build = draft.builder
    zero = build.constant(np.int32(0))
    ones = build.convert(found, "s32")
    return build.reduce([ones], [zero], (axis,), scalar_computation(draft.module, "add", "s32"))


def equals(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """How often a row has its maximum, and where."""
    axis = draft.pick((0, 1, 1))
    most = _extreme(draft, value, draft.pick(("maximum", "minimum")), axis)
    found = draft.builder.compare(value, most, "EQ")
    return [_count(draft, found, axis), found]


def root(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """What is below the maximum: no root of a negative number."""
    axis = draft.pick((0, 1, 1))
    build, dims = draft.builder, value.shape.dims
    found = build.add("sqrt", build.add("subtract", _extreme(draft, value, "maximum", axis), value))
    return [build.compare(found, build.full(0, value.shape.dtype, dims), d) for d in ("EQ", "GT")]


def one_hot(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """The gradient of a maximum: something at its places, zero elsewhere."""
    build, dims = draft.builder, value.shape.dims
    found = build.compare(value, _extreme(draft, value, "maximum", 1), "EQ")
    zero = build.full(0, value.shape.dtype, dims)
    return [build.select(found, value, zero)]


def threshold(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """A mask of a comparison, and the value behind it."""
    build = draft.builder
    limit = build.full(float(draft.rng.uniform(-1, 1)), value.shape.dtype, value.shape.dims)
    found = build.compare(value, limit, draft.pick(("GT", "LE", "EQ", "NE")))
    return [found, build.select(found, value, limit)]


def quantised(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """Fake quantisation: scale by the largest magnitude, round, narrow, and back."""
    build, dims, dtype = draft.builder, value.shape.dims, value.shape.dtype
    most = _extreme(draft, build.add("abs", value), "maximum", draft.pick((0, 1)))
    kind, largest = draft.pick((("s8", 127.5), ("s4", 7.0), ("u8", 255.0), ("s16", 300.0)))
    scaled = build.add("multiply", build.add("divide", value, most), build.full(largest, dtype, dims))
    whole = build.add(draft.pick(("round-nearest-even", "round-nearest-afz", "floor", "ceil")), scaled)
    narrow = build.convert(whole if draft.rng.random() < 0.7 else scaled, kind)
    wide = build.convert(narrow, "s8") if kind == "s4" else narrow
    return [wide, build.add("multiply", build.convert(wide, dtype), most)]


def narrowed(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """A float of fewer bits, and back."""
    build, dtype = draft.builder, value.shape.dtype
    kinds = [t for t in EIGHT_BIT_FLOATS if t != "f8e8m0fnu"]  # which has no zero
    kind = draft.pick((*kinds, *(("f16", "bf16") if dtype != "bf16" else ())))
    return [build.convert(build.convert(value, kind), "f32" if dtype != "f64" else dtype)]


def sorted_rows(draft: Draft, value: HloInstruction) -> list[HloInstruction]:
    """The rank of the maximum and of the first element of each row: how many are below."""
    build = draft.builder
    first = build.slice(value, (0, 0), (value.shape.dims[0], 1))
    first = build.broadcast(build.reshape(first, (value.shape.dims[0],)), value.shape.dims, (0,))
    return [_count(draft, build.compare(value, first, "LT"), 1)]


_ENDS: tuple[Callable[[Draft, HloInstruction], list[HloInstruction]], ...] = (
    equals,
    equals,
    root,
    one_hot,
    threshold,
    quantised,
    quantised,
    narrowed,
    sorted_rows,
)


def computes_twice(made: Compilation) -> bool:
    """Whether a value that rounds is computed in two passes over a row, in two kernels, or is bf16."""
    plans = [t.plan for t in made.thunks if isinstance(t, KernelThunk)]
    known: set[str] = set()
    for plan in plans:
        if any(_passes_of(plan, k) > 1 for k in range(len(plan.nodes)) if _rounds(plan, k)):
            return True
        texts = {
            f"{n.op} {n.dtype}" for k, n in enumerate(plan.nodes) if isinstance(n, Apply) and _rounds(plan, k)
        }
        if known & texts:
            return True
        known |= texts
    return False


def _rounds(plan: KernelPlan, number: int) -> bool:
    node = plan.nodes[number]
    return isinstance(node, Apply) and node.op in ("add", "subtract", "multiply", "divide", "sqrt", "convert")


def _passes_of(plan: KernelPlan, number: int) -> int:
    """In how many passes over a row an element may be needed."""
    if plan.levels[number] != ELEMENT:
        return 1
    passes = {plan.stages[s.node] for s in plan.stores if number in _cone(plan, (s.node,))}
    passes |= {
        plan.stages[n.arg]
        for n in plan.nodes
        if isinstance(n, ReduceNode) and number in _cone(plan, (n.arg,))
    }
    return len(passes)


def _cone(plan: KernelPlan, roots: Sequence[int]) -> set[int]:
    """The nodes that some are computed from in the same pass."""
    found, waiting = set[int](), list(roots)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            if not isinstance(plan.nodes[number], ReduceNode):
                waiting += plan.uses[number]
    return found
