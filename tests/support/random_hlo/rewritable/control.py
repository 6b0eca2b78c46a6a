"""Calls, loops and branches with dead, constant and unchanged parts."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from tests.support.random_hlo.rewritable.pool import Pool


def call(p: Pool) -> HloInstruction:
    x = p.pick()
    body = HloBuilder.create(p.draft.module, "callee")
    a, b = body.parameter(x.shape), body.parameter(x.shape)
    inner = body.add("negate", a)
    body.build(body.add("maximum", inner, body.add("add", b, b)))
    made = p.build.call(body.computation, [x, p.like(x)])
    if p.rng.random() < 0.8:
        made = p.build.call(body.computation, [made, x])
    return made


def equal_callees(p: Pool) -> HloInstruction:
    x = p.pick()
    made = []
    for _ in range(2):
        body = HloBuilder.create(p.draft.module, "equal")
        a = body.parameter(x.shape)
        body.build(body.add("abs", body.add("negate", a)))
        made.append(p.build.call(body.computation, [x]))
    return p.build.add("add", *made)


def mapped(p: Pool) -> HloInstruction:
    x = p.pick()
    y = p.like(x)
    dims = tuple(range(x.shape.rank))
    return p.build.add("map", x, y, dimensions=dims, called=(p.reducer("maximum", x.shape.dtype),))


def branch(p: Pool) -> HloInstruction:
    x = p.pick()
    y = p.like(x)
    branches = []
    for number in range(2):
        body = HloBuilder.create(p.draft.module, f"branch{number}")
        given = body.parameter(tuple_of([x.shape, y.shape, y.shape]))
        a, b = body.element(given, 0), body.element(given, 1)
        results = [body.add("add", a, b) if number else a, b, body.full(number, "s32", ())]
        branches.append(body.build(body.tuple(results)))
    flag = p.choose(p.build.constant(True), p.build.constant(False), p.fresh("pred", ()))
    argument = p.build.tuple([x, y, y])
    made = p.build.add("conditional", flag, argument, argument, called=branches)
    return p.build.element(made, p.choose(0, 0, 1))


def loop(p: Pool) -> HloInstruction:
    """A counted loop: a counter, a sum, a constant, an unchanged array, a dead array, a twin of the sum."""
    x = p.small(p.pick())
    kept, dead = p.like(x), p.like(x)
    dtype = x.shape.dtype
    trips = p.choose(0, 1, 2, 3)
    start = p.choose(0, 2)
    state = tuple_of([x.shape.scalar().with_dtype("s32"), x.shape, x.shape, x.shape, x.shape.scalar()])
    condition = HloBuilder.create(p.draft.module, "condition")
    counter = condition.element(condition.parameter(state), 0)
    limit = condition.constant(start + trips, "s32")
    condition.build(condition.compare(counter, limit, "LT"))
    body = HloBuilder.create(p.draft.module, "body")
    given = body.parameter(state)
    i, total, same, unused, constant = (body.element(given, n) for n in range(5))
    fixed = body.add("negate", body.add("abs", same))
    grown = body.add("add", total, body.add("add", fixed, body.broadcast(constant, x.shape.dims)))
    low, high = body.full(-4, dtype, ()), body.full(4, dtype, ())
    grown = body.add("clamp", low, grown, high)
    following = body.add("add", i, body.constant(1, "s32"))
    body.build(body.tuple([following, grown, same, body.add("add", unused, unused), constant]))
    init = p.build.tuple([p.build.constant(start, "s32"), x, kept, dead, p.scalar(1, dtype)])
    made = p.build.loop(condition.computation, body.computation, init)
    return p.build.element(made, p.choose(1, 1, 2))


PATTERNS = (call, equal_callees, mapped, branch, loop)
