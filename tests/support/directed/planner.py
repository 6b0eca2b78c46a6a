"""Programs that are one kernel: rows, columns, windows, movement, products, changes in place, sorts.

Elements are whole numbers and no operation is inexact, so results are compared bit for bit.  A value is read
beside what is computed of it, and of parts of it: padded, joined, cut, overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from tests.support.random_hlo import indexed
from tests.support.random_hlo.draft import Case, Draft, small_integers
from tests.support.random_hlo.reductions import identity

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100)
_MAX_ELEMENTS = 3000
_SPECIAL = (np.nan, np.inf, -np.inf, -0.0)


class KernelDraft:
    """A draft with the values that its next operation may take.

    Attributes:
        draft: the case under construction.
        dtype: of all values.
        made: values that something computed.
    """

    def __init__(
        self, draft: Draft, dtypes: Sequence[str] = ("f32", "f32", "f32", "s32", "f64", "u8")
    ) -> None:
        self.draft, self.rng, self.builder = draft, draft.rng, draft.builder
        self.dtype = draft.pick(dtypes)
        self.special = DTYPES[self.dtype].kind == "float" and draft.rng.random() < 0.2
        draft.name += f" {self.dtype}{' special' * self.special}"
        self.made: list[HloInstruction] = []

    def chance(self, share: float) -> bool:
        """Whether something of this probability happens."""
        return bool(self.rng.random() < share)

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def dims(self, rank: int) -> tuple[int, ...]:
        """Sizes around vectors' and tiles', of an array that is not large."""
        while True:
            dims = tuple(self.draft.pick(SIZES) for _ in range(rank))
            if math.prod(dims) <= _MAX_ELEMENTS:
                return dims

    def parameter(self, dims: Sequence[int]) -> HloInstruction:
        """A parameter of whole numbers; some may be special."""
        numbers = small_integers(self.rng, self.dtype, tuple(dims))
        if self.special:
            denormal = float(ml_dtypes.finfo(numbers.dtype).tiny) / 64  # lost in any sum, and no difference
            chosen = self.rng.choice(np.array([*_SPECIAL, denormal]), numbers.shape).astype(numbers.dtype)
            numbers = np.where(self.rng.random(numbers.shape) < 0.1, chosen, numbers)
        return self.draft.parameter(numbers, self.dtype)

    def scalar(self, value: float) -> HloInstruction:
        """A constant of the program's type."""
        return self.builder.constant(np.asarray(value).astype(DTYPES[self.dtype].numpy))

    def elementwise(self, *values: HloInstruction) -> HloInstruction:
        """An operation on values of one shape, whose result is as small as they are."""
        first, second = (self.draft.pick(values) for _ in range(2))
        opcode = self.draft.pick(("add", "subtract", "maximum", "minimum", "multiply", "negate", "select"))
        if opcode == "negate" or first is second:
            return self.builder.add("negate", first)
        if opcode == "select":
            return self.builder.select(self.builder.compare(first, second, "LT"), second, first)
        made = self.builder.add(opcode, first, second)
        return self.small(made) if opcode == "multiply" else made

    def small(self, value: HloInstruction) -> HloInstruction:
        """The value, clamped to small whole numbers."""
        low = 0 if DTYPES[self.dtype].kind == "unsigned" else -4
        ends = [self.builder.broadcast(self.scalar(v), value.shape.dims) for v in (low, 4)]
        return self.builder.add("clamp", ends[0], value, ends[1])

    def reduce(self, value: HloInstruction, gone: Sequence[int]) -> HloInstruction:
        """A sum, a maximum or a minimum along dims."""
        opcode = self.draft.pick(("add", "add", "maximum", "minimum"))
        init = self.builder.constant(identity(opcode, self.dtype))
        computation = scalar_computation(self.draft.module, opcode, self.dtype)
        return self.builder.reduce([value], [init], gone, computation)

    def part(self, source: HloInstruction, d: int, wide: Callable[[int], HloInstruction]) -> HloInstruction:
        """An array like `source` of which a part along a dim is `wide(its size)`."""
        size, builder = source.shape.dims[d], self.builder
        kind = self.draft.pick(("pad", "between", "join", "cut and join", "update", "reverse"))
        taken = self.between(1, size)
        if kind == "between" and size > 1:
            return builder.pad(wide(-(-size // 2)), self.scalar(1), _along(d, source, 0, (size + 1) % 2, 1))
        if kind == "join" and taken < size:
            parts = [wide(taken), self.cut(source, d, 0, size - taken)]
            return builder.concatenate(parts if self.chance(0.5) else parts[::-1], d)
        if kind == "cut and join" and taken < size:
            left = self.cut(wide(size), d, 0, taken)
            filler = builder.broadcast(
                self.scalar(2), left.shape.dims[:d] + (size - taken,) + left.shape.dims[d + 1 :]
            )
            return builder.concatenate([left, filler], d)
        if kind == "update":
            start = self.draft.parameter(np.int32(self.between(-2, size)), "s32")
            zero = builder.constant(0, "s32")
            starts = [start if k == d else zero for k in range(source.shape.rank)]
            return builder.dynamic_update_slice(source, wide(taken), starts)
        if kind == "reverse":
            return builder.add("reverse", wide(size), dimensions=(d,))
        low = self.between(0, size - taken)
        return builder.pad(wide(taken), self.scalar(1), _along(d, source, low, size - taken - low, 0))

    def cut(self, value: HloInstruction, d: int, start: int, limit: int) -> HloInstruction:
        dims = value.shape.dims
        starts = [start if k == d else 0 for k in range(len(dims))]
        return self.builder.slice(value, starts, [limit if k == d else e for k, e in enumerate(dims)])

    def results(self, *needed: HloInstruction) -> Case:
        """The program whose results are what is needed and some other values that were made."""
        others = [v for v in self.made if v not in needed and self.chance(0.15)]
        leaves = [*dict.fromkeys((*needed, *others))]
        root = leaves[0] if len(leaves) == 1 else self.builder.tuple(leaves)
        return self.draft.finish(root)


def _along(d: int, like: HloInstruction, low: int, high: int, interior: int) -> list[attrs.PadDim]:
    none = attrs.PadDim(0, 0, 0)
    return [attrs.PadDim(low, high, interior) if k == d else none for k in range(like.shape.rank)]


def rows(draft: Draft) -> Case:
    """Reductions of rows, which elements of the same and of other parts of the row use."""
    p = KernelDraft(draft)
    rank = p.between(1, 3)
    dims, gone = p.dims(rank), p.between(1, max(1, rank - 1))
    kept, axes = rank - gone, range(rank - gone, rank)
    x = p.parameter(dims)
    elements, vectors = [x] + [p.parameter(dims) for _ in range(p.between(0, 1))], list[HloInstruction]()
    for _ in range(p.between(1, 3)):
        if p.chance(0.6):
            elements.append(p.elementwise(*elements))
        vector = p.small(p.reduce(p.draft.pick(elements), axes))
        if p.chance(0.3):
            vector = p.elementwise(vector, *vectors)
        vectors.append(vector)

        def wide(
            size: int, vector: HloInstruction = vector, d: int = draft.pick(list(axes))
        ) -> HloInstruction:
            shape = [size if k == d else e for k, e in enumerate(dims)]
            return p.builder.broadcast(vector, shape, range(kept))

        d = wide.__defaults__[1]
        spread = p.part(draft.pick(elements), d, wide) if p.chance(0.6) else wide(dims[d])
        elements.append(p.elementwise(draft.pick(elements), spread))
        p.made += [vector, elements[-1]]
    return p.results(elements[-1] if p.chance(0.7) else p.reduce(elements[-1], axes))


def columns(draft: Draft) -> Case:
    """Sums over leading or middle dims, and what is computed of them; elements beside them."""
    p = KernelDraft(draft)
    rank = p.between(2, 3)
    dims, gone = p.dims(rank), p.between(0, rank - 2)
    elements, finals = [p.parameter(dims)], list[HloInstruction]()
    for _ in range(p.between(1, 3)):
        if p.chance(0.7):
            elements.append(p.elementwise(*elements))
        final = p.reduce(draft.pick(elements), [gone])
        if finals and p.chance(0.7):
            final = p.elementwise(final, *finals)
        finals.append(final)
    if p.chance(0.5):
        other = p.parameter(finals[-1].shape.dims)
        finals.append(p.elementwise(finals[-1], other))
    p.made += [*elements[1:], *finals[:-1]]
    if p.chance(0.3):
        last, d = finals[-1], finals[-1].shape.rank - 1
        return p.results(p.part(p.parameter(last.shape.dims), d, lambda size: p.cut(last, d, 0, size)))
    return p.results(finals[-1])


def tiles(draft: Draft) -> Case:
    """Rows and columns of one array, and sums of all of it."""
    p = KernelDraft(draft)
    dims = p.dims(2)
    x = p.parameter(dims)
    y = p.elementwise(x, p.parameter(dims)) if p.chance(0.7) else x
    row = p.reduce(y, [1])
    wide = p.elementwise(x, p.builder.broadcast(p.small(row), dims, (0,)))
    choice = p.between(0, 3)
    if choice == 0:
        return p.results(p.reduce(wide, [0]), row)
    if choice == 1:
        return p.results(p.reduce(y, [0, 1]))
    if choice == 2:
        return p.results(p.reduce(p.reduce(wide, [1]), [0]))
    return p.results(p.reduce(wide, [0]), p.reduce(x, [0]), y if y is not x else wide)


def windows(draft: Draft) -> Case:
    """Windows with strides, holes and padding, work before and after them, and reductions of them."""
    p = KernelDraft(draft)
    rank = p.between(1, 2)
    dims = p.dims(rank)
    x = p.parameter(dims)
    y = p.elementwise(x, p.parameter(dims)) if p.chance(0.5) else x
    square = rank == 1 and p.chance(0.25)  # as many windows as one is long
    sides = [attrs.WindowDim((e + 1) // 2) if square else _window(p, e) for e in dims]
    opcode = draft.pick(("add", "maximum", "minimum"))
    made = p.builder.add(
        "reduce-window", y, p.builder.constant(identity(opcode, p.dtype)), window=attrs.Window(tuple(sides)),
        called=(scalar_computation(draft.module, opcode, p.dtype),),
    )  # fmt: skip
    p.made.append(made)
    after = p.elementwise(made, p.parameter(made.shape.dims)) if p.chance(0.5) else made
    if square or p.chance(0.2):
        return p.results(p.reduce(after, [draft.pick(range(rank))]))
    if p.chance(0.3):
        return p.results(p.builder.reshape(after, (after.shape.size,)))
    return p.results(after)


def _window(p: KernelDraft, size: int) -> attrs.WindowDim:
    window = p.between(1, min(4, size))
    low, high = p.between(0, window - 1), p.between(0, window - 1)
    holes = p.between(1, 2) if (window - 1) * 2 < size else 1
    return attrs.WindowDim(window, p.between(1, 3), low, high, p.between(1, 2), holes)


def movement(draft: Draft) -> Case:
    """Elementwise work between what moves, pads, joins, cuts and overwrites."""
    p = KernelDraft(draft, ("f32", "f32", "s32", "f64", "u8", "bf16", "pred", "s64"))
    plain = p.dtype in ("pred", "bf16")
    value = p.parameter(p.dims(p.between(1, 3)))
    for _ in range(p.between(1, 5)):
        value = _moved(p, value)
        if not plain and p.chance(0.5):
            value = p.elementwise(value, p.parameter(value.shape.dims))
    if value.shape.size == 0 or value.opcode == "parameter":
        value = p.builder.add("copy", value)
    return p.results(value)


def _moved(p: KernelDraft, value: HloInstruction) -> HloInstruction:
    dims, b = value.shape.dims, p.builder
    rank, d = len(dims), p.between(0, len(dims) - 1)
    kind = p.draft.pick(("part", "part", "pad", "slice", "reverse", "transpose", "reshape", "at", "gather"))
    if kind == "part":
        return p.part(value, d, lambda size: p.cut(value, d, 0, size))
    if kind == "pad" and value.shape.size * 4 < _MAX_ELEMENTS:
        sides = [
            attrs.PadDim(p.between(-1 if e > 2 else 0, 3), p.between(0, 3), p.between(0, 1)) for e in dims
        ]
        return b.pad(value, p.scalar(1), sides)
    if kind == "slice":
        starts = [p.between(0, e - 1) for e in dims]
        limits = [p.between(s + 1, e) for s, e in zip(starts, dims)]
        return b.slice(value, starts, limits, [p.between(1, 2) for _ in dims])
    if kind == "reverse":
        return b.add("reverse", value, dimensions=(d,))
    if kind == "transpose":
        return b.transpose(value, [int(k) for k in p.rng.permutation(rank)])
    if kind == "reshape":
        size = value.shape.size
        divisor = p.draft.pick([k for k in range(1, size + 1) if size % k == 0])
        return b.reshape(value, p.draft.pick(((size,), (divisor, size // divisor), (1, size))))
    if kind == "at":
        sizes = [p.between(1, e) for e in dims]
        dtype = p.draft.pick(("s32", "s64", "u8", "s8"))
        low = 0 if dtype == "u8" else -2
        starts = [
            p.draft.parameter(np.asarray(p.between(low, min(e, 99))).astype(DTYPES[dtype].numpy), dtype)
            for e in dims
        ]
        return b.dynamic_slice(value, starts, sizes)
    if kind == "gather":
        count = p.draft.pick((1, 7, 16, 33))
        numbers = p.rng.integers(-3, dims[0] + 3, (count, 1))
        dtype = p.draft.pick(("s32", "s8"))
        indices = p.draft.parameter(np.clip(numbers, -128, 127).astype(DTYPES[dtype].numpy), dtype)
        offsets = tuple(range(1, rank))
        return b.gather(value, indices, attrs.GatherDims(offsets, (0,), (0,), 1), (1, *dims[1:]))
    return (
        b.broadcast(value, (2, *dims), range(1, rank + 1)) if value.shape.size * 2 < _MAX_ELEMENTS else value
    )


def products(draft: Draft) -> Case:
    """Products of factors that are moved or cut before, with work and movement after them."""
    p = KernelDraft(draft, ("f32", "f32", "f64"))
    batch = (draft.pick((1, 2, 3)),) if p.chance(0.4) else ()
    m, n, k = (draft.pick(SIZES) for _ in range(3))
    lhs, rhs = p.parameter((*batch, m, k)), p.parameter((*batch, k, n))
    count = len(batch)
    sides = []
    for side in (lhs, rhs):
        if p.chance(0.4):  # stored the other way round
            dims = side.shape.dims
            number = side.parameter_number
            stored = draft.arguments[number]
            order = (*range(count), count + 1, count)
            turned = p.draft.parameter(np.ascontiguousarray(np.transpose(stored, order)), p.dtype)
            side = p.builder.transpose(turned, order)
            assert side.shape.dims == dims
        if p.chance(0.3) and side.shape.dims[-2] > 1:
            last, d = p.between(1, side.shape.dims[-2]), side.shape.rank - 2
            padded = p.parameter([e + (3 if j == d else 0) for j, e in enumerate(side.shape.dims)])
            side = p.cut(padded, d, 3 - last % 3, side.shape.dims[d] + 3 - last % 3)
        sides.append(side)
    batches = tuple(range(count))
    product = p.builder.dot(*sides, attrs.DotDims((count + 1,), (count,), batches, batches))
    dims = product.shape.dims
    value = product
    for _ in range(p.between(0, 3)):
        kind = draft.pick(("bias", "rows", "residual", "clamp", "negate"))
        if kind == "bias":
            value = p.builder.add("add", value, p.builder.broadcast(p.parameter((n,)), dims, (count + 1,)))
        elif kind == "rows":
            value = p.builder.add("subtract", value, p.builder.broadcast(p.parameter((m,)), dims, (count,)))
        elif kind == "residual":
            value = p.elementwise(value, p.parameter(dims))
        else:
            value = p.small(value) if kind == "clamp" else p.builder.add("negate", value)
        p.made.append(value)
    if p.chance(0.3):
        order = (*range(count), count + 1, count) if p.chance(0.5) else (count, *range(count), count + 1)
        value = (
            p.builder.transpose(value, order)
            if p.chance(0.5)
            else p.builder.reshape(value, (math.prod(dims),))
        )
    if p.chance(0.1):
        d = value.shape.rank - 1
        last = value
        value = p.part(p.parameter(value.shape.dims), d, lambda size: p.cut(last, d, 0, size))
    return p.results(value)


def updates(draft: Draft) -> Case:
    """Slices written in place and scatters, of values and at places that are computed."""
    if draft.rng.random() < 0.5:
        return indexed.scatter(draft)
    p = KernelDraft(draft)
    dims = p.dims(p.between(1, 3))
    sizes = [p.between(1, e) for e in dims]
    update = p.elementwise(p.parameter(sizes), p.parameter(sizes))
    if p.chance(0.3):
        update = (
            p.part(p.parameter(sizes), 0, lambda size: p.cut(update_, 0, 0, size))
            if (update_ := update)
            else update
        )
    target, dtype = p.parameter(dims), draft.pick(("s32", "s64", "u8", "s8", "u32"))
    starts = []
    for e in dims:
        low = 0 if dtype.startswith("u") else -2
        start = p.draft.parameter(np.asarray(p.between(low, min(e, 99))).astype(DTYPES[dtype].numpy), dtype)
        if p.chance(0.4):
            start = p.builder.add("add", start, p.builder.constant(np.asarray(1, DTYPES[dtype].numpy)))
        starts.append(start)
    if p.chance(0.3) and sizes[0] > 1:  # a place that is computed of as many numbers as the update has
        numbers = draft.parameter(p.rng.integers(0, 2, sizes[0]).astype(DTYPES[dtype].numpy), dtype)
        computation = scalar_computation(draft.module, "add", dtype)
        zero = p.builder.constant(np.asarray(0, DTYPES[dtype].numpy))
        starts[0] = p.builder.reduce([numbers], [zero], [0], computation)
    return draft.finish(p.builder.dynamic_update_slice(target, update, starts))


def sorts(draft: Draft) -> Case:
    """Sorts of one to three arrays by the first, or by two of them; sometimes only their first elements."""
    p = KernelDraft(draft, ("f32", "s32", "u8", "f64"))
    p.special = False
    dims = p.dims(p.between(1, 3))
    along = p.between(0, len(dims) - 1)
    arrays = [p.parameter(dims) for _ in range(p.between(1, 2))]
    if p.chance(0.5):
        arrays.append(p.builder.iota("s32", dims, along))
    body = HloBuilder.create(draft.module, "before")
    sides = [[body.parameter(array(v.shape.dtype)) for _ in range(2)] for v in arrays]
    direction = draft.pick(("LT", "GT"))
    before = body.compare(*sides[0], direction)
    if len(arrays) > 1 and p.chance(0.5):
        equal = body.compare(*sides[0], "EQ")
        before = body.add("or", before, body.add("and", equal, body.compare(*sides[1], "LT")))
    made = p.builder.add(
        "sort", *arrays, dimensions=(along,), is_stable=True, called=(body.build(before),)
    )  # fmt: skip
    leaves = [made] if len(arrays) == 1 else [p.builder.element(made, k) for k in range(len(arrays))]
    taken = p.between(1, dims[along])
    leaves = [p.cut(v, along, 0, taken) for v in leaves]
    return draft.finish(leaves[0] if len(leaves) == 1 else p.builder.tuple(leaves))


FAMILIES: dict[str, Callable[[Draft], Case]] = {
    f.__name__: f for f in (rows, columns, tiles, windows, movement, products, updates, sorts)
}


def case_of(family: str, seed: int) -> Case:
    """The case of a family for a seed: always the same."""
    draft = Draft(np.random.default_rng([seed, list(FAMILIES).index(family)]), f"{family}#{seed}", seed)
    return FAMILIES[family](draft)


def fused(case: Case) -> Case:
    """The same program with all of its work in one fusion."""
    module = case.module.clone()
    inner = module.entry
    outer = HloBuilder.create(module, "entry")
    given = [outer.parameter(p.shape) for p in inner.parameters]
    fusion = outer.add("fusion", *given, kind="kLoop", shape=inner.root.shape, called=(inner,))
    module.set_entry(outer.build(fusion))
    return Case(case.name, module, case.arguments, case.terms, case.exact)
