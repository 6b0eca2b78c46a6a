"""Random programs as large as fragments: arrays beyond a vector's width, all element types, mixed freely.

Every value is a small integer that its type holds, so that all programs are exact: a kernel that reads a
wrong place, leaves one out or counts one twice gives another number, and none can hide behind a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array, tuple_of
from tests.support.random_hlo.draft import ANY, FLOATS, INTEGERS, Case, Draft, small_integers
from tests.support.random_hlo.reductions import identity

SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 70, 130)
MAX_SIZE = 20_000
"""Elements of one array."""
STARTS = (-(2**31), -7, -1, 0, 1, 2, 5, 30, 200, 2**31 - 1)
"""Positions at run time: many out of range."""
DIRECTIONS = ("EQ", "NE", "GE", "GT", "LE", "LT")


class Wide:
    """A program in the making: its values so far, and one method per kind of step.

    Args:
        draft: where parameters and random numbers come from.
        build: of the computation that grows, if it is not the entry.
        values: what the program begins with.
    """

    def __init__(self, draft: Draft, build: HloBuilder | None = None, values: tuple = ()) -> None:
        self.draft, self.rng = draft, draft.rng
        self.build = build or draft.builder
        self.inner = build is not None
        self.values: list[HloInstruction] = list(values)
        self._reducers: dict[tuple[str, str], HloComputation] = {}

    # -- choosing
    def choose(self, *options):
        return options[int(self.rng.integers(len(options)))]

    def dims(self, low: int = 1, high: int = 4) -> tuple[int, ...]:
        sizes: list[int] = []
        for _ in range(int(self.rng.integers(low, high + 1))):
            room = MAX_SIZE // max(1, math.prod(sizes))
            sizes.append(self.choose(*(s for s in SIZES if s <= room)))
        return tuple(sizes)

    def fresh(self, dtype: str, dims: tuple[int, ...]) -> HloInstruction:
        """A parameter; inside of loops and branches, which have none, an array of counts."""
        if not self.inner:
            made = self.draft.parameter(small_integers(self.rng, dtype, dims), dtype)
        elif dims and dtype != "pred":
            made = self.kept_small(self.build.iota(dtype, dims, int(self.rng.integers(len(dims)))))
        else:
            made = self.build.full(1, dtype, dims)
        self.values.append(made)
        return made

    def pick(self, *dtypes: str, least: int = 0) -> HloInstruction:
        """A value of one of these types with at least so many dims; late ones rather."""
        fits = [
            v
            for v in self.values
            if v.shape.dtype in (dtypes or ANY) and v.shape.rank >= least and v.shape.size
        ]
        if fits and self.rng.random() < 0.95:
            return fits[-1 - min(int(self.rng.exponential(4)), len(fits) - 1)]
        return self.fresh(self.choose(*(dtypes or ANY)), self.dims(max(1, least)))

    def like(self, value: HloInstruction, dtype: str = "") -> HloInstruction:
        """Another value of these dims: one of the pool, one that is spread, or one that is converted."""
        dtype, dims = dtype or value.shape.dtype, value.shape.dims
        fits = [v for v in self.values if v.shape.dims == dims and v is not value]
        if fits and self.rng.random() < 0.7:
            return self.as_type(self.choose(*fits), dtype)
        spread = [v for v in self.values if v.shape.rank < len(dims) and self._places(v.shape.dims, dims)]
        if spread and self.rng.random() < 0.7:
            source = self.choose(*spread)
            places = self._places(source.shape.dims, dims)
            return self.as_type(self.build.broadcast(source, dims, self.choose(*places)), dtype)
        return self.fresh(dtype, dims)

    def _places(self, small: tuple[int, ...], dims: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Ways in which some dims are some of others, in order."""
        found: list[tuple[int, ...]] = [()]
        for size in small:
            found = [
                (*f, d) for f in found for d in range(f[-1] + 1 if f else 0, len(dims)) if dims[d] == size
            ]
        return found

    def as_type(self, value: HloInstruction, dtype: str) -> HloInstruction:
        """The value in another type that holds it: of negative numbers none is unsigned."""
        if DTYPES[dtype].kind == "unsigned" and DTYPES[value.shape.dtype].kind in ("signed", "float"):
            value = self.build.add("abs", value)
        return self.build.convert(value, dtype)

    def kept_small(self, value: HloInstruction, bound: int = 4) -> HloInstruction:
        """The value between -bound and bound."""
        dtype = value.shape.dtype
        if dtype == "pred":
            return value
        low = 0 if DTYPES[dtype].kind == "unsigned" else -bound
        return self.build.add(
            "clamp", self.build.full(low, dtype, ()), value, self.build.full(bound, dtype, ())
        )

    def reducer(self, opcode: str, dtype: str) -> HloComputation:
        key = opcode, dtype
        if key not in self._reducers:
            self._reducers[key] = scalar_computation(self.draft.module, opcode, dtype)
        return self._reducers[key]

    def start(self) -> HloInstruction:
        """A position of a slice."""
        dtype = self.choose("s32", "s32", "s64", "u32", "u64", "s8")
        number = self.choose(*STARTS)
        info = np.iinfo(DTYPES[dtype].numpy)
        number = min(max(number, int(info.min)), int(info.max))
        if self.inner or self.rng.random() < 0.3:
            scalars = [v for v in self.values if v.shape.is_scalar and v.shape.dtype in INTEGERS]
            return self.choose(*scalars) if scalars else self.build.constant(number, dtype)
        return self.draft.parameter(np.asarray(number, DTYPES[dtype].numpy), dtype)

    # -- elementwise
    def arithmetic(self) -> HloInstruction:
        a = self.pick(*FLOATS, *INTEGERS)
        signed = DTYPES[a.shape.dtype].kind != "unsigned"
        opcode = self.choose("add", "multiply", "maximum", "minimum", *(["subtract"] * signed))
        return self.build.add(opcode, a, self.like(a))

    def unary(self) -> HloInstruction:
        a = self.pick(*FLOATS, "s8", "s16", "s32", "s64")
        opcodes = ["negate", "abs", "sign"]
        if a.shape.dtype in FLOATS:
            half = self.build.add("multiply", a, self.build.full(0.5, a.shape.dtype, a.shape.dims))
            opcode = self.choose("floor", "ceil", "round-nearest-afz", "round-nearest-even", "negate", "sqrt")
            if opcode == "sqrt":
                return opcode_of_square(self.build, a)
            return self.build.add(opcode, half if opcode != "negate" else a)
        return self.build.add(self.choose(*opcodes, "not", "popcnt"), a)

    def integers(self) -> HloInstruction:
        a = self.pick(*INTEGERS)
        opcode = self.choose(
            "and", "or", "xor", "divide", "remainder", "shift-left", "shift-right-logical",
            "shift-right-arithmetic", "power",
        )  # fmt: skip
        return self.build.add(opcode, a, self.like(a))

    def selection(self) -> HloInstruction:
        a = self.pick()
        if a.shape.dtype == "pred":
            condition = a
            a = self.like(a, self.choose(*ANY))
        else:
            b = self.like(a)
            condition = self.build.compare(a, b, self.choose(*DIRECTIONS))
            if self.rng.random() < 0.3:
                self.values.append(condition)
        return self.build.select(condition, a, self.like(a))

    def logic(self) -> HloInstruction:
        a = self.pick("pred")
        made = self.build.add(self.choose("and", "or", "xor"), a, self.like(a))
        return self.build.add("not", made) if self.rng.random() < 0.5 else made

    def conversion(self) -> HloInstruction:
        return self.as_type(self.pick(), self.choose(*ANY))

    # -- movement
    def reshape(self) -> HloInstruction:
        a = self.pick(least=1)
        left, dims = a.shape.size, []
        while left > 1 and len(dims) < 4:
            factors = [n for n in range(1, left + 1) if left % n == 0 and n <= 130]
            dims.append(self.choose(*factors))
            left //= dims[-1]
        return self.build.reshape(a, (*dims, left))

    def transpose(self) -> HloInstruction:
        a = self.pick(least=2)
        return self.build.transpose(a, [int(d) for d in self.rng.permutation(a.shape.rank)])

    def reverse(self) -> HloInstruction:
        a = self.pick(least=1)
        dims = tuple(d for d in range(a.shape.rank) if self.rng.random() < 0.6)
        return self.build.add("reverse", a, dimensions=dims)

    def slice(self) -> HloInstruction:
        a = self.pick(least=1)
        starts, limits, strides = [], [], []
        for size in a.shape.dims:
            whole = self.rng.random() < 0.4
            starts.append(0 if whole else int(self.rng.integers(0, size)))
            limits.append(size if whole else int(self.rng.integers(starts[-1] + 1, size + 1)))
            strides.append(1 if whole else int(self.rng.integers(1, 6)))
        return self.build.slice(a, starts, limits, strides)

    def pad(self) -> HloInstruction:
        a = self.pick(least=1)
        filler = self.build.constant(small_integers(self.rng, a.shape.dtype, ()))
        sides = []
        for size in a.shape.dims:
            interior = self.choose(0, 0, 0, 1, 2)
            whole = size + (size - 1) * interior
            low = int(self.rng.integers(-min(3, whole - 1), 4))
            high = int(self.rng.integers(-min(3, whole + min(low, 0) - 1), 4))
            sides.append(attrs.PadDim(low, high, interior) if self.rng.random() < 0.7 else attrs.PadDim(0, 0))
        return self.build.pad(a, filler, sides)

    def concatenate(self) -> HloInstruction:
        a = self.pick(least=1)
        along = int(self.rng.integers(a.shape.rank))
        parts = [a]
        for _ in range(int(self.rng.integers(1, 3))):
            part = self.like(a)
            size = int(self.rng.integers(1, part.shape.dims[along] + 1))
            limits = [size if d == along else n for d, n in enumerate(part.shape.dims)]
            parts.append(self.build.slice(part, [0] * part.shape.rank, limits))
        self.rng.shuffle(parts)
        return self.build.concatenate(parts, along)

    def spread(self) -> HloInstruction:
        a = self.pick()
        at = int(self.rng.integers(a.shape.rank + 1))
        dims = list(a.shape.dims)
        dims.insert(at, self.choose(1, 2, 3, 16, 17))
        return self.build.broadcast(a, dims, [d + (d >= at) for d in range(a.shape.rank)])

    def counts(self) -> HloInstruction:
        a = self.pick(*FLOATS, *INTEGERS, least=1)
        count = self.build.iota("s32", a.shape.dims, int(self.rng.integers(a.shape.rank)))
        even = self.build.add("and", count, self.build.full(3, "s32", a.shape.dims))
        return self.build.add("add", a, self.build.convert(even, a.shape.dtype))

    # -- reductions and products
    def reduce(self) -> HloInstruction:
        a = self.pick(least=1)
        dtype = a.shape.dtype
        logic = ["and", "or"] if dtype not in FLOATS else []
        opcode = (
            self.choose("maximum", "minimum", "add", "add", *logic)
            if dtype != "pred"
            else self.choose(*logic)
        )
        axes = tuple(d for d in range(a.shape.rank) if self.rng.random() < 0.5) or (a.shape.rank - 1,)
        if opcode == "add":
            a = self.kept_small(a, 1)
            if dtype in ("bf16", "f16") and math.prod(a.shape.dims[d] for d in axes) > 256:
                axes = axes[:1]
        init = self.build.constant(identity(opcode, dtype))
        made = self.build.reduce([a], [init], axes, self.reducer(opcode, dtype))
        if self.rng.random() < 0.5:
            kept = [d for d in range(a.shape.rank) if d not in axes]
            whole = self.build.broadcast(self.kept_small(made), a.shape.dims, kept)
            made = self.build.add("maximum", whole, a) if dtype != "pred" else self.build.add("and", whole, a)
        return made

    def window(self) -> HloInstruction:
        a = self.pick("f32", "f32", "bf16", "s32", "u8", "f64", least=1)
        opcode = self.choose("add", "maximum", "minimum")
        sides = []
        for size in a.shape.dims:
            wide = min(size, self.choose(1, 1, 2, 3))
            low, high = (int(n) for n in self.rng.integers(0, wide, 2))
            sides.append(attrs.WindowDim(wide, int(self.rng.integers(1, 3)), low, high))
        init = self.build.constant(identity(opcode, a.shape.dtype))
        called = (self.reducer(opcode, a.shape.dtype),)
        return self.build.add("reduce-window", a, init, window=attrs.Window(tuple(sides)), called=called)

    def dot(self) -> HloInstruction:
        a = self.kept_small(self.pick("f32", "f32", "bf16", "bf16", "f64", "s32", least=2), 2)
        rank, dtype = a.shape.rank, a.shape.dtype
        batch = tuple(range(self.choose(0, rank - 2, rank - 2)))
        order = [int(d) for d in self.rng.permutation(range(len(batch), rank))]
        count = 1 if len(order) < 3 else self.choose(1, 1, 2)
        summed = tuple(order[:count])
        wide = self.choose(1, 3, 16, 17, 40)
        own = [a.shape.dims[d] for d in summed]
        places = [int(d) for d in self.rng.permutation(len(own) + 1)]
        rest = [*own, wide]
        dims = (*(a.shape.dims[d] for d in batch), *(rest[p] for p in places))
        b = self.kept_small(self.fresh(dtype, dims), 1)
        at = tuple(len(batch) + places.index(k) for k in range(count))
        numbers = attrs.DotDims(summed, at, batch, batch)
        target = "f32" if dtype == "bf16" and (math.prod(own) > 64 or self.rng.random() < 0.5) else None
        return self.build.dot(a, b, numbers, target)

    # -- indexed
    def dynamic_slice(self) -> HloInstruction:
        a = self.pick(least=1)
        sizes = [self.choose(n, int(self.rng.integers(1, n + 1))) for n in a.shape.dims]
        return self.build.dynamic_slice(a, self._starts(a), sizes)

    def dynamic_update(self) -> HloInstruction:
        a = self.pick(least=1)
        sizes = [self.choose(n, int(self.rng.integers(1, n + 1))) for n in a.shape.dims]
        other = self.like(a)
        update = self.build.slice(other, [0] * a.shape.rank, sizes)
        return self.build.dynamic_update_slice(a, update, self._starts(a))

    def _starts(self, a: HloInstruction) -> list[HloInstruction]:
        first = self.start()
        return [first, *(self._again(first) for _ in range(a.shape.rank - 1))]

    def _again(self, first: HloInstruction) -> HloInstruction:
        if self.rng.random() < 0.5:
            return self.build.constant(int(self.rng.integers(0, 3)), first.shape.dtype)
        return first

    def _indices(self, count: int, depth: int) -> HloInstruction:
        """Positions, some out of range, some twice."""
        if self.inner:
            return self.as_type(self.fresh("s32", (count, depth)), "s32")
        found = self.rng.integers(-3, 20, (count, depth)).astype(np.int32)
        found[self.rng.random(found.shape) < 0.05] = 2**31 - 1
        return self.draft.parameter(found, "s32")

    def gather(self) -> HloInstruction:
        a = self.pick(least=1)
        depth = self.choose(1, min(2, a.shape.rank))
        count = self.choose(1, 7, 33)
        sizes = [
            1 if d < depth else self.choose(n, int(self.rng.integers(1, n + 1)))
            for d, n in enumerate(a.shape.dims)
        ]
        offsets = tuple(range(1, a.shape.rank - depth + 1))
        numbers = attrs.GatherDims(offsets, tuple(range(depth)), tuple(range(depth)), 1)
        return self.build.gather(a, self._indices(count, depth), numbers, sizes)

    def scatter(self) -> HloInstruction:
        a = self.pick(*FLOATS, *INTEGERS, least=1)
        depth, count = self.choose(1, min(2, a.shape.rank)), self.choose(1, 7, 33)
        windows = tuple(range(1, a.shape.rank - depth + 1))
        numbers = attrs.ScatterDims(windows, tuple(range(depth)), tuple(range(depth)), 1)
        updates = self.fresh(a.shape.dtype, (count, *a.shape.dims[depth:]))
        if self.rng.random() < 0.5:
            updates = self.kept_small(self.build.add("add", updates, updates))
        opcode = self.choose("add", "add", "maximum", "minimum")
        computation = self.reducer(opcode, a.shape.dtype)
        return self.build.add(
            "scatter", a, self._indices(count, depth), updates, scatter_dims=numbers, called=(computation,)
        )

    def sort(self) -> HloInstruction:
        a = self.pick(*FLOATS, *INTEGERS, least=1)
        axis = int(self.rng.integers(a.shape.rank))
        body = HloBuilder.create(self.draft.module, "before")
        types = (a.shape.dtype, "s32")
        given = [body.parameter(array(t)) for t in types for _ in range(2)]
        called = body.build(body.compare(given[0], given[1], self.choose("LT", "GT")))
        places = self.build.iota("s32", a.shape.dims, axis)
        made = self.build.add("sort", a, places, dimensions=(axis,), is_stable=True, called=(called,))
        self.values.append(self.kept_small(self.build.element(made, 1)))
        return self.build.element(made, 0)

    # -- control
    def loop(self) -> HloInstruction:
        """Some steps, again and again, on some values as the state."""
        state = [self.pick() for _ in range(int(self.rng.integers(1, 4)))]
        shape = tuple_of([array("s32"), *(s.shape.logical for s in state)])
        condition = HloBuilder.create(self.draft.module, "condition")
        at = condition.element(condition.parameter(shape), 0)
        condition.build(condition.compare(at, condition.constant(int(self.rng.integers(0, 5)), "s32"), "LT"))
        body = HloBuilder.create(self.draft.module, "body")
        given = body.parameter(shape)
        elements = [body.element(given, k) for k in range(len(state) + 1)]
        inner = Wide(self.draft, body, tuple(elements))
        inner.grow(int(self.rng.integers(2, 7)))
        after = []
        for value in elements[1:]:
            made = [v for v in inner.values if v.shape.logical is value.shape.logical]
            after.append(made[-1 - min(int(self.rng.exponential(1)), len(made) - 1)])
        body.build(body.tuple([body.add("add", elements[0], body.constant(1, "s32")), *after]))
        init = self.build.tuple([self.build.constant(0, "s32"), *state])
        made = self.build.loop(condition.computation, body.computation, init)
        results = [self.build.element(made, k + 1) for k in range(len(state))]
        self.values += results[1:]
        return results[0]

    def branch(self) -> HloInstruction:
        """One of two or three ways to go on."""
        value = self.pick()
        branches = []
        for _ in range(self.choose(2, 3)):
            branch = HloBuilder.create(self.draft.module, "branch")
            inner = Wide(self.draft, branch, (branch.parameter(value.shape.logical),))
            inner.grow(int(self.rng.integers(0, 4)))
            fits = [v for v in inner.values if v.shape.logical is value.shape.logical]
            branches.append(branch.build(fits[-1]))
        scalars = [v for v in self.values if v.shape.is_scalar and v.shape.dtype == "s32"]
        selector = self.choose(*scalars) if scalars else self.build.constant(1, "s32")
        return self.build.add("conditional", selector, *[value] * len(branches), called=branches)

    # -- all
    def grow(self, steps: int) -> None:
        """So many random steps; what they give is kept small."""
        for _ in range(steps):
            made = self.kept_small(STEPS[int(self.rng.choice(len(STEPS), p=WEIGHTS))](self))
            if 0 < made.shape.size <= MAX_SIZE:
                self.values.append(made)


def opcode_of_square(build: HloBuilder, a: HloInstruction) -> HloInstruction:
    """The root of a square: exact."""
    return build.add("sqrt", build.add("multiply", a, a))


_WEIGHTED: dict[Callable[[Wide], HloInstruction], float] = {
    Wide.arithmetic: 6, Wide.unary: 3, Wide.integers: 3, Wide.selection: 4, Wide.logic: 1, Wide.conversion: 3,
    Wide.reshape: 3, Wide.transpose: 3, Wide.reverse: 1, Wide.slice: 2, Wide.pad: 2, Wide.concatenate: 2,
    Wide.spread: 2, Wide.counts: 1, Wide.reduce: 5, Wide.window: 1, Wide.dot: 3, Wide.dynamic_slice: 2,
    Wide.dynamic_update: 2, Wide.gather: 1.5, Wide.scatter: 1.5, Wide.sort: 0.5, Wide.loop: 1,
    Wide.branch: 0.7,
}  # fmt: skip
STEPS = tuple(_WEIGHTED)
WEIGHTS = np.array(list(_WEIGHTED.values())) / sum(_WEIGHTED.values())


def wide(seed: int, steps: int = 40) -> Case:
    """A program of so many steps; several of its values are results."""
    draft = Draft(np.random.default_rng([seed, 4711]), f"wide#{seed}", seed)
    program = Wide(draft)
    for _ in range(2):
        program.fresh(program.choose("f32", "f32", "bf16", "s32"), program.dims(1, 3))
    program.grow(steps)
    unread = [v for v in program.values if not v.users]
    outputs = [*unread[-6:], program.pick(), program.values[-1]]
    return draft.finish(draft.builder.tuple(list(dict.fromkeys(outputs))))
