"""Random bits, or a range of them without the others, in one loop without temporaries.

Threefry computes every element from the key and the position of the element.  JAX computes it on CPUs by a
loop over its rounds, whose state is several times as large as the result; without that loop XLA fuses all
rounds with the operations that use the bits, and takes a sixth of the time.
Measurements: docs/decisions/memory-of-processes.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.tracing.ranges.range import Range, RangeComputation

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def random_bits(equation: Any, wanted: Range | None) -> RangeComputation | None:
    """A range of the keys, or of the first dim of the bits of each key; None for other dims and generators.

    Args:
        equation: of the primitive `random_bits`.
        wanted: the range; None for all bits.

    Source: `jax.random.bits` with `jax_threefry_partitionable`: element n of the flat array of a key is
    computed from the halves of n, 32 bits each.
    """
    keys, shape, bits = equation.invars[0].aval, equation.params["shape"], equation.params["bit_width"]
    rank, row = len(keys.shape), math.prod(shape[1:])
    known = jax.config.jax_threefry_partitionable and "fry" in str(keys.dtype)
    if not known or row >= 1 << 32 or bits not in (8, 16, 32):
        return None
    read, rows = wanted, Range(0, 0, shape[0] if shape else 1)
    if wanted is not None and wanted.dim >= rank:
        read, rows = None, wanted.along(0)
        if wanted.dim > rank:
            return None
    ends = np.arange(rows.start, rows.stop, dtype=np.uint64) * np.uint64(row)
    high, low = (ends >> np.uint64(32)).astype(np.uint32), ends.astype(np.uint32)

    def compute(given: Sequence[Any]) -> Any:
        data = jax.random.key_data(given[0])
        first, second = (data[..., k].reshape(*data.shape[:-1], 1, *[1] * len(shape[1:])) for k in range(2))
        of_row = (rows.size, *[1] * len(shape[1:]))
        within = jax.lax.iota(np.uint32, row).reshape(1, *shape[1:])
        lower = jnp.asarray(low).reshape(of_row) + within
        upper = jnp.asarray(high).reshape(of_row) + (lower < within).astype(np.uint32)
        one, other = _threefry(first, second, upper, lower)
        return (
            (one ^ other)
            .astype(f"uint{bits}")
            .reshape(*data.shape[:-1], *([rows.size] if shape else []), *shape[1:])
        )

    return RangeComputation(((0, read),), compute)


def _threefry(first: Any, second: Any, upper: Any, lower: Any) -> tuple[Any, Any]:
    """Two words of random bits for each word of a key, and of a position; `u32` arrays that are broadcast.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011: Threefry-2x32 with 20 rounds.
    """
    keys = first, second, first ^ second ^ _PARITY
    one, other = upper + keys[0], lower + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            one = one + other
            other = one ^ (other << np.uint32(distance) | other >> np.uint32(32 - distance))
        one = one + keys[(group + 1) % 3]
        other = other + keys[(group + 2) % 3] + np.uint32(group + 1)
    return one, other
