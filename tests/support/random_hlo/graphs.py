"""Cases of many operations."""

from __future__ import annotations

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.instruction import HloInstruction
from tests.support.random_hlo.draft import (
    Case,
    Draft,
    small_integers,
)

DIRECTIONS = ("EQ", "NE", "GE", "GT", "LE", "LT")


def graph(draft: Draft) -> Case:
    """Ten to thirty exact operations on small integers, then some inexact ones that end in outputs."""
    dtype = draft.pick(("f32", "f32", "f64", "s32"))
    dims = draft.dims(1, 3, zero=False)
    pool = [draft.parameter(small_integers(draft.rng, dtype, dims), dtype) for _ in range(3)]
    sums = scalar_computation(draft.module, "add", dtype)
    for _ in range(int(draft.rng.integers(10, 30))):
        pool.append(_grow(draft, pool, dims, sums))
    outputs = [pool[-1], draft.pick(pool)]
    if dtype != "s32":
        draft.exact, draft.terms = False, 64
        outputs += [
            draft.builder.add(draft.pick(("tanh", "sine", "logistic", "erf", "cbrt")), draft.pick(pool))
            for _ in range(3)
        ]
    return draft.finish(draft.builder.tuple(outputs))


def _grow(draft: Draft, pool: list[HloInstruction], dims: tuple[int, ...], sums) -> HloInstruction:
    build, dtype = draft.builder, pool[0].shape.dtype
    a, b = draft.pick(pool), draft.pick(pool)
    kind = draft.pick(
        (
            "add",
            "subtract",
            "maximum",
            "minimum",
            "negate",
            "select",
            "reduce",
            "turn",
            "slice",
            "clamp",
            "abs",
        )
    )
    if kind in ("add", "subtract"):
        bound = build.full(4, dtype, dims)
        return build.add("clamp", build.add("negate", bound), build.add(kind, a, b), bound)
    if kind in ("maximum", "minimum"):
        return build.add(kind, a, b)
    if kind in ("negate", "abs"):
        return build.add(kind, a)
    if kind == "select":
        return build.select(build.compare(a, b, draft.pick(DIRECTIONS)), a, b)
    if kind == "clamp":
        return build.add("clamp", build.full(-2, dtype, ()), a, build.full(2, dtype, ()))
    axis = int(draft.rng.integers(len(dims)))
    if kind == "reduce":
        total = build.reduce([a], [build.constant(0, dtype)], (axis,), sums)
        kept = [d for d in range(len(dims)) if d != axis]
        spread = build.broadcast(total, dims, kept)
        return build.add("clamp", build.full(-3, dtype, ()), spread, build.full(3, dtype, ()))
    if kind == "turn":
        return build.add("reverse", a, dimensions=(axis,))
    cut = list(dims)
    cut[axis] -= 1
    head = build.slice(a, [0] * len(dims), cut)
    padding = [attrs.PadDim(0, 1 if d == axis else 0) for d in range(len(dims))]
    return build.pad(head, build.constant(1, dtype), padding)
