"""Small arrays that leave a mesh together are one message.

A message costs 0.3 ms of CPU time, over all threads of both processes, whether it has 4 bytes or 64 KiB.  The
sender puts the bits of several arrays into one array of 32-bit integers, the receiver takes them apart again.
Both are programs of XLA.

Arrays go together only if no other process can be needed between the first and the last of them:

    s 0.0   s 1.0   s 0.1          0.0 and 0.1 are one message
    s 0.0   run f   s 0.1          two: `f` may wait for an answer to 0.0
    s 0.0   s 0.2 (was received)   two: 0.2 may be the answer
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpmd.runtime.channels.reshard import assembling
from mpmd.runtime.graph import BufferType
from mpmd.runtime.instructions import Feed, Run, Send, writes
from mpmd.runtime.program import Stream

_SMALL_ELEMENTS = 1024
_DTYPES = frozenset({"float32", "int32", "uint32"})


def leaving_together(stream: Stream, channel: int) -> list[tuple[int, ...]]:
    """The messages of a channel that may be one, by their sequence numbers in the order of the sends.

    Args:
        stream: of the sender.
        channel: between meshes of one device each.
    """
    own = {b for op in stream.instructions if isinstance(op, (Run, Feed)) for b in writes(op)}
    groups: list[list[int]] = [[]]
    for op in stream.instructions:
        if isinstance(op, Run):
            groups.append([])
        elif isinstance(op, Send) and op.channel == channel and op.buffer in own:
            if _is_small(stream.buffers[op.buffer].type):
                groups[-1].append(op.sequence)
    return [tuple(group) for group in groups if len(group) > 1]


def _is_small(type_: BufferType) -> bool:
    return type_.dtype in _DTYPES and 0 < _elements(type_) <= _SMALL_ELEMENTS


def _elements(type_: BufferType) -> int:
    return math.prod(type_.shape)


@jax.jit
def pack(*arrays: jax.Array) -> jax.Array:
    """The bits of arrays with elements of 32 bits, one after the other."""
    return jnp.concatenate([lax.bitcast_convert_type(array, np.uint32).reshape(-1) for array in arrays])


def packed_size(types: Sequence[BufferType]) -> int:
    """The length of the array that `pack` makes."""
    return sum(map(_elements, types))


def unpacker(types: Sequence[BufferType]) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """The function that takes apart what `pack` made; it does not wait for it."""
    unpack = functools.partial(_unpack, kinds=tuple((type_.shape, type_.dtype) for type_ in types))

    def unpacked(bits: jax.Array) -> tuple[jax.Array, ...]:
        with assembling():
            return unpack(bits)

    return unpacked


@functools.partial(jax.jit, static_argnames="kinds")
def _unpack(bits: jax.Array, kinds: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[jax.Array, ...]:
    found, start = [], 0
    for shape, dtype in kinds:
        end = start + math.prod(shape)
        found.append(lax.bitcast_convert_type(bits[start:end].reshape(shape), np.dtype(dtype)))
        start = end
    return tuple(found)
