"""Programs on which one pass of simplification fires: constants, equal work, branches, loops, sorts, rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo.attributes import DotDims, GatherDims, ScatterDims
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, array, tuple_of
from tests.support.directed.rewrites import dims_of, everywhere, given
from tests.support.random_hlo.draft import ANY, EIGHT_BIT_FLOATS, FLOATS, INTEGERS, Case, Draft
from tests.support.random_hlo.draft import values as drawn

Maker = Callable[[Draft], HloInstruction]

_EXACT = ("add", "subtract", "multiply", "maximum", "minimum", "divide", "remainder")
_BITS = ("and", "or", "xor", "shift-left", "shift-right-logical", "shift-right-arithmetic")
_NARROW = (*EIGHT_BIT_FLOATS[:-1], "s4", "u4", "s2", "u2")


def _constant(draft: Draft, dtype: str, dims: tuple[int, ...]) -> HloInstruction:
    return draft.builder.constant(drawn(draft.rng, dtype, dims, draft.rng.random() < 0.5))


def _folded(draft: Draft) -> HloInstruction:
    """An operation of constants of any type."""
    dtype, dims, build = draft.pick((*ANY, *_NARROW)), dims_of(draft, 1, 2), draft.builder
    x, y = (_constant(draft, dtype, dims) for _ in range(2))
    kind = DTYPES[dtype].kind
    form = draft.in_turn(("binary", "convert", "choice", "movement", "compare"))
    if form == "convert":
        return build.convert(x, draft.pick([t for t in (*ANY, *_NARROW) if t != dtype]))
    if form == "movement":
        joined = build.concatenate([x, y], 0)
        return build.add(
            "reverse", build.transpose(joined, tuple(reversed(range(len(dims))))), dimensions=(0,)
        )
    if form == "choice":
        return build.select(_constant(draft, "pred", dims), x, y)
    if form == "compare":
        return build.compare(x, y, draft.pick(("EQ", "NE", "LT", "GE")))
    opcodes = {"float": _EXACT, "pred": ("and", "or", "xor", "maximum")}.get(kind, (*_EXACT, *_BITS))
    return build.add(draft.pick(opcodes), x, y)


def _twice(draft: Draft) -> HloInstruction:
    """Equal work twice, and work that differs in one thing."""
    dtype, dims, build = draft.pick((*FLOATS, *INTEGERS)), dims_of(draft, 1, 2), draft.builder
    x, y = given(draft, dtype, dims), given(draft, dtype, dims)
    zeros = [build.constant(np.asarray(z).astype(DTYPES[dtype].numpy)) for z in (0.0, -0.0)]
    wide = [build.broadcast(z, dims) for z in zeros]
    directions = ("LT", "LT", "LE")
    made = [build.add("add", x, y), build.add("add", y, x), build.add("subtract", x, y)]
    made += [build.add("subtract", y, x), *(build.add("multiply", x, z) for z in wide)]
    made += [build.compare(x, y, way) for way in directions]
    return build.tuple(made)


# -- branches
def _branch(draft: Draft, shape: Shape, number: int, same: bool) -> HloComputation:
    build = HloBuilder.create(draft.module, f"branch{number}")
    x = build.parameter(shape)
    first = build.add("add", x, build.full(1 if same else number + 1, x.shape.dtype, x.shape.dims))
    return build.build(build.tuple([first, build.add("multiply", x, x), x]))


def _branches(draft: Draft) -> HloInstruction:
    """A known selector, one branch, equal branches, or results that are not used."""
    dtype, dims, build = draft.pick(("f32", "s32", "u8")), dims_of(draft, 0, 2), draft.builder
    form = draft.in_turn(("known", "one", "known", "equal", "known", "unused"))
    count = 1 if form == "one" else int(draft.rng.integers(2, 5))
    called = [_branch(draft, array(dtype, dims), k, form == "equal") for k in range(count)]
    index = draft.rng.integers(-2, count + 2)
    is_pred = count == 2 and draft.rng.random() < 0.5
    number = np.asarray(bool(index > 0)) if is_pred else np.int32(index)
    if form == "known":
        selector = build.constant(number)
    else:
        selector = draft.parameter(np.asarray(number), "pred" if is_pred else "s32")
    one = given(draft, dtype, dims)
    operands = [one if form == "equal" else given(draft, dtype, dims) for _ in called]
    made = build.add("conditional", selector, *operands, called=called)
    used = [0, 2] if form == "unused" else range(3)
    return build.tuple([build.element(made, k) for k in used])


# -- loops
class _CountedLoop:
    """A counted loop under construction.

    Attributes:
        body: its builder; `state` are the elements in it.
    """

    def __init__(self, draft: Draft, init: list[HloInstruction], start: int, limit: int, step: int) -> None:
        self.draft, counter = draft, draft.pick(("s32", "s32", "u8", "s64", "s16"))
        low = 0 if counter.startswith("u") else -100
        start = max(low, start)
        first = draft.builder.constant(np.asarray(start).astype(DTYPES[counter].numpy))
        self.init = draft.builder.tuple([first, *init])
        shape = self.init.shape
        condition = HloBuilder.create(draft.module, "condition")
        at = condition.element(condition.parameter(shape), 0)
        bound = condition.constant(np.asarray(limit).astype(DTYPES[counter].numpy))
        way = draft.pick(("LT", "LE", "NE") if (limit - start) % step == 0 else ("LT", "LE"))
        if draft.rng.random() < 0.3:
            way, at, bound = {"LT": "GT", "LE": "GE", "NE": "NE"}[way], bound, at
        self.condition = condition.build(condition.compare(at, bound, way))
        self.body = HloBuilder.create(draft.module, "body")
        parameter = self.body.parameter(shape)
        self.counter, *self.state = (self.body.element(parameter, k) for k in range(len(shape.elements)))
        by = self.body.constant(np.asarray(step).astype(DTYPES[counter].numpy))
        self.following = self.body.add("add", self.counter, by)

    def finish(self, after: list[HloInstruction]) -> list[HloInstruction]:
        """The elements after the loop."""
        self.body.build(self.body.tuple([self.following, *after]))
        made = self.draft.builder.loop(self.condition, self.body.computation, self.init)
        return [self.draft.builder.element(made, k) for k in range(len(after) + 1)]


def _loop_with_dead_state(draft: Draft) -> HloInstruction:
    """Constants in the state, elements that nothing reads, elements that only feed each other."""
    dtype, dims = draft.pick(("f32", "s32", "u8")), dims_of(draft, 1, 2)
    x, dead = (given(draft, dtype, dims, False) for _ in range(2))
    fixed = everywhere(draft, 2, dtype, dims)
    trips = draft.pick((0, 1, 2, 5))
    loop = _CountedLoop(draft, [x, fixed, dead, dead], 0, trips, 1)
    body, (value, constant, unused, other) = loop.body, loop.state
    after = [body.add("add", value, constant), constant, body.add("add", unused, other), other]
    found = loop.finish(after)
    return draft.builder.tuple([found[1], found[draft.pick((0, 1, 2))]])


def _loop_with_invariants(draft: Draft) -> HloInstruction:
    """Work that is the same in each iteration; the loop may run never."""
    dtype, dims, build = draft.pick(("f32", "s32", "s8")), dims_of(draft, 1, 2), draft.builder
    x, w = given(draft, dtype, dims, False), given(draft, dtype, dims)
    d = given(draft, dtype, dims)
    limit = given(draft, "s32", (), False)
    shape = tuple_of([array("s32"), x.shape.logical, w.shape.logical, d.shape.logical, array("s32")])
    condition = HloBuilder.create(draft.module, "condition")
    state = condition.parameter(shape)
    condition.build(condition.compare(condition.element(state, 0), condition.element(state, 4), "LT"))
    body = HloBuilder.create(draft.module, "body")
    i, value, fixed, by, last = (
        body.element(state_, k) for state_ in [body.parameter(shape)] for k in range(5)
    )
    quotient = body.add("divide", body.add("maximum", fixed, by), by)  # by zero, too
    value = body.add("add", body.add("multiply", value, quotient), quotient)
    body.build(body.tuple([body.add("add", i, body.constant(1, "s32")), value, fixed, by, last]))
    init = build.tuple([build.constant(0, "s32"), x, w, d, limit])
    made = build.loop(condition.computation, body.computation, init)
    return build.tuple([build.element(made, k) for k in (0, 1, 2)])


def _short_loop(draft: Draft) -> HloInstruction:
    """A few iterations whose work depends on the counter."""
    dims = dims_of(draft, 1, 2)
    x = given(draft, "s32", dims)
    step = draft.pick((1, 2, 3))
    start = int(draft.rng.integers(0, 3))
    loop = _CountedLoop(draft, [x], start, start + step * int(draft.rng.integers(2, 8)), step)
    body = loop.body
    at = body.broadcast(body.convert(loop.counter, "s32"), dims)
    found = loop.finish([body.add("xor", body.add("multiply", loop.state[0], at), at)])
    return draft.builder.tuple(found)


# -- sorts, rows, empty arrays, unit dims
def _sort(draft: Draft) -> HloInstruction:
    """Results that nothing reads, or one element per row."""
    build, count = draft.builder, int(draft.rng.integers(2, 4))
    dims = (int(draft.rng.integers(1, 5)), draft.pick((1, 9, 33)))
    key = draft.pick(("s32", "u8", "f32", "s8"))
    arrays = [given(draft, key, dims, False), *(given(draft, "s32", dims) for _ in range(count - 1))]
    body = HloBuilder.create(draft.module, "before")
    sides = [body.parameter(array(a.shape.dtype)) for a in arrays for _ in range(2)]
    called = body.build(body.compare(sides[0], sides[1], draft.pick(("LT", "GT"))))
    made = build.add("sort", *arrays, dimensions=(1,), is_stable=True, called=(called,))
    used = draft.pick(((0,), (1,), (0, 1))) if count > 2 or dims[1] == 1 else (0,)
    return build.tuple([build.element(made, k) for k in used])


def _labels(draft: Draft) -> HloInstruction:
    """One element of each row, at labels of any type, also outside of the row."""
    build, rows = draft.builder, draft.pick((1, 5, 17, 200))
    columns = draft.pick((1, 7, 64, 130, 300))
    dtype = draft.pick(("s32", "s64", "u8", "s8", "u32", "s16"))
    info = np.iinfo(DTYPES[dtype].numpy)
    marks = draft.rng.integers(-3, columns + 3, (rows, 1)).clip(info.min, info.max).astype(info.dtype)
    if draft.rng.random() < 0.3:
        marks[::2] = draft.pick((info.min, info.max))
    label = draft.parameter(marks, dtype)
    along = draft.pick((0, 1))
    order = (lambda pair: pair[::-1]) if along == 0 else (lambda pair: pair)
    indices = build.concatenate(order([build.iota(dtype, (rows, 1), 0), label]), 1)
    dims = order([rows, columns])
    if draft.rng.random() < 0.5:
        x = build.add("abs", given(draft, draft.pick(("f32", "bf16", "f64")), dims))
        return build.gather(x, indices, GatherDims((), (0, 1), (0, 1), 1), (1, 1))
    kind = draft.pick(("f32", "s32"))
    zeros = build.full(0, kind, dims)
    called = scalar_computation(draft.module, "add", kind)
    numbers = ScatterDims((), (0, 1), (0, 1), 1)
    return build.add(
        "scatter", zeros, indices, given(draft, kind, (rows,)), scatter_dims=numbers, called=(called,)
    )


def _empty(draft: Draft) -> HloInstruction:
    x = given(draft, draft.pick(ANY), (3, 0))
    more = draft.builder.concatenate([x, given(draft, x.shape.dtype, (3, 2))], 1)
    return draft.builder.tuple([draft.builder.add("reverse", x, dimensions=(0,)), more])


def _units(draft: Draft) -> HloInstruction:
    """Work on arrays with dims of one."""
    build, dtype = draft.builder, draft.pick((*FLOATS, *INTEGERS))
    n, m = (int(draft.pick((1, 2, 7, 9))) for _ in range(2))
    x = given(draft, dtype, (1, n, 1, m))
    form = draft.in_turn(("elementwise", "transpose", "reduce", "dot", "broadcast", "bits"))
    if form == "elementwise":
        truth = given(draft, "pred", () if draft.rng.random() < 0.5 else x.shape.dims)
        return build.select(truth, build.add("maximum", x, x), x)
    if form == "transpose":
        return build.add("transpose", x, dimensions=tuple(int(d) for d in draft.rng.permutation(4)))
    if form == "reduce":
        init = given(draft, dtype, (), False)
        called = scalar_computation(draft.module, "maximum", dtype)
        return build.reduce([x], [init], (draft.pick((1, 3)),), called)
    if form == "broadcast":
        return build.broadcast(x, (2, 1, n, 1, m), (1, 2, 3, 4))
    if form == "bits":
        whole = given(draft, "f32", (1, n))
        return build.add("bitcast-convert", whole, shape=array("u8", (1, n, 4)))
    a = given(draft, "f32", draft.pick(((1, n, m), (1, 1, m), (1, n, 1))), False)
    b = given(draft, "f32", (1, a.shape.dims[2], draft.pick((1, 5))), False)
    draft.exact, draft.terms = False, 9
    return build.dot(a, b, DotDims((2,), (1,), (0,), (0,)))


PASSES: dict[str, Maker] = {
    "hlo-conditional-simplifier": _branches,
    "hlo-constant-folding": _folded,
    "hlo-cse": _twice,
    "hlo-one-per-row-rewriter": _labels,
    "hlo-sort-simplifier": _sort,
    "hlo-unit-dim-removal": _units,
    "hlo-while-invariant-code-motion": _loop_with_invariants,
    "hlo-while-loop-unroller": _short_loop,
    "hlo-while-simplifier": _loop_with_dead_state,
    "hlo-zero-sized-removal": _empty,
}

ZEROS_LOSE_SIGNS = frozenset({"hlo-one-per-row-rewriter"})
"""Passes after which sums begin with 0."""


def pass_case(name: str, seed: int) -> Case:
    """A program for a pass."""
    draft = Draft(np.random.default_rng([seed, 91, list(PASSES).index(name)]), f"{name}#{seed}", seed)
    return draft.finish(PASSES[name](draft))
