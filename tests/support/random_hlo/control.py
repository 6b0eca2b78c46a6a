"""Cases of control flow and random bits."""

from __future__ import annotations

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.shape import array, tuple_of
from tests.support.random_hlo.draft import (
    Case,
    Draft,
    small_integers,
)


def loop(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 2), draft.pick(("f32", "s32", "f64"))
    state = tuple_of([array("s32"), array(dtype, dims)])
    trips = int(draft.rng.integers(0, 5))
    condition = HloBuilder.create(draft.module, "condition")
    counter = condition.element(condition.parameter(state), 0)
    condition.build(condition.compare(counter, condition.constant(trips, "s32"), "LT"))
    body = HloBuilder.create(draft.module, "body")
    given = body.parameter(state)
    step, value = body.element(given, 0), body.element(given, 1)
    after = body.add("add", value, body.broadcast(body.convert(step, dtype), dims))
    body.build(body.tuple([body.add("add", step, body.constant(1, "s32")), after]))
    draft.name += f" {dtype} {trips} trips"
    init = draft.builder.tuple(
        [draft.builder.constant(0, "s32"), draft.parameter(small_integers(draft.rng, dtype, dims), dtype)]
    )
    return draft.finish(draft.builder.loop(condition.computation, body.computation, init))


def conditional(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 2), draft.pick(("f32", "s32"))
    count = draft.pick((1, 2, 3))
    branches = []
    for number in range(count):
        branch = HloBuilder.create(draft.module, f"branch{number}")
        value = branch.parameter(array(dtype, dims))
        branches.append(branch.build(branch.add("multiply", value, branch.full(number + 2, dtype, dims))))
    if count == 2 and draft.rng.random() < 0.5:
        selector = draft.parameter(np.asarray(bool(draft.rng.random() < 0.5)), "pred")
    else:
        selector = draft.parameter(draft.rng.integers(-1, count + 2, ()).astype(np.int32), "s32")
    operands = [draft.parameter(small_integers(draft.rng, dtype, dims), dtype) for _ in range(count)]
    draft.name += f" {count} branches"
    return draft.finish(draft.builder.add("conditional", selector, *operands, called=branches))


def call_and_map(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 3), draft.pick(("f32", "s32", "f64"))
    body = HloBuilder.create(draft.module, "body")
    a, b = body.parameter(array(dtype)), body.parameter(array(dtype))
    body.build(body.select(body.compare(a, b, "LT"), body.add("subtract", b, a), body.constant(7, dtype)))
    callee = HloBuilder.create(draft.module, "callee")
    x, y = callee.parameter(array(dtype, dims)), callee.parameter(array(dtype, dims))
    callee.build(callee.add("map", x, y, dimensions=tuple(range(len(dims))), called=(body.computation,)))
    arguments = [draft.parameter(small_integers(draft.rng, dtype, dims), dtype) for _ in range(2)]
    draft.name += f" {dtype}"
    return draft.finish(draft.builder.call(callee.computation, arguments))


def bits(draft: Draft) -> Case:
    dims, dtype = draft.dims(0, 3), draft.pick(("u8", "u16", "u32", "u64"))
    algorithm, words = draft.pick((("rng_three_fry", 2), ("rng_philox", 3), ("rng_default", 2)))
    draft.name += f" {algorithm} {dtype}"
    state = draft.parameter(draft.rng.integers(0, 1 << 63, words, dtype=np.uint64), "u64")
    shape = tuple_of([array("u64", (words,)), array(dtype, dims)])
    return draft.finish(draft.builder.add("rng-bit-generator", state, shape=shape, algorithm=algorithm))
