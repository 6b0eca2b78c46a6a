"""Operations that an expander rewrites, with special values, ties, narrow types and places outside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.evaluator.values import identity_of
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array, tuple_of
from tests.support.directed.rewrites import given
from tests.support.random_hlo.draft import FLOATS, INTEGERS, Case, Draft, small_integers

Maker = Callable[[Draft], HloInstruction]

_SIZES = (1, 2, 7, 8, 9, 17)
_INDEX = ("s8", "u8", "s16", "s32", "u32", "s64")


def _size(draft: Draft) -> int:
    return int(draft.pick(_SIZES))


def _argmax(draft: Draft) -> HloInstruction:
    """The place of a maximum or minimum among ties, NaN, infinities and zeros of both signs."""
    dtype, place = draft.pick((*FLOATS, *INTEGERS)), draft.pick(("s32", "u8", "s64", "u32"))
    opcode, build = draft.pick(("maximum", "minimum")), draft.builder
    body = HloBuilder.create(draft.module, "best")
    a, i, b, j = (body.parameter(array(t)) for t in (dtype, place, dtype, place))
    keep = body.compare(a, b, "GT" if opcode == "maximum" else "LT")
    if dtype in FLOATS:
        keep = body.add("or", keep, body.compare(a, a, "NE"))
    tie = body.add("and", body.compare(a, b, "EQ"), body.compare(i, j, "LT"))
    first = body.add("or", keep, tie)
    called = body.build(body.tuple([body.select(first, a, b), body.select(first, i, j)]))
    dims = (_size(draft), _size(draft))
    x = (
        draft.parameter(small_integers(draft.rng, dtype, dims), dtype)
        if draft.rng.random() < 0.5
        else given(draft, dtype, dims)
    )
    inits = [build.constant(np.asarray(identity_of(opcode, dtype))), build.constant(0, place)]
    return build.reduce([x, build.iota(place, dims, 1)], inits, (1,), called)


def _running(draft: Draft) -> HloInstruction:
    """A running sum or the like, forwards or backwards."""
    opcode = draft.pick(("add", "maximum", "minimum", "multiply"))
    dtype = draft.pick(("s32", "u8", "s16") if opcode in ("add", "multiply") else (*FLOATS, "s8", "u16"))
    dims, build = (_size(draft), int(draft.pick((3, 7, 8, 16, 17)))), draft.builder
    x, forwards = given(draft, dtype, dims), draft.rng.random() < 0.5
    side = attrs.WindowDim(dims[1], 1, dims[1] - 1 if forwards else 0, 0 if forwards else dims[1] - 1)
    init = build.constant(np.asarray(identity_of(opcode, dtype)))
    called = scalar_computation(draft.module, opcode, dtype)
    window = attrs.Window((attrs.WindowDim(1), side))
    return build.add("reduce-window", x, init, window=window, called=(called,))


def _ordered(draft: Draft, dtype: str):
    """A reducer of pairs whose order counts: x -> c x + d after x -> a x + b."""
    body = HloBuilder.create(draft.module, "compose")
    a, b, c, d = (body.parameter(array(dtype)) for _ in range(4))
    second = body.add("add", body.add("multiply", b, c), d)
    called = body.build(body.tuple([body.add("multiply", a, c), second]))
    return [draft.builder.constant(n, dtype) for n in (1, 0)], called


def _composed(draft: Draft) -> HloInstruction:
    dtype, dims = draft.pick(("s32", "u8", "s64")), (_size(draft), _size(draft), 2)
    inits, called = _ordered(draft, dtype)
    if draft.rng.random() < 0.5:
        inits = [draft.builder.constant(n, dtype) for n in (3, 5)]
    arrays = [given(draft, dtype, dims) for _ in range(2)]
    return draft.builder.reduce(arrays, inits, draft.pick(((0,), (1,), (0, 1))), called)


def _windows(draft: Draft) -> HloInstruction:
    dtype, n, size = draft.pick(("s32", "u8", "s64")), _size(draft), int(draft.pick((1, 2, 3, 5, 8)))
    inits, called = _ordered(draft, dtype)
    arrays = [given(draft, dtype, (n,)) for _ in range(2)]
    low = int(draft.rng.integers(0, size + 2))
    high = max(int(draft.rng.integers(0, size + 2)), size - n - low)
    side = attrs.WindowDim(size, int(draft.pick((1, 2, 3))), low, high)
    window = attrs.Window((side,))
    return draft.builder.add("reduce-window", *arrays, *inits, window=window, called=(called,))


def _pooled(draft: Draft) -> HloInstruction:
    """The gradient of pooling, with ties and NaN."""
    dtype, n = draft.pick(("f32", "s32", "f64")), int(draft.pick((4, 8, 9, 16)))
    size, stride = int(draft.pick((2, 3))), int(draft.pick((1, 2, 3)))
    side = attrs.WindowDim(size, stride, int(draft.pick((0, 1))), int(draft.pick((0, 1))))
    window = attrs.Window((attrs.WindowDim(1), side))
    x = (
        given(draft, dtype, (3, n))
        if draft.rng.random() < 0.5
        else draft.parameter(small_integers(draft.rng, dtype, (3, n)), dtype)
    )
    source = draft.parameter(small_integers(draft.rng, dtype, (3, side.positions(n))), dtype)
    body = HloBuilder.create(draft.module, "ge")
    select = body.build(body.compare(body.parameter(array(dtype)), body.parameter(array(dtype)), "GE"))
    add = scalar_computation(draft.module, "add", dtype)
    init = draft.builder.constant(0, dtype)
    return draft.builder.add("select-and-scatter", x, source, init, window=window, called=(select, add))


def _places(draft: Draft, dtype: str, dims: tuple[int, ...], most: int) -> HloInstruction:
    """Repeated places, also outside of the array."""
    info = np.iinfo(DTYPES[dtype].numpy)
    made = draft.rng.integers(-2, most + 3, dims).clip(info.min, info.max).astype(info.dtype)
    if draft.rng.random() < 0.3:
        made.reshape(-1)[::3] = draft.pick((info.min, info.max))
    return draft.parameter(made, dtype)


def _gather(draft: Draft) -> HloInstruction:
    """A row of each element of a batch, which a narrow type may not count."""
    batch, rows, width = int(draft.pick((1, 5, 130, 260))), _size(draft), _size(draft)
    dtype, kind = draft.pick(_INDEX), draft.pick(("f32", "s8", "bf16", "pred"))
    x = given(draft, kind, (batch, rows, width))
    count, taken = int(draft.pick((1, 3))), int(draft.rng.integers(1, width + 1))
    indices = _places(draft, dtype, (batch, count, 2), max(rows, width))
    numbers = attrs.GatherDims((2,), (1,), (1, 2), 2, (0,), (0,))
    return draft.builder.gather(x, indices, numbers, (1, 1, taken))


def _scatter(draft: Draft) -> HloInstruction:
    """Repeated updates in each element of a batch."""
    batch, rows, width = int(draft.pick((1, 5, 130, 260))), _size(draft), _size(draft)
    dtype, kind = draft.pick(_INDEX), draft.pick(("s32", "u8", "s64"))
    count = int(draft.pick((1, 3, 9)))
    x = given(draft, kind, (batch, rows, width))
    indices = _places(draft, dtype, (batch, count, 1), rows)
    updates = given(draft, kind, (batch, count, width))
    called = scalar_computation(draft.module, draft.pick(("add", "maximum", "minimum")), kind)
    numbers = attrs.ScatterDims((2,), (1,), (1,), 2, (0,), (0,))
    return draft.builder.add("scatter", x, indices, updates, scatter_dims=numbers, called=(called,))


def _largest(draft: Draft) -> HloInstruction:
    dtype, n = draft.pick((*FLOATS, *INTEGERS)), _size(draft)
    k = int(draft.rng.integers(1, n + 1))
    x = given(draft, dtype, (3, n), dtype in FLOATS)  # zeros of both signs and NaN have an order, too
    return draft.builder.add("topk", x, k=k, largest=draft.pick((True, False)))


def _total(draft: Draft) -> HloInstruction:
    dtype, dims = draft.pick(FLOATS), (_size(draft),)
    a, b = given(draft, dtype, dims, True), given(draft, dtype, dims, True)
    way = draft.pick(("EQ", "NE", "GE", "GT", "LE", "LT"))
    return draft.builder.add("compare", a, b, direction=way, comparison_type="TOTALORDER")


def _bits(draft: Draft) -> HloInstruction:
    source, target = draft.pick(
        (
            ("u8", "f32"),
            ("f32", "u8"),
            ("f64", "s16"),
            ("u16", "u64"),
            ("s4", "u8"),
            ("u8", "s2"),
            ("bf16", "f64"),
        )
    )
    old, new = DTYPES[source].bits, DTYPES[target].bits
    dims = (_size(draft), new // old) if old < new else (_size(draft),)
    raw = draft.rng.integers(0, 1 << min(old, 8), (*dims, max(old // 8, 1)), dtype=np.uint8)
    x = draft.parameter(raw.view(DTYPES[source].numpy).reshape(dims), source)
    shape = dims[:-1] if old < new else (*dims, old // new)
    return draft.builder.add("bitcast-convert", x, shape=array(target, shape))


def _rounded(draft: Draft) -> HloInstruction:
    dtype = draft.pick(FLOATS)
    most = {"f32": (8, 23), "f64": (11, 52), "f16": (5, 10), "bf16": (8, 7)}[dtype]
    exponent, mantissa = int(draft.rng.integers(2, most[0] + 1)), int(draft.rng.integers(0, most[1] + 1))
    x = given(draft, dtype, (_size(draft), 9), True)
    return draft.builder.add("reduce-precision", x, exponent_bits=exponent, mantissa_bits=mantissa)


def _complex(draft: Draft) -> HloInstruction:
    """Movement, choice, sums and loops of complex numbers."""
    build, dims = draft.builder, (_size(draft), 3)
    z, w = (
        draft.parameter(
            (small_integers(draft.rng, "f32", dims) + 1j * small_integers(draft.rng, "f32", dims)).astype(
                np.complex64
            ),
            "c64",
        )
        for _ in range(2)
    )
    form = draft.in_turn(("move", "sum", "choose", "arithmetic", "branch"))
    if form == "sum":
        return build.reduce(
            [z], [build.constant(np.complex64(1 - 1j))], (1,), scalar_computation(draft.module, "add", "c64")
        )
    if form == "choose":
        return build.select(build.compare(z, w, draft.pick(("EQ", "NE"))), z, w)
    if form == "arithmetic":
        return build.add("subtract", build.add("multiply", z, w), build.add("add", z, w))
    if form == "branch":
        branches = []
        for sign in (1, -1):
            body = HloBuilder.create(draft.module, "branch")
            given_ = body.parameter(z.shape)
            branches.append(body.build(body.add("multiply", given_, body.full(1j * sign, "c64", dims))))
        return build.add("conditional", given(draft, "pred", ()), z, w, called=branches)
    start = [
        draft.parameter(np.asarray(draft.rng.integers(-2, 9), np.int32), "s32"),
        build.constant(1, "s32"),
    ]
    part = build.dynamic_slice(
        build.concatenate([z, build.add("reverse", w, dimensions=(0,))], 0), start, (dims[0], 2)
    )
    return build.pad(
        build.transpose(part, (1, 0)),
        build.constant(np.complex64(1j)),
        [attrs.PadDim(1, 0, 1), attrs.PadDim(0, 1)],
    )


def _multiplied(draft: Draft) -> HloInstruction:
    """A product that sums over dims which are apart."""
    n, m, k, p, b = (int(draft.pick((1, 2, 3, 7))) for _ in range(5))
    dtype = draft.pick(("s32", "u8", "s64", "f32"))
    x = draft.parameter(small_integers(draft.rng, dtype, (k, m, b, p)), dtype)
    y = draft.parameter(small_integers(draft.rng, dtype, (n, b, p, k)), dtype)
    return draft.builder.dot(x, y, attrs.DotDims((0, 3), (3, 2), (2,), (1,)))


def _convolved(draft: Draft) -> HloInstruction:
    """Windows that do not overlap, and those that do."""
    size, n, groups = int(draft.pick((1, 2, 3))), int(draft.pick((4, 6, 9))), 1
    form = draft.in_turn(("apart", "over"))
    image = draft.parameter(small_integers(draft.rng, "f32", (2, n, 3)), "f32")
    kernel = draft.parameter(small_integers(draft.rng, "f32", (size, 3, 4)), "f32")
    side = {
        "apart": attrs.WindowDim(size, size),
        "over": attrs.WindowDim(size, 1, 1, 0, 1, 1),
    }[form]
    numbers = attrs.ConvDims(0, 2, (1,), 1, 2, (0,), 0, 2, (1,))
    return draft.builder.add(
        "convolution",
        image,
        kernel,
        window=attrs.Window((side,)),
        conv_dims=numbers,
        feature_group_count=groups,
    )


def _mapped(draft: Draft) -> HloInstruction:
    dtype, dims = draft.pick((*FLOATS, *INTEGERS)), (_size(draft), 2)
    body = HloBuilder.create(draft.module, "f")
    a, b = (body.parameter(array(dtype)) for _ in range(2))
    low = body.add("minimum", a, body.constant(3, dtype))
    called = body.build(body.select(body.compare(a, b, "LT"), low, body.add("maximum", b, low)))
    x, y = given(draft, dtype, dims), given(draft, dtype, dims)
    return draft.builder.add("map", x, y, dimensions=(0, 1), called=(called,))


def _waited(draft: Draft) -> HloInstruction:
    x = given(draft, "f32", (_size(draft),))
    shape = tuple_of([x.shape, x.shape, array("u32")])
    return draft.builder.add("copy-done", draft.builder.add("copy-start", x, shape=shape))


EXPANDERS: dict[str, tuple[str, Maker]] = {
    "asynchronous copies": ("hlo-async-expander", _waited),
    "bits": ("hlo-bitcast-convert-expander", _bits),
    "complex numbers": ("hlo-complex-to-pairs", _complex),
    "gathers": ("hlo-gather-simplifier", _gather),
    "gradients of pooling": ("hlo-select-and-scatter-expander", _pooled),
    "largest elements": ("hlo-topk-decomposer", _largest),
    "maps": ("hlo-map-inliner", _mapped),
    "places of maxima": ("hlo-argmax-rewriter", _argmax),
    "products": ("hlo-dot-decomposer", _multiplied),
    "reductions of pairs": ("hlo-reduction-expander", _composed),
    "rounding": ("hlo-reduce-precision-expander", _rounded),
    "running sums": ("hlo-reduce-window-rewriter", _running),
    "scatters": ("hlo-scatter-simplifier", _scatter),
    "total order": ("hlo-comparison-expander", _total),
    "windows of a convolution": ("hlo-convolution-to-dot", _convolved),
    "windows of pairs": ("hlo-reduce-window-expander", _windows),
}
"""By what is expanded: the pass, with its options, and what makes an operation for it."""

ZEROS_LOSE_SIGNS = frozenset(
    {
        "complex numbers",
        "gradients of pooling",
        "places of maxima",
        "running sums",
        "windows of a convolution",
    }
)
"""Operations whose result may have a zero of the other sign: sums begin with 0, zeros are equal."""


def expander_case(name: str, seed: int) -> Case:
    """An operation for an expander."""
    draft = Draft(np.random.default_rng([seed, 17, list(EXPANDERS).index(name)]), f"{name}#{seed}", seed)
    return draft.finish(EXPANDERS[name][1](draft))
