"""A range of the rows of random numbers, without the others.

Threefry computes every element from the key and the position of the element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from mpmd.tracing.ranges.range import Range, RangeComputation


def leading_rows(equation: Any, wanted: Range) -> RangeComputation | None:
    """A range along the first dim of the random bits of one threefry key; None for others.

    Source: `jax.random.bits` with `jax_threefry_partitionable`: element n of the flat array is computed from
    the halves of n, 32 bits each.
    """
    keys, shape, bits = equation.invars[0].aval, equation.params["shape"], equation.params["bit_width"]
    row = math.prod(shape[1:])
    known = jax.config.jax_threefry_partitionable and "fry" in str(keys.dtype)
    if not known or keys.shape or wanted.dim or row >= 1 << 32 or bits not in (8, 16, 32):
        return None
    ends = np.arange(wanted.start, wanted.stop, dtype=np.uint64) * np.uint64(row)
    high, low = (ends >> np.uint64(32)).astype(np.uint32), ends.astype(np.uint32)

    def compute(given: Sequence[Any]) -> Any:
        first, second = jax.random.key_data(given[0])
        of_row = (wanted.size, *[1] * len(shape[1:]))
        within = jax.lax.iota(np.uint32, row).reshape(1, *shape[1:])
        lower = jnp.asarray(low).reshape(of_row) + within
        carry = (lower < within).astype(np.uint32)
        upper = jnp.broadcast_to(jnp.asarray(high).reshape(of_row), lower.shape) + carry
        one, other = threefry2x32_p.bind(first, second, upper, lower)
        return (one ^ other).astype(f"uint{bits}")

    return RangeComputation(((0, None),), compute)
