"""Cases of operations that order, group or ask about others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import TOKEN, array
from tests.support.random_hlo.draft import FLOATS, INTEGERS, Case, Draft, small_integers, values

_SHARDING = '{kind="sharding", entry={maximal device=0}, exit={maximal device=0}}'


def structure(draft: Draft) -> Case:
    dims, dtype = draft.dims(1, 3), draft.pick((*FLOATS, *INTEGERS))
    kind = draft.in_turn(tuple(_KINDS))
    draft.name += f" {kind} {dtype}"
    value = draft.parameter(small_integers(draft.rng, dtype, dims), dtype)
    return draft.finish(_KINDS[kind](draft, value))


def _barrier(draft: Draft, value: HloInstruction) -> HloInstruction:
    build = draft.builder
    fenced = build.add("opt-barrier", build.tuple([value, build.add("add", value, value)]))
    return build.add("subtract", build.element(fenced, 1), build.element(fenced, 0))


def _fusion(draft: Draft, value: HloInstruction) -> HloInstruction:
    body = HloBuilder.create(draft.module, "fused")
    given = body.parameter(value.shape.logical)
    kept = body.add("maximum", given, body.full(1, value.shape.dtype, value.shape.dims))
    called = body.build(body.add("multiply", kept, given))  # XLA:CPU aborts on loops with several results
    made = draft.builder.add("fusion", value, shape=called.root.shape, kind="kLoop", called=(called,))
    return draft.builder.tuple([made, value])


def _size(draft: Draft, value: HloInstruction) -> HloInstruction:
    axis = int(draft.rng.integers(value.shape.rank))
    size = draft.builder.add("get-dimension-size", value, dimensions=(axis,))
    return draft.builder.add("add", size, draft.builder.constant(1, "s32"))


def _number(opcode: str) -> Callable[[Draft, HloInstruction], HloInstruction]:
    def make(draft: Draft, value: HloInstruction) -> HloInstruction:
        number = draft.builder.add(opcode)
        return draft.builder.tuple([draft.builder.convert(number, "s32"), value])

    return make


def _token(draft: Draft, value: HloInstruction) -> HloInstruction:
    token = draft.builder.add("after-all", shape=TOKEN)
    return draft.builder.add("add-dependency", draft.builder.add("add", value, value), token)


def _domain(draft: Draft, value: HloInstruction) -> HloInstruction:
    return draft.builder.add("add", draft.builder.add("domain", value, domain=_SHARDING), value)


def _stochastic(draft: Draft, value: HloInstruction) -> HloInstruction:
    dims = value.shape.dims
    number = draft.parameter(values(draft.rng, "f32", dims), "f32")
    chance = draft.parameter(draft.rng.integers(0, 1 << 32, dims, dtype=np.uint32), "u32")
    made = draft.builder.add("stochastic-convert", number, chance, shape=array("s32", dims))
    return draft.builder.tuple([made, value])


_KINDS: dict[str, Callable[[Draft, HloInstruction], HloInstruction]] = {
    "opt-barrier": _barrier,
    "fusion": _fusion,
    "get-dimension-size": _size,
    "partition-id": _number("partition-id"),
    "replica-id": _number("replica-id"),
    "after-all": _token,
    "domain": _domain,
    "stochastic-convert": _stochastic,
}
