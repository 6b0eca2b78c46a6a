"""Random bits as integer arithmetic: threefry and Philox, word by word as XLA computes them."""

from __future__ import annotations

import math

from mpmd.compile.hlo.attributes import Ints
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


class RngBitGeneratorExpander(ComputationPass):
    """Computes random bits by integer arithmetic on their positions.

    (state', bits) = rng-bit-generator(state), algorithm=rng_three_fry
      -> rounds of add, rotate and xor on counters made from an iota

    Requires: no schedule; states of u64[2] or u64[3].
    Ensures: no rng-bit-generator by Threefry-2x32 or Philox-4x32 is left, the device's default being Philox.
    Cost: linear; about 100 instructions each.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; bits come in XLA's order.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"rng-bit-generator": (_expand,)}, _is_known)


def _is_known(generator: HloInstruction) -> bool:
    state = generator.operands[0].shape
    words = state.dtype == "u64" and state.dims in ((2,), (3,))
    result = generator.shape.elements[1] if generator.shape.is_tuple else generator.shape
    known = generator.attributes["algorithm"] in ("rng_three_fry", "rng_philox", "rng_default")
    return words and known and result.info.is_integral and result.info.bits >= 8


def _expand(site: RewriteSite) -> HloInstruction:
    arithmetic = _Words(site.build)
    state = site.operands[0]
    words = [arithmetic.word(state, i) for i in range(state.shape.size)]
    shape = site.shape.elements[1] if site.shape.is_tuple else site.shape
    wide = shape.info.bits == 64
    if site.at.attributes["algorithm"] == "rng_three_fry":
        bits, after = _threefry(arithmetic, words, shape.dims, wide)
    else:
        bits, after = _philox(arithmetic, words, shape.dims, wide)
    numbers = site.build.convert(bits, shape.dtype)
    if not site.shape.is_tuple:
        return numbers
    kept = [site.build.reshape(w, (1,)) for w in after]
    return site.build.tuple([site.build.concatenate(kept, 0), numbers])


class _Words:
    """Arithmetic on arrays of u32 and u64."""

    def __init__(self, build: TrackingBuilder) -> None:
        self.build = build

    def word(self, state: HloInstruction, i: int) -> HloInstruction:
        return self.build.reshape(self.build.slice(state, (i,), (i + 1,)), ())

    def op(self, opcode: str, a: HloInstruction, b: HloInstruction | int) -> HloInstruction:
        """An operation with an array, a scalar or a number."""
        if isinstance(b, int):
            b = self.build.constant(b, a.shape.dtype)
        if b.shape.dims != a.shape.dims:
            b = self.build.broadcast(b, a.shape.dims)
        return self.build.add(opcode, a, b)

    def halves(self, word: HloInstruction) -> tuple[HloInstruction, HloInstruction]:
        """The lower and upper 32 bits of u64, as u32."""
        upper = self.op("shift-right-logical", word, 32)
        return self.build.convert(word, "u32"), self.build.convert(upper, "u32")

    def joined(self, low: HloInstruction, high: HloInstruction) -> HloInstruction:
        low, high = (self.build.convert(h, "u64") for h in (low, high))
        return self.op("or", low, self.op("shift-left", high, 32))

    def counters(self, count: int, start: HloInstruction) -> HloInstruction:
        return self.op("add", self.build.iota("u64", (count,), 0), start)

    def product(self, a: HloInstruction, by: int) -> tuple[HloInstruction, HloInstruction]:
        """The lower and upper 32 bits of a product of u32."""
        return self.halves(self.op("multiply", self.build.convert(a, "u64"), by))


def _threefry(
    words: _Words, state: list[HloInstruction], dims: Ints, wide: bool
) -> tuple[HloInstruction, list[HloInstruction]]:
    build = words.build
    size = math.prod(dims)
    if wide:
        low, high = _threefry_rounds(words, state[0], words.counters(size, state[1]))
        bits = build.reshape(words.joined(low, high), dims)
        return bits, [state[0], words.op("add", state[1], size), *state[2:]]
    shape = dims or (1,)
    even = [d for d, n in enumerate(shape) if n % 2 == 0]
    dim = even[0] if even else max(range(len(shape)), key=lambda d: (shape[d], -d))
    half = (*shape[:dim], -(-shape[dim] // 2), *shape[dim + 1 :])
    count = math.prod(half)
    apart = (*half[: dim + 1], 1, *half[dim + 1 :])
    low, high = _threefry_rounds(words, state[0], words.counters(count, state[1]))
    both = build.concatenate([build.reshape(low, apart), build.reshape(high, apart)], dim + 1)
    both = build.reshape(both, (*shape[:dim], 2 * half[dim], *shape[dim + 1 :]))
    kept = build.slice(both, (0,) * len(shape), shape)
    return build.reshape(kept, dims), [state[0], words.op("add", state[1], count), *state[2:]]


def _threefry_rounds(
    words: _Words, key: HloInstruction, counters: HloInstruction
) -> tuple[HloInstruction, HloInstruction]:
    """Two u32 for each counter."""
    first, second = words.halves(key)
    keys = (first, second, words.op("xor", words.op("xor", first, second), _PARITY))
    x0, x1 = words.halves(counters)
    x0, x1 = words.op("add", x0, keys[0]), words.op("add", x1, keys[1])
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x0 = words.op("add", x0, x1)
            turned = words.op("shift-left", x1, distance)
            x1 = words.op("or", turned, words.op("shift-right-logical", x1, 32 - distance))
            x1 = words.op("xor", x0, x1)
        x0 = words.op("add", x0, keys[(block + 1) % 3])
        x1 = words.op("add", words.op("add", x1, keys[(block + 2) % 3]), block + 1)
    return x0, x1


def _philox(
    words: _Words, state: list[HloInstruction], dims: Ints, wide: bool
) -> tuple[HloInstruction, list[HloInstruction]]:
    build = words.build
    needed = math.prod(dims) * (2 if wide else 1)
    count = -(-needed // 4)
    start = state[2] if len(state) > 2 else state[0]
    low = words.counters(count, state[1])
    carried = build.compare(low, build.broadcast(state[1], low.shape.dims), "LT")
    high = words.op("add", build.convert(carried, "u64"), start)
    parts = _philox_rounds(words, state[0], [*words.halves(low), *words.halves(high)])
    flat = build.concatenate([build.reshape(p, (count, 1)) for p in parts], 1)
    flat = build.slice(build.reshape(flat, (4 * count,)), (0,), (needed,))
    after = words.op("add", state[1], count)
    moved = [state[0], after]
    if len(state) > 2:
        carry = build.convert(build.compare(after, state[1], "LT"), "u64")
        moved.append(words.op("add", state[2], carry))
    if not wide:
        return build.reshape(flat, dims), moved
    pairs = build.reshape(flat, (needed // 2, 2))
    sides = [build.slice(pairs, (0, i), (needed // 2, i + 1)) for i in range(2)]
    return build.reshape(words.joined(*sides), dims), moved


def _philox_rounds(words: _Words, key: HloInstruction, counter: list[HloInstruction]) -> list[HloInstruction]:
    """Four u32 for each counter of four u32."""
    k0, k1 = words.halves(key)
    x0, x1, x2, x3 = counter
    for _ in range(10):
        low0, high0 = words.product(x0, _MULTIPLIERS[0])
        low1, high1 = words.product(x2, _MULTIPLIERS[1])
        x0 = words.op("xor", words.op("xor", high1, x1), k0)
        x2 = words.op("xor", words.op("xor", high0, x3), k1)
        x1, x3 = low1, low0
        k0, k1 = words.op("add", k0, _STEPS[0]), words.op("add", k1, _STEPS[1])
    return [x0, x1, x2, x3]
