"""Attention as models write it: masks, fillers and normalisations in every combination, forward and backward.

Most programs are one kernel or two.  Sizes lie around the widths of register tiles and vectors, so that rows
see no key, one key, a strip of keys or all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpmd.compile.lowering import lower
from tests.support.hlo_meaning import evaluate
from tests.support.random_hlo.draft import Case, Draft

LENGTHS = (2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 49, 63, 64, 65, 100)
WIDTHS = (1, 2, 4, 7, 8, 16, 17, 33)
FILLERS = (-np.inf, float(np.finfo(np.float32).min), -1e30, -1e9, -200.0, -3.0, 0.0)
POSITIONS = ("s32",) * 8 + ("s8", "u8", "u32", "s16", "f32", "bf16")
KINDS = {"s32": np.int32, "s8": np.int8, "u8": np.uint8, "u32": np.uint32, "s16": np.int16, "f32": np.float32,
         "bf16": jnp.bfloat16}  # fmt: skip
_DRAWS = 12

Array = Any


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of one attention: every group of query heads has one head of keys."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int


@dataclass(frozen=True)
class Recipe:
    """A function of arrays, and the arrays by name, all floats of one type."""

    name: str
    function: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    dtype: Any


class _AttentionRecipe:
    """The choices for one program."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.rng, self.pick = draft, draft.rng, draft.pick
        self.names: list[str] = []
        self.sizes = self._sizes()
        self.arrays: dict[str, np.ndarray] = {}
        s = self.sizes
        self.array("q", s.batch, s.groups * s.heads, s.queries, s.width)
        for name in "kv":
            self.array(name, s.batch, s.groups, s.keys, s.width)

    def _sizes(self) -> HeadSizes:
        queries, keys = self.pick(LENGTHS), self.pick(LENGTHS)
        keys = queries if self.rng.random() < 0.4 else keys
        return HeadSizes(
            self.pick((1, 2, 3)), self.pick((1, 1, 2)), self.pick((1, 2)), queries, keys, self.pick(WIDTHS)
        )

    def array(self, name: str, *dims: int) -> None:
        self.arrays[name] = self.rng.standard_normal(dims).astype(np.float32)

    def chosen(self, options: tuple[str, ...]) -> str:
        self.names.append(self.pick(options))
        return self.names[-1]

    # -- parts of the function, each of the arrays by name
    def mask(self) -> Callable[[dict[str, Array]], Array] | None:
        """Which keys each query sees."""
        s, kind = (
            self.sizes,
            self.chosen(
                ("causal",) * 8
                + ("none", "window", "prefix", "segments", "padding", "clipped", "chunks", "after")
            ),
        )
        dtype = KINDS[self.chosen(POSITIONS)]
        offset = self.pick((0, 0, s.keys - s.queries, s.keys - s.queries, 1, -1, 5, -5, -s.keys))
        form, span = self.pick(("ge", "gt", "le", "lt", "not", "difference")), self.pick((1, 3, 16, 40))
        if kind == "segments":
            for name, n in (("seg_q", s.queries), ("seg_k", s.keys)):
                self.arrays[name] = np.sort(self.rng.integers(0, 3, (s.batch, n)), axis=1).astype(np.int32)
        if kind == "padding":
            self.arrays["there"] = self.rng.random((s.batch, s.keys)) < 0.7

        def causal(_: dict[str, Array]) -> Array:
            q = jax.lax.broadcasted_iota(dtype, (s.queries, s.keys), 0)
            k = jax.lax.broadcasted_iota(dtype, (s.queries, s.keys), 1)
            moved = q + np.asarray(offset).astype(dtype)
            return {
                "ge": lambda: moved >= k,
                "gt": lambda: moved > k,
                "le": lambda: k <= moved,
                "lt": lambda: k < moved,
                "not": lambda: ~(k > moved),
                "difference": lambda: moved - k >= np.asarray(0).astype(dtype),
            }[form]()

        def clipped(_: dict[str, Array]) -> Array:
            q, k = (jax.lax.broadcasted_iota(np.int32, (s.queries, s.keys), d) for d in range(2))
            return jnp.minimum(q, span) + offset >= k

        def window(a: dict[str, Array]) -> Array:
            q, k = (jax.lax.broadcasted_iota(np.int32, (s.queries, s.keys), d) for d in range(2))
            return causal(a) & (q + offset - k < span)

        def chunks(a: dict[str, Array]) -> Array:
            q, k = (jax.lax.broadcasted_iota(np.int32, (s.queries, s.keys), d) for d in range(2))
            return causal(a) & (q // span == k // span)

        masks: dict[str, Callable[[dict[str, Array]], Array] | None] = {
            "none": None,
            "causal": causal,
            "window": window,
            "chunks": chunks,
            "clipped": clipped,
            "prefix": lambda a: causal(a) | (jnp.arange(s.keys) < span),
            "after": lambda a: ~causal(a),
            "segments": lambda a: causal(a) & (a["seg_q"][:, None, :, None] == a["seg_k"][:, None, None, :]),
            "padding": lambda a: causal(a) & a["there"][:, None, None, :],
        }
        return masks[kind]

    def scores(self) -> Callable[[dict[str, Array]], Array]:
        """Products of queries and keys, of each head."""
        s, scale, cap = self.sizes, self.pick((1.0, 0.3, 3.0)), self.pick((0.0, 0.0, 0.0, 5.0))
        bias = self.chosen(("plain", "plain", "bias", "alibi"))
        if bias == "bias":
            self.array(
                "bias", *self.pick(((s.queries, s.keys), (s.heads * s.groups, s.queries, s.keys), (s.keys,)))
            )

        def made(a: dict[str, Array]) -> Array:
            k = jnp.repeat(a["k"], s.heads, 1)
            x = jnp.einsum("bhqd,bhkd->bhqk", a["q"], k) * np.float32(scale).astype(a["q"].dtype)
            if cap:
                x = jnp.tanh(x / cap) * cap
            if bias == "bias":
                x = x + a["bias"]
            if bias == "alibi":
                q, p = (jax.lax.broadcasted_iota(np.int32, (s.queries, s.keys), d) for d in range(2))
                x = x + (p - q).astype(x.dtype) * np.asarray(0.25, x.dtype)
            return x

        return made

    def weights(self, mask: Callable[[dict[str, Array]], Array] | None) -> Callable[..., Array]:
        """Scores, masked and normalised."""
        filler, other = self.pick(FILLERS), self.pick(FILLERS)
        how = self.chosen(
            ("softmax",) * 3
            + (
                "where",
                "product",
                "floor",
                "plus one",
                "reciprocal",
                "sigmoid",
                "relu",
                "linear",
                "dropped",
                "sum",
            )
        )
        self.names.append(f"{filler:g}")
        s = self.sizes
        if how == "dropped":
            self.arrays["kept"] = self.rng.random((s.batch, 1, s.queries, s.keys)) < 0.8

        def made(a: dict[str, Array], x: Array) -> tuple[Array, Array]:
            seen = jnp.broadcast_to(mask(a) if mask else jnp.asarray(True), x.shape)
            masked, zero = jnp.where(seen, x, np.asarray(filler, x.dtype)), np.asarray(0, x.dtype)
            top = jax.lax.stop_gradient(masked.max(-1, keepdims=True))
            if how == "floor":
                top = jax.lax.stop_gradient(
                    jnp.where(seen, x, np.asarray(other, x.dtype)).max(-1, keepdims=True)
                )
            if how in ("softmax", "dropped"):
                p = jax.nn.softmax(masked)
                return (jnp.where(a["kept"], p / 0.8, zero), p) if how == "dropped" else (p, p)
            if how == "where":
                p = jax.nn.softmax(x, where=seen)
            elif how == "product":
                p = jnp.exp(x / 4) * seen
            elif how == "sum":
                e = jnp.exp(x / 4) * seen
                p = e / e.sum(-1, keepdims=True)
            elif how == "sigmoid":
                p = jax.nn.sigmoid(masked)
            elif how == "relu":
                p = jnp.maximum(jnp.where(seen, x, zero), zero) ** 2
            elif how == "linear":
                p = jnp.where(seen, x, zero)
            else:
                e = jnp.exp(masked - top)
                total = e.sum(-1, keepdims=True) + (1 if how != "reciprocal" else 0)
                p = e * (1 / total) if how == "reciprocal" else e / total
            return p, masked

        return made

    def recipe(self) -> Recipe:
        """The whole function."""
        s, mask = self.sizes, self.mask()
        scores, weights = self.scores(), self.weights(mask)
        also = self.chosen(("alone", "alone", "alone", "weights", "inner", "statistics"))
        backward = self.chosen(("forward", "backward")) == "backward"
        names = list(self.arrays)

        def forward(a: dict[str, Array]) -> tuple[Array, ...]:
            p, inner = weights(a, scores(a))
            mixed = jnp.einsum("bhqk,bhkd->bhqd", p, jnp.repeat(a["v"], s.heads, 1))
            more = {"weights": (p,), "inner": (inner,), "statistics": (p.max(-1), p.sum(-1))}
            return (mixed, *more.get(also, ()))

        def function(*arrays: Array) -> tuple[Array, ...]:
            a = dict(zip(names, arrays))
            if not backward:
                return forward(a)
            moving = {n: x for n, x in a.items() if x.dtype.kind not in "biu"}
            (mixed, *more), pull = jax.vjp(lambda m: forward(a | m), moving)
            (found,) = pull((mixed / (1 + abs(mixed)), *(jnp.zeros_like(x) for x in more)))
            return (mixed, *found.values())

        if self.rng.random() < 0.2 and not {"product", "sum"} & set(self.names):
            self._make_special(forward=not backward)
        dtype = self.pick((np.float32, np.float32, np.float32, jnp.bfloat16))
        self.names.append(np.dtype(dtype).name)
        arrays = {n: x.astype(dtype) if x.dtype == np.float32 else x for n, x in self.arrays.items()}
        name = f"{s.batch}x{s.groups}x{s.heads} {s.queries}:{s.keys}:{s.width} " + " ".join(self.names)
        return Recipe(name, function, arrays, dtype)

    def _make_special(self, forward: bool) -> None:
        """Scores that are far apart, and queries that see nothing but infinities or NaN.

        Keys and values stay finite, as do exponentials that are multiplied with a mask: what lies behind it
        is not looked at.
        """
        q = self.arrays["q"]
        kind = self.chosen(("large", "zero", *(("inf", "nan") if forward else ())))
        rows = self.rng.random((*q.shape[:-1], 1)) < self.pick((0.1, 1.0))
        chosen = {
            "large": q * 30,
            "zero": q * 0,
            "inf": np.full_like(q, np.inf),
            "nan": np.full_like(q, np.nan),
        }
        self.arrays["q"] = np.where(rows, chosen[kind], q).astype(np.float32)


def recipe(seed: int) -> Recipe:
    """A random attention."""
    return _AttentionRecipe(Draft(np.random.default_rng((7, seed)), "attention", seed)).recipe()


def case(made: Recipe, dtype: Any = None) -> Case:
    """A recipe as a program; of the same numbers in another type, if one is given."""
    dtype = dtype or made.dtype
    arrays = [x if x.dtype.kind in "biu" else x.astype(dtype) for x in made.arrays.values()]
    with jax.enable_x64(dtype == np.float64):
        module = lower(jax.jit(made.function).lower(*arrays).compiler_ir("stablehlo"))
    return Case(made.name, module, arrays, exact=False)


def wrong(made: Recipe, compute: Callable[[list[np.ndarray]], list[np.ndarray]]) -> str:
    """Where results are farther from f64 than a tolerance, and than the program as it is written; "" nowhere.

    Tolerances are relative to the largest element of a row: in f32 what exponentials of large scores lose, in
    bf16 some ulps.  Gradients of quotients, and of one weight that is nearly 1, are small differences of
    rounded products: whose rounding is the luckier differs from array to array.  So a suspect is computed of
    other arrays, too, and is wrong if it is less exact than the program on the average of them.

    Args:
        made: the program.
        compute: the results of arguments.
    """
    tolerance, least = (2e-3, 1e-2) if made.dtype == np.float32 else (0.06, 0.1)
    exact, usual = (case(made, dtype) for dtype in (np.float64, made.dtype))

    def errors(arguments: list[np.ndarray]) -> list[tuple[float, float, float]]:
        """Of each result: its distance from f64, that of the program as it is written, and between them."""
        doubles = [x if x.dtype.kind in "biu" else x.astype(np.float64) for x in arguments]
        with np.errstate(all="ignore"):
            true = jax.tree.leaves(evaluate(exact.module, doubles))
            plain = jax.tree.leaves(evaluate(usual.module, arguments))
            found = zip(compute(arguments), true, plain, strict=True)
            return [(_error(m, t, least), _error(p, t, least), _error(m, p, least)) for m, t, p in found]

    for number, (error, loss, apart) in enumerate(errors(usual.arguments)):
        if error <= tolerance or apart <= tolerance or error <= 4 * loss < np.inf:
            continue
        drawn = [errors(_with_rows_elsewhere(usual.arguments, seed))[number][:2] for seed in range(_DRAWS)]
        mine, plain = np.log(np.clip(drawn, 1e-12, 1e12)).mean(0)
        if mine > plain + np.log(2):
            return f"{made.name}: result {number} is {error:.3g} from f64, where it should be {loss:.3g}"
    return ""


def _with_rows_elsewhere(arguments: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """The rows of each array of floats in another order."""
    rng = np.random.default_rng(seed)
    return [
        x if x.dtype.kind in "biu" else rng.permutation(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        for x in arguments
    ]


def _error(a: np.ndarray, b: np.ndarray, least: float) -> float:
    """The largest difference, relative to the elements of its row; infinite where one of both is NaN."""
    a, b = (np.atleast_1d(np.asarray(x, np.float64)) for x in (a, b))
    size = np.where(np.isfinite(b), np.abs(b), 0)
    scale = size.max(-1, keepdims=True, initial=0) + least * size.max(initial=0) + 1e-30
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b) / scale)
    return float(np.where(np.isnan(apart), np.inf, apart).max(initial=0))
