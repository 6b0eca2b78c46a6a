"""Pieces: the boxes of the leaves of a pytree that processes hold, and who writes each of them.

A leaf that is `Stacked` is one leaf, so that it may be restored whole, or in other parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from mpmd.errors import CheckpointError
from mpmd.jax_compat import is_key
from mpmd.tracing.stages.stacked.stacked import Stacked, is_stacked

MAX_PIECE_BYTES = 64 << 20
"""Larger shards are written in several pieces: a reader holds one piece more than its own share."""

Box = tuple[tuple[int, int], ...]
"""For each dim of a leaf the first index, and the one after the last."""


@dataclasses.dataclass(frozen=True)
class LeafKind:
    """A leaf: its path, such as `['params']['w']`, its shape, and the name of its dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type_text(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return f"{self.path or 'the state'}: {self.type_text}"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf with the arrays that it consists of, and where each begins."""

    kind: LeafKind
    arrays: tuple[tuple[tuple[int, ...], Any], ...]


def leaves_of(tree: Any) -> list[Leaf]:
    """The leaves of a pytree of arrays, or of shapes and dtypes."""
    return [_leaf(keystr(path), value) for path, value in tree_flatten_with_path(tree, is_leaf=is_stacked)[0]]


def _leaf(path: str, value: Any) -> Leaf:
    if not is_stacked(value):
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            value = _number(path, value)
        if isinstance(value, np.ma.MaskedArray):
            raise CheckpointError(f"{path} is a masked array: save its data and its mask apart")
        kind = LeafKind(path, tuple(value.shape), _dtype_name(value.dtype))
        return Leaf(kind, (((0,) * len(value.shape), value),))
    stack: Stacked = value
    starts, arrays = 0, []
    for part in stack.parts:
        offset = [0] * stack.ndim
        offset[stack.dim] = starts
        arrays.append((tuple(offset), part))
        starts += part.shape[stack.dim]
    return Leaf(LeafKind(path, tuple(stack.shape), str(stack.dtype)), tuple(arrays))


def _number(path: str, value: Any) -> np.ndarray:
    """A leaf of Python, with the dtype that JAX gives it."""
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise CheckpointError(
            f"{path or 'the state'} is a {type(value).__name__}; a state consists of arrays and numbers\n"
            "  put what JSON can hold into `extra`"
        )
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise CheckpointError(
            f"{path or 'the state'} is {value!r}, which no {narrow.dtype} holds\n"
            f"  give np.{array.dtype}({value!r})"
        )
    return narrow


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype; files have one order of bytes."""
    return str(dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype)


def native(array: np.ndarray) -> np.ndarray:
    """The array in the order of bytes of this machine."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def box_of(index: Sequence[slice], shape: Sequence[int], offset: Sequence[int]) -> Box:
    """The box of an index of slices of an array that begins at `offset` of its leaf."""
    ends = [of_dim.indices(size)[:2] for of_dim, size in zip(index, shape)]
    return tuple((start + by, stop + by) for (start, stop), by in zip(ends, offset, strict=True))


def held(leaf: Leaf) -> Iterator[tuple[Box, np.ndarray]]:
    """The pieces of a leaf that this process holds, each once; random keys as integers."""
    known = set[Box]()
    for offset, array in leaf.arrays:
        for index, data in _shards(array):
            box = box_of(index, array.shape, offset)
            if box not in known and _elements([box]):
                known.add(box)
                yield from _divided(box, native(np.asarray(data)))


def _shards(array: Any) -> Iterator[tuple[tuple[slice, ...], Any]]:
    if isinstance(array, jax.ShapeDtypeStruct):  # another process may hold it
        return
    if not isinstance(array, jax.Array):
        yield (slice(None),) * array.ndim, array
        return
    if not array.sharding.has_addressable_devices:
        return
    keys = is_key(array.dtype)
    for shard in (jax.random.key_data(array) if keys else array).addressable_shards:
        yield shard.index[: array.ndim], shard.data


def _divided(box: Box, data: np.ndarray) -> Iterator[tuple[Box, np.ndarray]]:
    """A piece in rows of its first dim, each run of them as large as a piece may be."""
    if data.nbytes <= MAX_PIECE_BYTES or not box:
        yield box, data
        return
    first, stop = box[0]
    step = max(1, MAX_PIECE_BYTES * (stop - first) // data.nbytes)
    for begin in range(first, stop, step):
        end = min(begin + step, stop)
        yield ((begin, end), *box[1:]), data[begin - first : end - first]


def as_box(ends: Sequence[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in ends)


def writers(
    kinds: Sequence[LeafKind], claims: Sequence[Sequence[tuple[int, Box]]]
) -> dict[tuple[int, Box], int]:
    """The process that writes each piece: the first of those that hold it.

    A leaf that every process gets may be whole in one and sharded in another: the first process that holds
    all of it then writes it.

    Args:
        kinds: the leaves.
        claims: for each process the pieces that it holds: position of the leaf, and box.

    Raises:
        CheckpointError: no process holds some of a leaf, or they hold different pieces of it.
    """
    held: list[list[list[Box]]] = [[[] for _ in claims] for _ in kinds]
    for process, pieces in enumerate(claims):
        for leaf, box in pieces:
            held[leaf][process].append(box)
    chosen_by: dict[tuple[int, Box], int] = {}
    for leaf, (kind, of_leaf) in enumerate(zip(kinds, held, strict=True)):
        together = {box: process for process in reversed(range(len(claims))) for box in of_leaf[process]}
        alone = (dict.fromkeys(boxes, process) for process, boxes in enumerate(of_leaf))
        whole, size = math.prod(kind.shape), _elements(together)
        chosen = next((boxes for boxes in (together, *alone) if _elements(boxes) == whole), None)
        if chosen is None:
            what = "no process holds all" if size < whole else "processes hold different parts"
            raise CheckpointError(f"{what} of {kind}\n  give the state that a step returned in every process")
        chosen_by |= {(leaf, box): process for box, process in chosen.items()}
    return chosen_by


def replicas_that_differ(
    kinds: Sequence[LeafKind], claims: Sequence[Sequence[tuple[int, Sequence[Sequence[int]], int]]]
) -> list[str]:
    """Warnings of leaves where processes differ in one place; the first process's value is saved.

    Args:
        kinds: the leaves.
        claims: for each process its pieces: position of the leaf, box, and checksum.
    """
    first: dict[tuple[int, Box], tuple[int, int]] = {}
    warnings: dict[int, str] = {}
    for process, pieces in enumerate(claims):
        for leaf, ends, digest in pieces:
            holder, known = first.setdefault((leaf, as_box(ends)), (process, digest))
            if known != digest:
                text = f"{kinds[leaf]} has other values in process {process} than in process {holder}"
                warnings.setdefault(leaf, f"{text}, whose are saved")
    return list(warnings.values())


def _elements(boxes: Collection[Box]) -> int:
    return sum(math.prod(stop - start for start, stop in box) for box in boxes)


def intersection(one: Box, other: Box) -> Box | None:
    """The common box; None if there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The index of a box in an array that holds another."""
    return tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(inner, outer, strict=True))
