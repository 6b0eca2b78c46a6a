"""Functions of one operation, and ways to cut their arrays for devices.

Elements are small whole numbers, so that sums over devices are exact in every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.random_hlo.draft import small_integers

Spec = list[list[str]]
Function = Callable[..., Any]
MESHES: tuple[Mapping[str, int], ...] = ({"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 3})
DTYPES = ("f32", "f32", "bf16", "s32", "s8", "u32", "f16")
INDICES = ("int32", "int32", "uint32", "int8", "uint8")
_SPECIAL = (np.nan, np.inf, -np.inf, -0.0)


@dataclass(frozen=True)
class Partition:
    """A function, and how its arguments and results are cut."""

    function: Function
    arguments: list[np.ndarray]
    axes: Mapping[str, int]
    given: list[Spec]
    wanted: list[Spec]


class Choices:
    """Random sizes, arrays and numbers for one function."""

    def __init__(self, seed: int, family: int) -> None:
        self.rng = np.random.default_rng([seed, 73, family])
        self.axes = MESHES[int(self.rng.integers(len(MESHES)))]
        self.dtype = self.one(DTYPES)
        self.special = bool(self.rng.random() < 0.2)

    def one(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[int(self.rng.integers(len(options)))]

    def dims(self, rank: int) -> tuple[int, ...]:
        """Sizes, most of them multiples of the mesh's."""
        devices = math.prod(self.axes.values())
        return tuple(self.one((devices, devices, 2 * devices, 1, 3, 5)) for _ in range(rank))

    def array(self, dims: Sequence[int], dtype: str = "") -> np.ndarray:
        """Small whole numbers; of floats some are special in a share of the programs."""
        made = small_integers(self.rng, dtype or self.dtype, tuple(dims))
        if not self.special or made.dtype.kind in "iu":
            return made
        chosen = self.rng.choice(np.array(_SPECIAL), made.shape).astype(made.dtype)
        return np.asarray(np.where(self.rng.random(made.shape) < 0.2, chosen, made))

    def indices(self, dims: Sequence[int], below: int) -> np.ndarray:
        """Some of them out of range, or as large as their type allows."""
        dtype = np.dtype(self.one(INDICES))
        ends = np.iinfo(dtype)
        low, high = max(ends.min, -2), min(ends.max, below + 2)
        made = self.rng.integers(low, high + 1, dims)
        return np.where(self.rng.random(dims) < 0.1, self.one((ends.min, ends.max)), made).astype(dtype)

    def dim(self, rank: int) -> int:
        """One of the dims."""
        return int(self.rng.integers(rank))

    def spec(self, dims: Sequence[int]) -> Spec:
        """How an array is cut: mostly along a dim that an axis divides."""
        found: Spec = [[] for _ in dims]
        for name in self.rng.permutation(list(self.axes)):
            whole = [math.prod(self.axes[a] for a in names) * self.axes[name] for names in found]
            fits = [d for d, size in enumerate(dims) if size % whole[d] == 0]
            if fits and self.rng.random() < 0.85:
                found[self.one(fits)].append(str(name))
        return found


Made = tuple[Function, list[np.ndarray]]


def counts(c: Choices) -> Made:
    dims, dtype = c.dims(2), c.one((jnp.bfloat16, jnp.float16, np.int8, np.float32))
    dim, size = c.dim(2), c.one((1, 100, 700))
    dims = tuple(n * size if d == dim else n for d, n in enumerate(dims))
    return lambda x: jnp.where(x == 0, lax.broadcasted_iota(dtype, dims, dim), 1), [c.array(dims)]


def gathers(c: Choices) -> Made:
    n, m = c.dims(2)
    mode = c.one(("clip", "fill"))
    return lambda t, i: jnp.take(t, i, 0, mode=mode, fill_value=1), [
        c.array((n, m)),
        c.indices(c.dims(c.one((1, 2))), n),
    ]


def points(c: Choices) -> Made:
    n, m = c.dims(2)
    (k,) = c.dims(1)

    def read(table: Any, rows: Any, columns: Any) -> Any:
        dims = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        at = jnp.stack([rows.astype(np.int32), columns.astype(np.int32)], -1)
        return lax.gather(table, at, dims, (1, 1), mode="clip")

    return read, [c.array((n, m)), c.indices((k,), n), c.indices((k,), m)]


def scatters(c: Choices) -> Made:
    n, m = c.dims(2)
    (k,) = c.dims(1)
    how = c.one(("add", "add", "max", "min", "set"))
    indices = c.indices((k,), n)
    if how == "set":  # one of equal indices is the last, and which is open
        indices = c.rng.permutation(max(n, k))[:k].astype(np.int32)
    return lambda t, i, u: getattr(t.at[i], how)(u, mode="drop"), [c.array((n, m)), indices, c.array((k, m))]


def sums(c: Choices) -> Made:
    dims = c.dims(3)
    gone = tuple(int(d) for d in c.rng.permutation(3)[: c.one((1, 1, 2))])
    how = c.one((lax.add, lax.add, lax.max, lax.min))
    init = {lax.add: 0, lax.max: -9, lax.min: 9}[how]
    dtype = "s32" if c.dtype in ("s8", "u32") else "f32"
    init = init + c.one((0, 0, 2))
    return lambda x: lax.reduce(x, np.asarray(init, x.dtype), how, gone), [c.array(dims, dtype)]


def products(c: Choices) -> Made:
    b, n, m, k = c.dims(4)
    dtype = c.one(("f32", "s32"))
    return lambda x, y: jnp.einsum("bnk,bkm->bnm", x, y), [
        c.array((b, n, k), dtype),
        c.array((b, k, m), dtype),
    ]


def reshapes(c: Choices) -> Made:
    a, b, e = c.dims(3)
    shape = c.one(((a * b, e), (a, b * e), (a * b * e,), (e, b, a), (a, 1, b, e), (b, a * e)))
    return lambda x: x.reshape(shape), [c.array((a, b, e))]


def turns(c: Choices) -> Made:
    dims = c.dims(3)
    order = tuple(int(d) for d in c.rng.permutation(3))
    turned = (c.dim(3),)
    return lambda x: lax.rev(jnp.transpose(x, order), turned), [c.array(dims)]


def broadcasts(c: Choices) -> Made:
    n, m = c.dims(2)
    given = c.one(((n, m), (n, 1), (1, m), (1, 1)))
    (k,) = c.dims(1)
    return lambda x: lax.broadcast_in_dim(x, (n, k, m), (0, 2)), [c.array(given)]


def joins(c: Choices) -> Made:
    dims, dim = c.dims(2), c.dim(2)
    others = [tuple(c.one((1, n, 2 * n)) if d == dim else n for d, n in enumerate(dims)) for _ in range(2)]
    return lambda x, y: jnp.concatenate([x, y], dim), [c.array(d) for d in others]


def pads(c: Choices) -> Made:
    dims, dim = c.dims(2), c.dim(2)
    side = (c.one((-1, 0, 1, 2)), c.one((0, 1, 2)), c.one((0, 0, 1)))
    if dims[dim] + side[0] < 1:
        side = (0, *side[1:])
    sides = [side if d == dim else (0, 0, 0) for d in range(2)]
    return lambda x: lax.pad(x, np.asarray(1, x.dtype), sides), [c.array(dims)]


def slices(c: Choices) -> Made:
    dims, dim = c.dims(2), c.dim(2)
    low = c.one((0, dims[dim] // 2))
    bounds = [slice(low, None, c.one((1, 2))) if d == dim else slice(None) for d in range(2)]
    return lambda x: x[tuple(bounds)], [c.array(dims)]


def parts(c: Choices) -> Made:
    dims, dim = c.dims(2), c.dim(2)
    size = c.one((1, max(1, dims[dim] // 2), dims[dim]))
    sizes = tuple(size if d == dim else n for d, n in enumerate(dims))

    def place(k: Any) -> list[Any]:
        return [k if d == dim else 0 for d in range(2)]

    if c.rng.random() < 0.5:
        return lambda x, k: lax.dynamic_slice(x, place(k), sizes), [
            c.array(dims),
            np.int32(c.one((-1, 1, 9))),
        ]
    return lambda x, u, k: lax.dynamic_update_slice(x, u, place(k)), [
        c.array(dims),
        c.array(sizes),
        np.int32(c.one((-1, 1, 9))),
    ]


def sorts(c: Choices) -> Made:
    dims, dim = c.dims(2), c.dim(2)
    return lambda x, y: lax.sort((x, y), dimension=dim, num_keys=2), [c.array(dims), c.array(dims, "s32")]


def windows(c: Choices) -> Made:
    dims, dim = c.dims(2), c.dim(2)
    size = tuple(c.one((1, 2)) if d == dim else 1 for d in range(2))
    size = tuple(min(s, n) for s, n in zip(size, dims))
    return lambda x: lax.reduce_window(x, np.asarray(-9, x.dtype), lax.max, size, (1, 1), "VALID"), [
        c.array(dims, "f32")
    ]


def bits(c: Choices) -> Made:
    dims = c.dims(2)
    to = c.one((np.int32, np.uint8, np.uint16))
    return lambda x: lax.bitcast_convert_type(x, to), [c.array(dims, "f32")]


def choices(c: Choices) -> Made:
    dims = c.dims(2)
    return lambda p, x, y: lax.select(p > 0, lax.clamp(p, x, jnp.maximum(x, y)), y), [
        c.array(()),
        c.array(dims),
        c.array(dims),
    ]


FAMILIES: dict[str, Callable[[Choices], Made]] = {
    f.__name__: f
    for f in (
        bits, broadcasts, choices, counts, gathers, joins, pads, parts, points, products, reshapes, scatters,
        slices, sorts, sums, turns, windows,
    )
}  # fmt: skip


def partition(family: str, seed: int) -> Partition:
    """A function of a family, with arguments, and shardings of them and of the results."""
    drawn = Choices(seed, list(FAMILIES).index(family))
    function, arguments = FAMILIES[family](drawn)
    given = [drawn.spec(np.shape(a)) for a in arguments]
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    return Partition(function, arguments, drawn.axes, given, [drawn.spec(r.shape) for r in results])
