"""Sorts of several arrays by several keys, whole or their beginning, around sizes where kernels change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from tests.support.random_hlo.draft import FLOATS, INTEGERS, Case, Draft, values

LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 255, 256, 257, 300)
TAKEN = (1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 100, 127, 128)
DTYPES = (*FLOATS, *INTEGERS, "pred")


def sorts(draft: Draft) -> Case:
    """A sort, or the best of each row."""
    if draft.rng.random() < 0.15:
        return _best(draft)
    dims = _dims(draft)
    axis = int(draft.rng.integers(len(dims)))
    length = dims[axis] = draft.pick(LENGTHS)
    types = [draft.pick(DTYPES) for _ in range(draft.pick((1, 1, 2, 2, 3, 4)))]
    keys = int(draft.rng.integers(1, len(types) + 1))
    places = draft.pick(("", "", "iota", "iota", "array"))
    operands = [_array(draft, dtype, tuple(dims)) for dtype in types]
    if places:
        types.append("s32")
        whole = tuple(dims)
        operands.append(
            draft.builder.iota("s32", whole, axis) if places == "iota" else _array(draft, "s32", whole)
        )
    draft.name += f" {'x'.join(map(str, dims))} along {axis} of {' '.join(types)} by {keys}"
    compare = _comparator(draft, types, keys)
    made = draft.builder.add("sort", *operands, dimensions=(axis,), is_stable=True, called=(compare,))
    parts = [draft.builder.element(made, k) for k in range(len(types))] if len(types) > 1 else [made]
    if length > 1 and draft.rng.random() < 0.6:
        taken = min(draft.pick(TAKEN), length if draft.rng.random() < 0.1 else length - 1)
        draft.name += f", {taken} taken"
        read = [part for part in parts if part is parts[0] or draft.rng.random() < 0.8]
        parts = [_beginning(draft, part, axis, taken) for part in read]
    return draft.finish(draft.builder.tuple(parts))


def _dims(draft: Draft) -> list[int]:
    return [draft.pick((1, 2, 3, 5)) for _ in range(draft.pick((1, 2, 2, 3)))]


def _array(draft: Draft, dtype: str, dims: tuple[int, ...]) -> HloInstruction:
    """Values of which many are equal, or few, or special."""
    made = values(draft.rng, dtype, dims, special=draft.rng.random() < 0.3)
    if dtype in FLOATS and draft.rng.random() < 0.5:
        with np.errstate(invalid="ignore"):
            made = np.round(made.astype(np.float64)).astype(made.dtype)
    return draft.parameter(made, dtype)


def _comparator(draft: Draft, types: list[str], keys: int) -> HloComputation:
    """Of some arrays, in any order of them, one after the other where those before are equal."""
    body = HloBuilder.create(draft.module, "comparator")
    pairs = [[body.parameter(array(t)) for _ in range(2)] for t in types]
    chosen = [int(k) for k in draft.rng.permutation(len(types))[:keys]]
    answer: HloInstruction | None = None
    for number in reversed(chosen):
        left, right = pairs[number]
        if types[number][0] == "s" and draft.rng.random() < 0.2:
            left, right = body.add("not", left), body.add("not", right)
        compared = _comparing(body, "TOTALORDER" if types[number] in FLOATS else None)
        sides = (left, right) if draft.rng.random() < 0.8 else (right, left)
        first = compared(draft.pick(("LT", "GT")), *sides)
        if answer is None:
            answer = first
        elif draft.rng.random() < 0.5:
            answer = body.add("or", first, body.add("and", compared("EQ", left, right), answer))
        else:
            answer = body.select(compared("NE", right, left), first, answer)
    assert answer is not None
    return body.build(answer)


def _comparing(body: HloBuilder, kind: str | None) -> Callable[..., HloInstruction]:
    def compared(direction: str, a: HloInstruction, b: HloInstruction) -> HloInstruction:
        return body.add("compare", a, b, direction=direction, comparison_type=kind)

    return compared


def _beginning(draft: Draft, value: HloInstruction, axis: int, taken: int) -> HloInstruction:
    dims = value.shape.dims
    return draft.builder.slice(value, (0,) * len(dims), (*dims[:axis], taken, *dims[axis + 1 :]))


def _best(draft: Draft) -> Case:
    dims = _dims(draft)
    length = dims[-1] = draft.pick(LENGTHS)
    dtype = draft.pick(("f32", "bf16", "f16", "f64", "s32", "u8", "s8"))
    k = draft.pick((1, length, max(1, length - 1), min(length, draft.pick(TAKEN))))
    draft.name += f" {k} best of {'x'.join(map(str, dims))} {dtype}"
    value = _array(draft, dtype, tuple(dims))
    return draft.finish(draft.builder.add("topk", value, k=k, largest=bool(draft.rng.random() < 0.7)))
