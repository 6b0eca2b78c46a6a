"""Programs whose arrays lie in other orders than their dims, and programs of which kernels are formed.

Elements are small whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, PadDim
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, tuple_of
from tests.support.random_hlo.draft import Case, Draft, small_integers

SIZES = (1, 1, 2, 3, 7, 8, 9, 16, 17)
_MAX_ELEMENTS = 4000


class ArrayDraft:
    """A draft that grows by operations on the values that it has."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.build, self.rng = draft, draft.builder, draft.rng
        self.dtype = draft.pick(("f32", "f32", "s32", "bf16", "u8"))
        self.values: list[HloInstruction] = []

    def chance(self, share: float) -> bool:
        """Whether something of this probability happens."""
        return bool(self.rng.random() < share)

    def value(self) -> HloInstruction:
        """One of the values, a young one more often."""
        return self.values[-1 - min(int(self.rng.exponential(2)), len(self.values) - 1)]

    def parameter(self, dims: tuple[int, ...]) -> HloInstruction:
        """A parameter of small whole numbers."""
        made = self.draft.parameter(small_integers(self.rng, self.dtype, dims), self.dtype)
        self.values.append(made)
        return made

    def like(self, value: HloInstruction) -> HloInstruction:
        """Another value of the same dims, a parameter if there is none."""
        fits = [v for v in self.values if v.shape is value.shape and v is not value]
        return self.draft.pick(fits) if fits else self.parameter(value.shape.dims)

    def dim(self, value: HloInstruction) -> int:
        """One of the dims."""
        return int(self.rng.integers(value.shape.rank))

    def scalar(self, number: float) -> HloInstruction:
        """A constant."""
        return self.build.constant(number, self.dtype)

    def small(self, value: HloInstruction) -> HloInstruction:
        """The value between 0 and 3."""
        ends = [self.build.full(n, value.shape.dtype, value.shape.dims) for n in (0, 3)]
        return self.build.add("clamp", ends[0], value, ends[1])

    def grow(self, steps: tuple[Step, ...], count: int) -> None:
        """Applies some of the steps, each to a value that has dims."""
        for _ in range(count):
            value = self.value()
            made = self.draft.pick(steps)(self, value if value.shape.rank else self.parameter((3, 2)))
            if 0 < made.shape.size <= _MAX_ELEMENTS:
                self.values.append(made)

    def finish(self, several: float) -> Case:
        """The program that returns what nothing reads, and with a probability something else, too."""
        results = [v for v in self.values if not v.users and v.opcode != "parameter"][-3:]
        if not results or self.chance(several):
            results.append(self.value())
        return self.draft.finish(self.build.tuple(results))


Step = Callable[[ArrayDraft, HloInstruction], HloInstruction]


def _elementwise(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    return d.small(d.build.add(d.draft.pick(("add", "subtract", "maximum", "multiply")), x, d.like(x)))


def _transpose(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    return d.build.transpose(x, tuple(int(k) for k in d.rng.permutation(x.shape.rank)))


def _reshape(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    dims = list(x.shape.dims)
    kind = d.draft.pick(("one", "no ones", "joined", "divided"))
    if kind == "one":
        dims.insert(int(d.rng.integers(len(dims) + 1)), 1)
    elif kind == "no ones":
        dims = [n for n in dims if n > 1] or [1]
    elif kind == "joined" and len(dims) > 1:
        k = int(d.rng.integers(len(dims) - 1))
        dims[k : k + 2] = [dims[k] * dims[k + 1]]
    else:
        k = d.dim(x)
        factor = 2 if dims[k] % 2 == 0 else 1
        dims[k : k + 1] = [factor, dims[k] // factor]
    return d.build.reshape(x, dims)


def _slice(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    k, starts, limits, strides = d.dim(x), [0] * x.shape.rank, [*x.shape.dims], [1] * x.shape.rank
    starts[k] = int(d.rng.integers(limits[k]))
    strides[k] = int(d.rng.integers(1, 4))
    return d.build.slice(x, starts, limits, strides)


def _pad(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    k = d.dim(x)
    side = PadDim(int(d.rng.integers(0, 3)), int(d.rng.integers(0, 3)), int(d.rng.integers(0, 2)))
    return d.build.pad(x, d.scalar(1), [side if i == k else PadDim(0, 0) for i in range(x.shape.rank)])


def _join(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    return d.build.concatenate([x, d.like(x)], d.dim(x))


def _reverse(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    return d.build.add("reverse", x, dimensions=(d.dim(x),))


def _broadcast(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    dims = list(x.shape.dims)
    at = int(d.rng.integers(len(dims) + 1))
    dims.insert(at, int(d.rng.integers(1, 4)))
    places = [k for k in range(len(dims)) if k != at]
    if d.chance(0.3):  # dims out of order
        turned = d.build.transpose(x, tuple(reversed(range(x.shape.rank))))
        return d.build.broadcast(turned, dims, places[::-1])
    return d.build.broadcast(x, dims, places)


def _reduce(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    opcode = d.draft.pick(("add", "maximum"))
    called = scalar_computation(d.draft.module, opcode, d.dtype)
    return d.small(d.build.reduce([x], [d.scalar(0)], (d.dim(x),), called))


def _spread(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    """What is reduced along a dim, beside the array itself."""
    k = d.dim(x)
    called = scalar_computation(d.draft.module, "maximum", d.dtype)
    row = d.build.reduce([x], [d.scalar(0)], (k,), called)
    return d.build.add(
        "subtract", x, d.build.broadcast(row, x.shape.dims, [i for i in range(x.shape.rank) if i != k])
    )


def _part(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    k = d.dim(x)
    start = d.draft.parameter(np.int32(d.rng.integers(-1, x.shape.dims[k] + 1)), "s32")
    zero = d.build.constant(0, "s32")
    sizes = [max(1, n // 2) if i == k else n for i, n in enumerate(x.shape.dims)]
    starts = [start if i == k else zero for i in range(x.shape.rank)]
    part = d.build.dynamic_slice(x, starts, sizes)
    if d.chance(0.5):
        return part
    return d.build.dynamic_update_slice(x, d.build.add("negate", part) if d.dtype != "u8" else part, starts)


def _product(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    k = d.dim(x)
    y = d.parameter((x.shape.dims[k], d.draft.pick((1, 2, 5))))
    if d.dtype == "u8":
        return d.build.transpose(x, tuple(reversed(range(x.shape.rank))))
    dims = [n for i, n in enumerate(x.shape.dims) if i != k] + [y.shape.dims[1]]
    shape = x.shape.with_dims(dims)
    return d.small(d.build.add("dot", x, y, shape=shape, dot_dims=DotDims((k,), (0,))))


_MOVES = (
    _transpose,
    _transpose,
    _reshape,
    _slice,
    _pad,
    _join,
    _reverse,
    _broadcast,
    _reduce,
    _part,
    _elementwise,
)


def layout_case(seed: int) -> Case:
    """A program whose parameters and results lie in random orders, dims of 1 among them."""
    draft = Draft(np.random.default_rng([seed, 74]), f"layouts#{seed}", seed)
    d = ArrayDraft(draft)
    d.parameter(_dims(draft, 2 + seed % 2))
    d.grow((*_MOVES, _product), int(d.rng.integers(2, 7)))
    case = d.finish(several=0.2)
    case.module.parameter_layouts = tuple(_shuffled(p.shape, d.rng) for p in case.module.entry.parameters)
    case.module.result_layout = _shuffled(case.module.entry.root.shape, d.rng)
    return case


def _dims(draft: Draft, rank: int) -> tuple[int, ...]:
    while True:
        dims = tuple(draft.pick(SIZES) for _ in range(rank))
        if math.prod(dims) <= _MAX_ELEMENTS // 4:
            return dims


def _shuffled(shape: Shape, rng: np.random.Generator) -> Shape:
    if shape.is_tuple:
        return tuple_of([_shuffled(e, rng) for e in shape.elements])
    return shape.with_layout(tuple(int(d) for d in rng.permutation(shape.rank)))


def _effect(d: ArrayDraft, x: HloInstruction) -> HloInstruction:
    """Work whose order beside other work is fixed, or that passes a barrier."""
    if d.chance(0.5):
        return d.build.add("opt-barrier", x)
    made = d.build.add("abs", x) if d.dtype != "u8" else d.build.add("not", x)
    others = [v for v in d.values if v.opcode != "parameter" and v is not x]
    if others:
        made.add_control_predecessor(d.draft.pick(others))
    return made


_WORK = (
    _elementwise, _elementwise, _spread, _spread, _reduce, _transpose, _reshape, _broadcast, _pad, _slice,
    _part, _product, _effect,
)  # fmt: skip


def fusion_case(seed: int) -> Case:
    """A program of work that several values read, with several results, and of some whose order is fixed."""
    draft = Draft(np.random.default_rng([seed, 75]), f"fusion#{seed}", seed)
    d = ArrayDraft(draft)
    d.parameter(_dims(draft, 2))
    d.grow(_WORK, int(d.rng.integers(3, 10)))
    return d.finish(several=0.6)
