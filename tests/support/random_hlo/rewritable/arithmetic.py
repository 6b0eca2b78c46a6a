"""Redundant elementwise operations."""

from __future__ import annotations

from mpmd.compile.hlo.instruction import HloInstruction
from tests.support.random_hlo.rewritable.pool import Pool


def neutral(p: Pool) -> HloInstruction:
    x = p.pick()
    opcode, number = p.choose(("add", 0), ("multiply", 1), ("subtract", 0), ("divide", 1), ("multiply", -1))
    constant = p.full(number, x)
    commutes = opcode in ("add", "multiply") and p.rng.random() < 0.5
    return p.build.add(opcode, constant, x) if commutes else p.build.add(opcode, x, constant)


def negations(p: Pool) -> HloInstruction:
    a = p.pick()
    b = p.like(a)
    minus = p.build.add("negate", b)
    kind = p.choose("add", "subtract", "multiply", "negate", "abs")
    if kind in ("negate", "abs"):
        return p.build.add(kind, minus)
    other = p.build.add("negate", a) if kind == "multiply" else a
    return p.build.add(kind, other, minus)


def powers(p: Pool) -> HloInstruction:
    x = p.small(p.pick("f32"))
    exponent = p.choose(0, 1, 2)
    return p.build.add("power", x, p.full(exponent, x))


def halves(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    return p.build.add("multiply", p.build.add("divide", x, p.full(4, x)), p.full(4, x))


def bits(p: Pool) -> HloInstruction:
    x = p.pick("s32")
    opcode, number = p.choose(
        ("and", -1), ("and", 0), ("or", 0), ("xor", 0), ("shift-left", 0), ("shift-right-logical", 40)
    )
    return p.build.add(opcode, x, p.full(number, x))


def integer_constants(p: Pool) -> HloInstruction:
    x = p.pick("s32")
    opcode = p.choose("add", "multiply", "xor", "maximum")
    inner = p.build.add(opcode, x, p.full(2, x))
    return p.build.add(opcode, inner, p.full(3, x))


def itself(p: Pool) -> HloInstruction:
    x = p.pick()
    opcode = (
        p.choose("maximum", "minimum", "subtract")
        if x.shape.dtype == "s32"
        else p.choose("maximum", "minimum")
    )
    return p.build.add(opcode, x, x)


def comparisons(p: Pool) -> HloInstruction:
    x = p.pick()
    flag = p.build.compare(x, p.like(x), p.choose("EQ", "NE", "LT", "GE"))
    if p.rng.random() < 0.5:
        flag = p.build.add("not", flag)
    kind = p.choose("again", "swap", "bool")
    if kind == "bool":
        true, false = (p.build.full(v, "pred", flag.shape.dims) for v in (True, False))
        flag = p.build.select(flag, *p.choose((true, false), (false, true)))
    a, b = p.like(x), p.like(x)
    if kind == "again":
        a = p.build.select(flag, a, b)
    return p.build.select(flag, a, b)


def known_comparisons(p: Pool) -> HloInstruction:
    x = p.pick()
    iota = p.build.iota("s32", x.shape.dims, p.axis(x)) if x.shape.rank else p.build.constant(0, "s32")
    limit = p.build.full(p.choose(-1, 0, 1, 3, 100), "s32", x.shape.dims)
    flag = p.build.compare(*p.choose((iota, limit), (limit, iota)), p.choose("LT", "GE", "EQ", "GT"))
    return p.build.select(flag, x, p.like(x))


def conversions(p: Pool) -> HloInstruction:
    x = p.pick()
    there = p.choose("f64", "bf16", "f16", "s64") if x.shape.dtype == "f32" else p.choose("s64", "f64", "s16")
    return p.build.convert(p.build.convert(x, there), x.shape.dtype)


def converted_ends(p: Pool) -> HloInstruction:
    x = p.build.convert(p.pick("f32"), "bf16")
    wide = p.build.convert(p.build.transpose(x, p.order(x.shape.rank)), "f32")
    moved = p.build.reshape(wide, (*wide.shape.dims, 1))
    return p.build.convert(p.build.convert(moved, "bf16"), "f32")


def spread(p: Pool) -> HloInstruction:
    x = p.pick()
    rank = x.shape.rank + 1
    place = int(p.rng.integers(rank))
    dims = [*x.shape.dims[:place], 3, *x.shape.dims[place:]]
    to = [d for d in range(rank) if d != place]
    a = p.build.broadcast(x, dims, to)
    b = p.choose(p.build.broadcast(p.like(x), dims, to), p.build.full(2, x.shape.dtype, dims))
    return p.build.add(p.choose("add", "maximum"), a, b)


def twice(p: Pool) -> HloInstruction:
    a = p.pick()
    b = p.like(a)
    return p.build.add("add", p.build.add("add", a, b), p.build.add("add", b, a))


def constants(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    sum_ = p.build.add("add", p.scalar(1, "f32"), p.scalar(-2, "f32"))
    row = p.build.add("negate", p.build.broadcast(sum_, x.shape.dims))
    return p.build.add("subtract", row, x)


def smooth(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    made = p.build.add(p.choose("logistic", "tanh"), x)
    return p.build.add("round-nearest-even", p.build.add("multiply", made, p.full(0.25, made)))


def clamped(p: Pool) -> HloInstruction:
    x = p.pick("s32")
    low, high = p.choose((-(2**31), 2**31 - 1), (1, 1), (0, 9))
    return p.build.add("clamp", p.scalar(low, "s32"), x, p.scalar(high, "s32"))


def total_order(p: Pool) -> HloInstruction:
    x = p.pick("f32")
    y = p.like(x)
    kind = p.choose("TOTALORDER", "TOTALORDER", None)
    flag = p.build.add("compare", x, y, direction=p.choose("LT", "GE", "EQ"), comparison_type=kind)
    return p.build.select(flag, x, y)


def narrow(p: Pool) -> HloInstruction:
    x = p.build.convert(p.pick("f32"), "bf16")
    y = p.build.add("add", x, p.build.add("negate", x))
    z = p.build.add(p.choose("maximum", "subtract"), x, y)
    if z.shape.rank and p.rng.random() < 0.5:
        z = p.build.reduce([z], [p.build.constant(0.0, "bf16")], (0,), p.reducer("add", "bf16"))
    return p.build.convert(z, "f32")


PATTERNS = (
    narrow,
    neutral,
    negations,
    powers,
    halves,
    bits,
    integer_constants,
    itself,
    comparisons,
    known_comparisons,
    conversions,
    converted_ends,
    spread,
    twice,
    constants,
    smooth,
    clamped,
    total_order,
)
