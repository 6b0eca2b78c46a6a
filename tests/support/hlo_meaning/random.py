"""Semantics of random numbers: counter-based generators, bit for bit those of XLA.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): Threefry-2x32 with 20
rounds and Philox-4x32 with 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpmd.compile.hlo.evaluator.values import Array, Rule, Value, narrow
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError

if TYPE_CHECKING:
    from tests.support.hlo_meaning.meaning import Meaning

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_PHILOX_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_PHILOX_STEP = (0x9E3779B9, 0xBB67AE85)
_MASK32 = np.uint64(0xFFFFFFFF)


def threefry(key: tuple[int, int], x0: Array, x1: Array) -> tuple[Array, Array]:
    """Two u32 outputs for each pair of u32 inputs."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0 = x0 + np.uint32(keys[0])
    x1 = x1 + np.uint32(keys[1])
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance))
            x1 = x0 ^ x1
        x0 = x0 + np.uint32(keys[(block + 1) % 3])
        x1 = x1 + np.uint32((keys[(block + 2) % 3] + block + 1) & 0xFFFFFFFF)
    return x0, x1


def philox(key: tuple[int, int], counter: list[Array]) -> list[Array]:
    """Four u32 outputs for each counter of four u32, held in u64."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = x0 * np.uint64(_PHILOX_MULTIPLY[0]), x2 * np.uint64(_PHILOX_MULTIPLY[1])
        x0, x1, x2, x3 = (
            (p1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            p1 & _MASK32,
            (p0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1),
            p0 & _MASK32,
        )
        k0, k1 = (k0 + _PHILOX_STEP[0]) & 0xFFFFFFFF, (k1 + _PHILOX_STEP[1]) & 0xFFFFFFFF
    return [x0, x1, x2, x3]


def _split(word: int) -> tuple[int, int]:
    return word & 0xFFFFFFFF, word >> 32


def _threefry_bits(state: list[int], shape: Shape) -> tuple[Array, list[int]]:
    """Bits as u32 or u64, and the new state [key, counter]."""
    key, start = _split(state[0]), state[1]
    if shape.info.bits == 64:
        x0, x1 = threefry(key, *_counters(start, shape.size))
        bits = x0.astype(np.uint64) | x1.astype(np.uint64) << np.uint64(32)
        return bits.reshape(shape.dims), [state[0], (start + shape.size) % (1 << 64)]
    dims = shape.dims or (1,)
    even = [d for d, size in enumerate(dims) if size % 2 == 0]
    dim = even[0] if even else max(range(len(dims)), key=lambda d: (dims[d], -d))
    half = (*dims[:dim], -(-dims[dim] // 2), *dims[dim + 1 :])
    count = math.prod(half)
    x0, x1 = (x.reshape(half) for x in threefry(key, *_counters(start, count)))
    both = np.stack([x0, x1], axis=dim + 1).reshape((*dims[:dim], 2 * half[dim], *dims[dim + 1 :]))
    kept = both[(slice(None),) * dim + (slice(0, dims[dim]),)].reshape(shape.dims)
    return kept, [state[0], (start + count) % (1 << 64)]


def _counters(start: int, count: int) -> tuple[Array, Array]:
    words = np.arange(count, dtype=np.uint64) + np.uint64(start)
    return words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)


def _philox_bits(state: list[int], shape: Shape) -> tuple[Array, list[int]]:
    """Bits as u32 or u64, and the new state [key, counter low (, counter high)].

    With two words of state the key also serves as the counter's upper half.
    """
    wide = shape.info.bits == 64
    words = shape.size * (2 if wide else 1)
    count = -(-words // 4)
    start = state[1] + ((state[2] if len(state) > 2 else state[0]) << 64)
    low = np.arange(count, dtype=np.uint64) + np.uint64(state[1])
    high = np.uint64(start >> 64) + (low < np.uint64(state[1])).astype(np.uint64)
    parts = [low & _MASK32, low >> np.uint64(32), high & _MASK32, high >> np.uint64(32)]
    out = np.stack(philox(_split(state[0]), parts), axis=1).reshape(-1)[:words]
    after = (start + count) % (1 << 128)
    counter = [after & ((1 << 64) - 1), after >> 64][: len(state) - 1]
    if wide:
        pairs = out.reshape(-1, 2)
        bits = pairs[:, 0] | pairs[:, 1] << np.uint64(32)
    else:
        bits = out.astype(np.uint32)
    return bits.reshape(shape.dims), [state[0], *counter]


def _rng_bit_generator(instruction: HloInstruction, operands: Sequence[Value], engine: Meaning) -> Value:
    """Threefry, or Philox for the device's default."""
    algorithm = instruction.attributes["algorithm"]
    state = [int(word) for word in operands[0]]
    pair = instruction.shape.is_tuple
    shape = instruction.shape.elements[1] if pair else instruction.shape
    if operands[0].dtype != np.uint64 or len(state) not in (2, 3):
        raise HloError(
            f"{instruction.name}: the state must be u64[2] or u64[3], got {instruction.operands[0].shape}"
        )
    if algorithm == "rng_three_fry":
        bits, after = _threefry_bits(state, shape)
    elif algorithm in ("rng_philox", "rng_default"):
        bits, after = _philox_bits(state, shape)
    else:
        raise HloError(f"{instruction.name}: unknown algorithm {algorithm}")
    made = _as_type(bits, shape)
    return (np.array(after, np.uint64), made) if pair else made


def _as_type(bits: Array, shape: Shape) -> Array:
    if shape.info.is_integral and shape.info.bits >= 32:
        return bits.view(shape.numpy_dtype)
    if shape.info.is_integral:
        return narrow(bits.astype(np.int64), shape.dtype)
    raise HloError(f"rng-bit-generator gives integers, not {shape}")


RULES: dict[str, Rule] = {
    "rng-bit-generator": _rng_bit_generator,
}
